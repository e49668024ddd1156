"""The live display of a replay, on stderr: a panel on a terminal, plain lines off it.

It runs on the event loop that stamps times, so it must cost next to nothing: a call that ends adds to
a few counters, and what is shown is worked out from them a few times a second, in constant memory.
There is no thread; nothing else writes to stderr meanwhile but `note`.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING

from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from agentx.cli.tables import console
from agentx.turns import FAILED, CallRow
from agentx.units import NS_PER_S, format_duration, format_percent, printable

if TYPE_CHECKING:
    from rich.console import Console

    from agentx.replay import LanesView

PANEL_S = 0.25
LINE_S = 10.0
"""Wall-clock time between two pictures of the panel, and between two plain lines."""
RECENT_S = 60
BIN = 0.01
"""Width of a histogram's bins, as a natural logarithm: medians are shown to 0.5 %."""
BINS = 3000
"""From 1 ns to 3 hours."""
BAR_COLUMNS = 24


class RecentMedian:
    """The median of what was seen in the last minute, in constant memory: a histogram for each second."""

    def __init__(self) -> None:
        self._bins = [0] * BINS
        self._seconds: deque[tuple[int, dict[int, int]]] = deque()
        self.n = 0

    def add(self, second: int, value_ns: float) -> None:
        """See a value in this second; seconds do not go back."""
        if not self._seconds or self._seconds[-1][0] < second:
            self.forget(second)
            self._seconds.append((second, {}))
        place = min(int(math.log(max(value_ns, 1)) / BIN), BINS - 1)
        counts = self._seconds[-1][1]
        counts[place] = counts.get(place, 0) + 1
        self._bins[place] += 1
        self.n += 1

    def forget(self, second: int) -> None:
        """Let go of what was seen a minute before this second."""
        while self._seconds and self._seconds[0][0] <= second - RECENT_S:
            for place, count in self._seconds.popleft()[1].items():
                self._bins[place] -= count
                self.n -= count

    def value_ns(self) -> float | None:
        """The middle of the bin that holds the median; None where nothing was seen."""
        if self.n == 0:
            return None
        return math.exp((bisect_left(list(accumulate(self._bins)), (self.n + 1) // 2) + 0.5) * BIN)


class RecentRatio:
    """A ratio of two sums over the last minute."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()

    def add(self, second: int, above: int, below: int) -> None:
        """Add to both sums in this second; seconds do not go back."""
        if not self._seconds or self._seconds[-1][0] < second:
            self.forget(second)
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += above
        self._seconds[-1][2] += below

    def forget(self, second: int) -> None:
        """Let go of what was added a minute before this second."""
        while self._seconds and self._seconds[0][0] <= second - RECENT_S:
            self._seconds.popleft()

    def value(self) -> float | None:
        """The ratio; None where the lower sum is 0."""
        below = sum(entry[2] for entry in self._seconds)
        return sum(entry[1] for entry in self._seconds) / below if below else None


class Progress:
    """An observer that shows a run while it lasts; a context manager."""

    def __init__(
        self,
        duration_ns: int,
        *,
        simulated: bool = False,
        out: Console | None = None,
        wall_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wall_s` paces the display; what it shows is in the run's own time, real or virtual."""
        self._out = out or console(stderr=True)
        self._duration_ns = duration_ns
        self._simulated = simulated
        self._wall_s = wall_s
        self._live: Live | None = None
        self._next_s = wall_s() + LINE_S
        self._ttft, self._itl, self._cache_hit = RecentMedian(), RecentMedian(), RecentRatio()
        self._done = self._failed = self._cut = 0
        self._last_end_ns: int | None = None

    def __enter__(self) -> Progress:
        """Start the display."""
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            self._next_s = 0.0
            first = _panel({"starting": ""})
            self._live = Live(first, console=self._out, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, and leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def observe(self, row: CallRow) -> None:
        """A turn has become a row; a turn that was never sent is not a call."""
        if row.end_ns is None or row.sent_ns is None:
            return
        self._last_end_ns = row.end_ns
        if row.status != "ok":
            self._failed += row.status in FAILED or row.status == "overflow"
            self._cut += row.status == "cancelled"
            return
        self._done += 1
        second = row.end_ns // NS_PER_S
        first, last, tokens = row.first_token_ns, row.last_token_ns, row.completion_tokens
        if first is not None:
            self._ttft.add(second, first - row.sent_ns)
            if last is not None and last > first and tokens is not None and tokens >= 2:
                self._itl.add(second, (last - first) / (tokens - 1))
        cached, prompt = row.cached_tokens, row.prompt_tokens
        if cached is not None and prompt is not None and 0 <= cached <= prompt:
            self._cache_hit.add(second, cached, prompt)

    def tick(self, now_ns: int, lanes: LanesView) -> None:
        """Show where the run stands, if it is time."""
        wall_s = self._wall_s()
        if wall_s < self._next_s:
            return
        if self._live is not None:
            self._next_s = wall_s + PANEL_S
            self._live.update(_panel(self._facts(now_ns, lanes)), refresh=True)
        else:
            self._next_s = wall_s + LINE_S
            facts = self._facts(now_ns, lanes)
            del facts["window"]
            self._out.print("  ".join(f"{name} {fact}" for name, fact in facts.items()))

    def note(self, text: str) -> None:
        """Tell something now, above the panel."""
        self._out.print(printable(text))

    def _facts(self, now_ns: int, lanes: LanesView) -> dict[str, str]:
        """What is shown, in a few words each."""
        ttft, itl, hit = self._ttft, self._itl, self._cache_hit
        for recent in (ttft, itl, hit):
            recent.forget(now_ns // NS_PER_S)
        facts = {
            "time": self._time(now_ns, lanes),
            "window": _bar(0.0 if lanes.window is None else (now_ns - lanes.window[0]) / max(self._duration_ns, 1)),
            "lanes": f"{lanes.busy:,} of {lanes.size:,} busy",
            "calls": f"{self._done:,} done, {self._failed:,} failed, {lanes.in_flight:,} in flight"
            + (f", {self._cut:,} cut" if self._cut else ""),
            "last minute": f"TTFT P50 {format_duration(ttft.value_ns())}, ITL P50 {format_duration(itl.value_ns())}, "
            f"cache hit {format_percent(hit.value())} (n {ttft.n:,})",
        }
        if self._last_end_ns is not None:
            facts["last call"] = f"ended {max(0, now_ns - self._last_end_ns) / NS_PER_S:,.0f} s ago"
        return facts

    def _time(self, now_ns: int, lanes: LanesView) -> str:
        virtual = " (virtual)" if self._simulated else ""
        window = lanes.window
        if window is None:
            return f"warm-up {now_ns / NS_PER_S:,.0f} s{virtual}"
        if now_ns >= window[1]:
            return f"window over, draining {(now_ns - window[1]) / NS_PER_S:,.0f} s{virtual}"
        return f"{(now_ns - window[0]) / NS_PER_S:,.0f} of {self._duration_ns / NS_PER_S:,.0f} s{virtual}"


def _panel(facts: dict[str, str]) -> Panel:
    """The facts under each other; one text, because a picture of many parts takes far longer."""
    width = max(len(name) for name in facts)
    text = "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())
    return Panel(Text(text, no_wrap=True, overflow="ellipsis"), title="agentx replay", title_align="left", expand=False)


def _bar(part: float) -> str:
    full = round(BAR_COLUMNS * min(max(part, 0.0), 1.0))
    return "━" * full + "╌" * (BAR_COLUMNS - full)
