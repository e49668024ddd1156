"""Clocks: one monotonic nanosecond count since a run's start, real or virtual."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol


class Clock(Protocol):
    """Anything that tells the nanoseconds since the run's start and never goes back."""

    def now_ns(self) -> int:
        """Nanoseconds since the run's start."""
        ...


@dataclass(frozen=True, slots=True)
class RealClock:
    """The machine's monotonic clock, counted from `origin_ns` (by default: the moment of making)."""

    origin_ns: int = field(default_factory=time.monotonic_ns)

    def now_ns(self) -> int:
        """Nanoseconds since the origin."""
        return time.monotonic_ns() - self.origin_ns


@dataclass(slots=True)
class VirtualClock:
    """A clock that stands still until it is moved."""

    time_ns: int = 0

    def now_ns(self) -> int:
        """The present virtual time."""
        return self.time_ns

    def advance_to(self, time_ns: int) -> None:
        """Move forward to `time_ns`; raises ValueError on a step back."""
        if time_ns < self.time_ns:
            raise ValueError(f"virtual clock asked to go back from {self.time_ns} to {time_ns} ns")
        self.time_ns = time_ns
