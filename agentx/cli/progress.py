"""The live display of a replay: a line that is rewritten on a terminal, plain lines off it."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from rich.live import Live
from rich.text import Text

from agentx.cli.tables import console
from agentx.turns import CallRow
from agentx.units import NS_PER_S, format_duration, format_percent

if TYPE_CHECKING:
    from agentx.lanes import Lanes

RECENT_NS = 60 * NS_PER_S
"""What counts as the last minute."""
MOST_RECENT = 20_000
"""Calls of the last minute that are kept for its medians."""
LINE_NS = 10 * NS_PER_S
"""Time between two plain lines, by the run's own clock."""
SIM_LINE_NS = 300 * NS_PER_S


class Progress:
    """An observer that shows a run on stderr."""

    def __init__(self, duration_ns: int, *, simulated: bool = False) -> None:
        self._out = console(stderr=True)
        self._duration_ns = duration_ns
        self._line_ns = SIM_LINE_NS if simulated else LINE_NS
        self._live: Live | None = None
        self._recent: deque[tuple[int, int | None, float | None, int, int]] = deque(maxlen=MOST_RECENT)
        self._done = self._failed = 0
        self._last_end_ns = 0
        self._next_line_ns = 0

    def __enter__(self) -> Progress:
        """Start the display."""
        if self._out.is_terminal:
            self._live = Live(console=self._out, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        if self._live is not None:
            self._live.stop()

    def observe(self, row: CallRow) -> None:
        """A turn has become a row."""
        if row.end_ns is None:
            return
        self._last_end_ns = max(self._last_end_ns, row.end_ns)
        if row.status != "ok":
            self._failed += row.status in ("error", "truncated", "empty", "overflow")
            return
        self._done += 1
        ttft = itl = None
        if row.first_token_ns is not None and row.sent_ns is not None:
            ttft = row.first_token_ns - row.sent_ns
            tokens = row.completion_tokens or 0
            if row.last_token_ns is not None and tokens >= 2 and row.last_token_ns > row.first_token_ns:
                itl = (row.last_token_ns - row.first_token_ns) / (tokens - 1)
        known = row.cached_tokens is not None and row.prompt_tokens is not None
        cached, prompt = (row.cached_tokens or 0, row.prompt_tokens or 0) if known else (0, 0)
        self._recent.append((row.end_ns, ttft, itl, cached, prompt))

    def tick(self, now_ns: int, lanes: Lanes) -> None:
        """Show where the run stands."""
        if self._live is not None:
            self._live.update(Text(self._text(now_ns, lanes)))
        elif now_ns >= self._next_line_ns:
            self._next_line_ns = now_ns + self._line_ns
            self._out.print(self._text(now_ns, lanes))

    def note(self, text: str) -> None:
        """Tell something now."""
        (self._live.console if self._live is not None else self._out).print(text)

    def _text(self, now_ns: int, lanes: Lanes) -> str:
        while self._recent and self._recent[0][0] < now_ns - RECENT_NS:
            self._recent.popleft()
        ttft = [entry[1] for entry in self._recent if entry[1] is not None]
        itl = [entry[2] for entry in self._recent if entry[2] is not None]
        prompt = sum(entry[4] for entry in self._recent)
        hit = sum(entry[3] for entry in self._recent) / prompt if prompt else None
        quiet = now_ns - self._last_end_ns
        parts = [
            self._phase(now_ns, lanes),
            f"{lanes.busy}/{lanes.size} lanes busy",
            f"{self._done:,} done, {self._failed:,} failed, {lanes.in_flight:,} in flight",
            f"last minute: TTFT {format_duration(_median(ttft))}, ITL {format_duration(_median(itl))}, "
            f"cache {format_percent(hit)}",
        ]
        if lanes.in_flight and quiet > RECENT_NS:
            parts.append(f"nothing has ended for {format_duration(quiet)}")
        return "  ".join(parts)

    def _phase(self, now_ns: int, lanes: Lanes) -> str:
        window = lanes.window
        if window is None:
            return f"warm-up {now_ns / NS_PER_S:,.0f} s"
        if now_ns < window[1]:
            return f"{(now_ns - window[0]) / NS_PER_S:,.0f}/{self._duration_ns / NS_PER_S:,.0f} s"
        return f"drain {(now_ns - window[1]) / NS_PER_S:,.0f} s"


def _median(values: list[int] | list[float]) -> float | None:
    return float(np.median(values)) if values else None
