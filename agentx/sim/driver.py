"""The simulated driver: lanes in virtual time over the model. Seconds of work for an hour of replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentx.call import Call
from agentx.clock import VirtualClock
from agentx.lanes import Lanes
from agentx.prefix import CeilingTracker, LanePlays, PlayBlocks
from agentx.sim.model import Event, Request, SimModel, prefix_keys
from agentx.turns import CallRow, SessionTree


@dataclass(slots=True)
class _Flying:
    """A call in the model."""

    call: Call
    request: Request
    sent_ns: int
    ceiling: int


class SimDriver:
    """Replays `lanes` over `model`; every call that ends becomes a row given to `record`."""

    def __init__(
        self,
        lanes: Lanes,
        model: SimModel,
        blocks_of: Callable[[SessionTree, int], PlayBlocks],
        record: Callable[[CallRow], None],
        *,
        grace_ns: int,
        drain: bool = False,
        tick: Callable[[int], None] = lambda now_ns: None,
    ) -> None:
        """`tick` is called with the virtual time once per step."""
        self._lanes = lanes
        self._model = model
        self._record = record
        self._grace_ns = grace_ns
        self._drain = drain
        self._tick = tick
        self._clock = VirtualClock()
        self._ceilings = CeilingTracker(model.block_size, model.block_size)
        self._plays = LanePlays(blocks_of, self._ceilings)
        self._flying: dict[Request, _Flying] = {}
        self._endpoint = f"sim:{model.deployment.name}"
        self.interrupted = False
        """Set from a signal handler: nothing more is started."""

    @property
    def now_ns(self) -> int:
        """The virtual time."""
        return self._clock.now_ns()

    def run(self) -> None:
        """Replay until nothing is in flight and nothing will start."""
        self._lanes.begin(self._clock.now_ns())
        while not self._lanes.finished:
            now = self._clock.now_ns()
            if self.interrupted:
                self._lanes.close(self._clock.now_ns(), "interrupted")
            while call := self._lanes.take(now):
                self._send(call, now)
            self._tick(now)
            if self._lanes.finished:
                return
            self._step()

    def _step(self) -> None:
        """Move to the next thing that happens, and let it happen."""
        window = self._lanes.window
        cut = None if window is None or self._drain else window[1] + self._grace_ns
        times = [self._lanes.next_due_ns(), self._model.next_event_ns(), cut if self._flying else None]
        now = max(self._clock.now_ns(), min(time for time in times if time is not None))
        self._clock.advance_to(now)
        for event, request in self._model.advance(now):
            if event is Event.FINISHED:
                self._finished(self._flying.pop(request), now)
        if cut is not None and now >= cut:
            for flying in list(self._flying.values()):
                self._model.cancel(now, flying.request)
                del self._flying[flying.request]
                self._cut(flying, now)

    def _send(self, call: Call, now: int) -> None:
        blocks = self._plays.of(call.lane, call.tree, call.play)
        keys, last_tokens = blocks.turn(call.stream, call.turn)
        full = keys if last_tokens == self._model.block_size else keys[:-1]
        # An answer has at least one token: a server refuses max_tokens 0.
        request = Request(prefix_keys(full), call.input_tokens, max(call.output_tokens, 1))
        flying = _Flying(call, request, now, self._ceilings.observe(blocks.salt, keys, last_tokens))
        refusal = self._model.refusal(request.input_tokens, request.output_tokens)
        if refusal is not None:
            observed = {"error_kind": "context", "error_message": refusal, "http_status": 400}
            self._ended(flying, now, "overflow", call.phase, observed)
            return
        self._flying[request] = flying
        self._model.submit(now, request)

    def _finished(self, flying: _Flying, now: int) -> None:
        request = flying.request
        window = self._lanes.window
        late = window is not None and now > window[1]
        observed = _arrivals(self._model, request, now) | {
            "prompt_tokens": request.input_tokens,
            "cached_tokens": request.cached_tokens,
            "completion_tokens": request.output_tokens,
            "finish_reason": "length",
            "response_model": self._model.deployment.model,
        }
        phase = flying.call.phase
        self._ended(flying, now, "ok", "drain" if late and phase == "measure" else phase, observed)

    def _cut(self, flying: _Flying, now: int) -> None:
        """The window's end: what came so far is kept; the usage would have come last, so it is not known."""
        observed = _arrivals(self._model, flying.request, now)
        observed |= {"error_kind": "cancelled", "error_message": "window_end"}
        phase = flying.call.phase
        self._ended(flying, now, "cancelled", "drain" if phase == "measure" else phase, observed)

    def _ended(self, flying: _Flying, now: int, status: str, phase: str, observed: dict[str, Any]) -> None:
        row = flying.call.row(
            status,
            phase=phase,
            sent_ns=flying.sent_ns,
            end_ns=now,
            ceiling_cached_tokens=flying.ceiling,
            endpoint=self._endpoint,
            attempts=1,
            **observed,
        )
        self._record(row)
        self._lanes.ended(flying.call, now, status)


def _arrivals(model: SimModel, request: Request, now: int) -> dict[str, Any]:
    """The columns of the output that has come by `now`, one chunk per token; all null where none has."""
    first = request.first_token_ns
    if first is None or first > now:
        return {"chunk_ns": []}
    last = min(now, first + model.k_ns * (request.output_tokens - 1))
    chunks = list(range(first, last + 1, model.k_ns))
    return {
        "http_status": 200,
        "first_token_ns": first,
        "first_content_ns": first,
        "last_token_ns": chunks[-1],
        "chunk_ns": chunks,
    }
