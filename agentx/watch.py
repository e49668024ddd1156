"""The client watching itself while it measures: stalls of its event loop, and pauses of its memory collector.

A stall is how much later than asked for the loop ran a timer; whatever delays a timer delays the
stamp of a socket read too. The garbage collector is kept off the hot path: what was there before the
run is frozen, and young objects are collected between ticks, each pause timed.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from typing import Any

import numpy as np

from agentx.units import NS_PER_S

SAMPLE_S = 0.02
COLLECT_S = 10.0
"""Least time between two collections of young objects. A call leaves no cycles behind, so there is little to find;
a pause lasts by what is alive, not by what was allocated."""
PAUSES_PER_COLLECTION = 500
"""A collection waits this many times the pause of the one before: 0.2 % of the time at most."""


class LoopWatch:
    """Samples one event loop from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stalls: array[int] = array("q")
        self._pauses: array[int] = array("q")
        self._due = 0.0
        self._collect_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._was_on = gc.isenabled()

    def start(self) -> None:
        """Begin to sample; automatic collection is off until `stop`."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._collect_at = self._loop.time() + COLLECT_S
        self._wait()

    def stop(self) -> None:
        """End sampling and let the collector do as before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gc.unfreeze()
        if self._was_on:
            gc.enable()

    def facts(self) -> dict[str, Any]:
        """What was seen: stalls and collector pauses in nanoseconds with their n."""
        return {"loop_stall_ns": _summary(self._stalls), "gc_pause_ns": _summary(self._pauses)}

    def _wait(self) -> None:
        self._due = self._loop.time() + SAMPLE_S
        self._timer = self._loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        now = self._loop.time()
        self._stalls.append(int((now - self._due) * NS_PER_S))
        if now >= self._collect_at:
            before = time.monotonic_ns()
            gc.collect(1)
            pause = time.monotonic_ns() - before
            self._pauses.append(pause)
            self._collect_at = now + max(COLLECT_S, PAUSES_PER_COLLECTION * pause / NS_PER_S)
        self._wait()


def _summary(values: array[int]) -> dict[str, float | int | None]:
    found = np.frombuffer(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)
    n = len(found)
    return {
        "n": n,
        "p50": float(np.percentile(found, 50)) if n >= 2 else None,
        "p99": float(np.percentile(found, 99)) if n >= 100 else None,
        "max": int(found.max()) if n else None,
    }
