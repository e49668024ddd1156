"""Nanoseconds, tokens and counts as people read and write them."""

from __future__ import annotations

import re

from agentx.errors import InputError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(ns|us|ms|s|m|min|h)?\s*")
_DURATION_NS = {
    "ns": 1,
    "us": 1_000,
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
}


LONGEST_NS = 36_500 * 86400 * NS_PER_S
"""A century: times are 64-bit nanoseconds."""


def seconds_to_ns(seconds: float) -> int:
    """Nanoseconds, rounded to the nearest."""
    return round(seconds * NS_PER_S)


def parse_duration_ns(text: str, option: str = "duration") -> int:
    """Nanoseconds from `900`, `900s`, `15m`, `1.5h`, `250ms`; a bare number is seconds.

    Raises InputError naming `option` where the text is no duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InputError(f"{option}: {text!r} is not a duration", "write a number and a unit: 900s, 15m, 1.5h, 250ms")
    found = round(float(match[1]) * _DURATION_NS[match[2] or "s"])
    if found > LONGEST_NS:
        raise InputError(f"{option}: {text!r} is over {LONGEST_NS // (86400 * NS_PER_S)} days", "write a shorter time")
    return found


def format_duration(ns: float | None) -> str:
    """A duration with three significant digits and its unit (`1.17 s`, `76.5 ms`), `-` for None."""
    if ns is None:
        return "-"
    for unit, size in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", 1_000)):
        if abs(ns) >= size:
            return f"{_three_digits(ns / size)} {unit}"
    return "0 s" if ns == 0 else f"{_three_digits(ns)} ns"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_count(value: float | None) -> str:
    """A whole number with thousands separators, `-` for None."""
    return "-" if value is None else f"{value:,.0f}"


def format_percent(ratio: float | None, digits: int = 1) -> str:
    """A ratio as a percentage (`88.2 %`), `-` for None."""
    return "-" if ratio is None else f"{ratio * 100:.{digits}f} %"


def printable(text: str) -> str:
    """The text on one line and safe to print: servers may send what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else ascii(c)[1:-1] for c in text)
