"""Secrets out of every text that is printed, logged or stored."""

from __future__ import annotations

import base64
import re
import urllib.parse
from collections.abc import Sequence

MASK = "***"
_SHORTEST = 4
"""Shorter strings are not taken for secrets: masking them would eat ordinary text."""
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")
_SENSITIVE_OPTION = re.compile(r"(?i)(api.?key|token|secret|password|authorization)")


class Redactor:
    """Masks known secrets in any usual spelling, and whatever looks like credentials."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        shapes: set[str] = set()
        for secret in secrets:
            if len(secret) < _SHORTEST:
                continue
            encoded = secret.encode()
            shapes.update((secret, urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret)))
            shapes.update((encoded.hex(), base64.b64encode(encoded).decode().rstrip("=")))
            shapes.add(base64.urlsafe_b64encode(encoded).decode().rstrip("="))
            shapes.add(secret.encode("unicode_escape").decode())
        self._shapes = sorted(shapes, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text with every secret masked."""
        for shape in self._shapes:
            text = text.replace(shape, MASK)
        text = _BEARER.sub(lambda match: f"{match[1]} {MASK}", text)
        return _USERINFO.sub(lambda match: f"{match[1]}{MASK}@", text)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """A command line as it may be stored: values of options that carry credentials are masked."""
        kept: list[str] = []
        hide_next = False
        for argument in arguments:
            name, equals, value = argument.partition("=")
            if hide_next:
                kept.append(_mask_value(argument))
                hide_next = False
            elif argument.startswith("-") and (name == "--header" or _SENSITIVE_OPTION.search(name)):
                env_name = name.endswith("-env")
                kept.append(argument if env_name or not equals else f"{name}={_mask_value(value)}")
                hide_next = not equals and not env_name
            else:
                kept.append(self(argument))
        return kept


def _mask_value(value: str) -> str:
    """`Name: value` keeps its name; anything else goes."""
    name, colon, _ = value.partition(":")
    return f"{name}: {MASK}" if colon else MASK
