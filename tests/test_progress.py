"""The live display: right figures, bounded memory, plain lines off a terminal."""

from __future__ import annotations

import io
import statistics
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentx.cli.progress import LINE_S, RECENT_S, Progress, RecentMedian, RecentRatio
from agentx.lanes import Lanes
from agentx.turns import CallRow

S = 1_000_000_000
MS = 1_000_000


@dataclass
class Stand:
    """What the display asks of the lanes."""

    busy: int = 3
    size: int = 4
    in_flight: int = 5
    window: tuple[int, int] | None = (10 * S, 70 * S)


@dataclass
class Wall:
    """A wall clock that the test moves."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Shown:
    """A display on a buffer, at a wall time of ours."""

    terminal: bool = False
    simulated: bool = False
    wall: Wall = field(default_factory=Wall)

    def __post_init__(self) -> None:
        self.file = io.StringIO()
        out = Console(file=self.file, force_terminal=self.terminal, width=200, highlight=False, markup=False)
        self.progress = Progress(60 * S, simulated=self.simulated, out=out, wall_s=self.wall)

    def tick(self, now_ns: int, stand: Stand, after_s: float = LINE_S) -> str:
        """What a tick adds, `after_s` of wall time later."""
        before = len(self.file.getvalue())
        self.wall.now_s += after_s
        self.progress.tick(now_ns, cast(Lanes, stand))
        return self.file.getvalue()[before:]


def ended(at_ns: int, status: str = "ok", **columns: Any) -> CallRow:
    given = {"sent_ns": at_ns - 400 * MS, "first_token_ns": at_ns - 300 * MS, "last_token_ns": at_ns,
             "completion_tokens": 11, "prompt_tokens": 1000, "cached_tokens": 250}  # fmt: skip
    return CallRow("s", 0, 0, 0, None, "s", "measure", status, end_ns=at_ns, **{**given, **columns})


def test_plain_lines_tell_where_a_run_stands() -> None:
    shown = Shown()
    assert shown.tick(S, Stand(window=None)) == (
        "time warm-up 1 s  lanes 3 of 4 busy  calls 0 done, 0 failed, 5 in flight  "
        "last minute TTFT P50 -, ITL P50 -, cache hit - (n 0)\n"
    )
    for status in ("ok", "ok", "error", "truncated", "overflow", "cancelled"):
        shown.progress.observe(ended(20 * S, status))
    shown.progress.observe(ended(20 * S, "skipped", sent_ns=None))
    assert shown.tick(22 * S, Stand()) == (
        "time 12 of 60 s  lanes 3 of 4 busy  calls 2 done, 3 failed, 5 in flight, 1 cut  "
        "last minute TTFT P50 100 ms, ITL P50 29.9 ms, cache hit 25.0 % (n 2)  last call ended 2 s ago\n"
    )
    assert shown.tick(75 * S, Stand()).startswith("time window over, draining 5 s")
    assert "TTFT P50 -, ITL P50 -, cache hit - (n 0)" in shown.tick(81 * S, Stand())


def test_lines_keep_their_distance_however_often_it_ticks() -> None:
    shown = Shown()
    lines = [shown.tick(n * S, Stand(), after_s=1.0) for n in range(35)]
    assert sum(bool(line) for line in lines) == 3


def test_what_is_not_known_is_not_shown_as_zero() -> None:
    shown = Shown()
    shown.progress.observe(ended(20 * S, completion_tokens=1, cached_tokens=None))
    shown.progress.observe(ended(20 * S, completion_tokens=None, cached_tokens=2000))
    shown.progress.observe(ended(20 * S, first_token_ns=None, completion_tokens=0, cached_tokens=None))
    assert "ITL P50 -, cache hit - (n 2)" in shown.tick(20 * S, Stand())


def test_a_panel_on_a_terminal_and_nothing_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = Shown(terminal=True, simulated=True)
    with shown.progress:
        shown.progress.observe(ended(40 * S))
        drawn = shown.tick(40 * S, Stand(), after_s=0.25)
        assert "agentx replay" in drawn
        assert "30 of 60 s (virtual)" in drawn
        assert "━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌" in drawn
        assert shown.tick(40 * S, Stand(), after_s=0.1) == ""
        shown.progress.note("a word")
        assert "a word\n" in shown.file.getvalue()
    assert shown.file.getvalue().endswith("\x1b[1A\x1b[2K")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown = Shown(terminal=True)
    with shown.progress:
        assert shown.tick(10 * S, Stand()).startswith("time 0 of 60 s")
        assert "\x1b[" not in shown.file.getvalue()


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(1e3, 1e12)), min_size=1, max_size=80))
@settings(max_examples=60, deadline=None)
def test_the_recent_median_is_that_of_the_last_minute_to_one_percent(steps: list[tuple[int, float]]) -> None:
    recent, ratio = RecentMedian(), RecentRatio()
    second, seen = 0, []
    for step, value in steps:
        second += 20 * step
        recent.add(second, value)
        ratio.add(second, 1, int(value))
        seen.append((second, value))
    recent.forget(second)
    last = [value for at, value in seen if at > second - RECENT_S]
    assert recent.n == len(last)
    assert recent.value_ns() == pytest.approx(statistics.median_low(last), rel=0.0051)
    ratio.forget(second)
    assert ratio.value() == pytest.approx(len(last) / sum(map(int, last)))


def test_memory_stays_bounded() -> None:
    shown = Shown()
    for n in range(100_000):
        shown.progress.observe(ended(n * 10 * MS, first_token_ns=n * 10 * MS - 400 * MS + n))
    recent = shown.progress._ttft
    assert len(recent._seconds) <= RECENT_S
    assert recent.n == sum(sum(counts.values()) for _, counts in recent._seconds) == sum(recent._bins)
    assert recent.n <= RECENT_S * 100
