"""One request and its answer as they are observed, and the limits it may be held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentx.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of one call in nanoseconds; None is no limit."""

    connect_ns: int | None = 30 * NS_PER_S
    first_byte_ns: int | None = None
    idle_ns: int | None = None
    total_ns: int | None = None


class Closable(Protocol):
    """What carries an exchange."""

    def close(self) -> None:
        """Close at once."""
        ...


class Exchange:
    """One request and everything observed of its answer; times count from the client's clock origin."""

    __slots__ = (
        "attempts",
        "body",
        "closed_clean",
        "complete",
        "connection",
        "connection_reused",
        "end_ns",
        "error_kind",
        "error_message",
        "head",
        "header_lines",
        "headers_ns",
        "last_read_ns",
        "on_backlog",
        "on_end",
        "reads",
        "sent_ns",
        "started_ns",
        "status",
        "uploaded_ns",
    )

    def __init__(self, head: bytes, body: bytes, on_end: Callable[[Exchange], None]) -> None:
        """`head` is the request head up to its blank line; `on_end` is called once, when all is over."""
        self.head = head
        self.body = body
        self.on_end = on_end
        self.on_backlog: Callable[[Exchange], None] | None = None
        """Called when many reads have gathered, to take them out of `reads`."""
        self.started_ns = 0
        self.sent_ns: int | None = None
        self.uploaded_ns: int | None = None
        self.headers_ns: int | None = None
        self.last_read_ns: int | None = None
        self.end_ns: int | None = None
        self.status: int | None = None
        self.header_lines: list[tuple[bytes, bytes]] = []
        self.reads: list[tuple[int, bytes]] = []
        """(arrival, body bytes) of each socket read."""
        self.complete = False
        """The answer's framing says it is whole."""
        self.closed_clean = False
        """The server closed the connection in order before the answer was whole."""
        self.error_kind: str | None = None
        self.error_message: str | None = None
        self.connection_reused = False
        self.attempts = 0
        self.connection: Closable | None = None

    def header(self, name: str) -> str:
        """The value of a response header, of the last one of this name; empty where there is none."""
        sought = name.encode()
        for known, value in reversed(self.header_lines):
            if len(known) == len(sought) and known.lower() == sought:
                return value.decode("latin-1")
        return ""

    @property
    def says_its_end(self) -> bool:
        """The framing tells where the answer ends; otherwise the connection's end is its end."""
        return "chunked" in self.header("transfer-encoding").lower() or self.header("content-length").isdigit()

    def content(self) -> bytes:
        """The body as received."""
        return b"".join(data for _, data in self.reads)

    def broken_limit(self, limits: Limits, now: int) -> tuple[str, str] | None:
        """(error kind, message) of the first limit that it has passed in flight; None where it keeps them."""
        since = self.sent_ns if self.sent_ns is not None else self.started_ns
        checks = [("total_timeout", limits.total_ns, since)]
        if self.last_read_ns is None:
            checks.append(("first_byte_timeout", limits.first_byte_ns, since))
        checks.append(("idle_timeout", limits.idle_ns, self.last_read_ns or since))
        for kind, limit, start in checks:
            if limit is not None and now - start >= limit:
                return kind, f"{kind.replace('_', ' ')}: limit {limit / NS_PER_S:g} s"
        return None

    def lacks(self) -> str:
        """What it still waits for in flight."""
        if self.sent_ns is None:
            return "no connection (TCP, or its TLS handshake)"
        return "no answer" if self.last_read_ns is None else "no complete answer"
