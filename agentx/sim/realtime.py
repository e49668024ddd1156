"""The model on the machine's clock: what happens in it happens when its time has come."""

from __future__ import annotations

import asyncio
import math
import time

from agentx.sim.model import Event, Request, SimModel
from agentx.units import NS_PER_MS, NS_PER_S


class RealTimeModel:
    """Runs a model in real time on the running event loop; with `speed` 2 its time passes twice as fast."""

    def __init__(self, model: SimModel, speed: float = 1.0) -> None:
        self.model = model
        self._speed = speed
        self._origin_ns = time.monotonic_ns()
        self._decoding: dict[Request, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now_ns(self) -> int:
        """The model's time."""
        return int((time.monotonic_ns() - self._origin_ns) * self._speed)

    def submit(self, request: Request) -> asyncio.Future[None]:
        """A future that is done when the request is decoding: its token times are then known."""
        decoding = self._decoding[request] = asyncio.get_running_loop().create_future()
        now = self._catch_up()
        self.model.submit(now, request)
        self._set_timer()
        return decoding

    def leave(self, request: Request) -> None:
        """The request's client has its answer, or has gone away."""
        now = self._catch_up()
        self._decoding.pop(request, None)
        self._tell(self.model.cancel(now, request))
        self._set_timer()

    async def until(self, time_ns: int) -> None:
        """Return at a time of the model or just after it, never before."""
        while (wait_ns := time_ns - self.now_ns()) > 0:
            await asyncio.sleep(self._seconds(wait_ns))

    def _catch_up(self) -> int:
        """The model's time, with everything that was due by it done: timers come late."""
        now = self.now_ns()
        self._tell(self.model.advance(now))
        return now

    def _on_timer(self) -> None:
        self._catch_up()
        self._set_timer()

    def _tell(self, happened: list[tuple[Event, Request]]) -> None:
        for event, request in happened:
            decoding = self._decoding.get(request)
            if event is Event.DECODING and decoding is not None and not decoding.done():
                decoding.set_result(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.model.next_event_ns()
        if due is not None:
            wait = self._seconds(max(due - self.now_ns(), 0))
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _seconds(self, wait_ns: int) -> float:
        """Machine seconds of a wait, up to whole milliseconds: the timers of uvloop round, and may come early."""
        return math.ceil(wait_ns / self._speed / NS_PER_MS) * NS_PER_MS / NS_PER_S
