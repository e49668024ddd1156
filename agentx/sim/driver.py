"""The simulated driver: lanes in virtual time over the model. Seconds of work for an hour of replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentx.clock import VirtualClock
from agentx.lanes import Call, Lanes
from agentx.prefix import CeilingTracker, LanePlays, PlayBlocks
from agentx.sim.model import Event, Request, SimModel
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
        while not self._lanes.finished:
            now = self._clock.now_ns()
            if self.interrupted:
                self._lanes.close("interrupted")
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
                self._ended(self._flying.pop(request), now)
        if cut is not None and now >= cut:
            for flying in list(self._flying.values()):
                self._model.cancel(now, flying.request)
                del self._flying[flying.request]
                self._cut(flying, now)

    def _send(self, call: Call, now: int) -> None:
        blocks = self._plays.of(call.lane, call.tree, call.play)
        keys, last_tokens = blocks.turn(call.stream, call.turn)
        output_tokens = max(call.output_tokens, 1)
        ceiling = self._ceilings.observe(blocks.salt, keys, last_tokens)
        refusal = self._model.refusal(call.input_tokens, output_tokens)
        if refusal is not None:
            row = call.row(
                "overflow",
                error_kind="context",
                error_message=refusal,
                http_status=400,
                sent_ns=now,
                end_ns=now,
                ceiling_cached_tokens=ceiling,
                endpoint=self._endpoint,
                attempts=1,
            )
            self._record(row)
            self._lanes.ended(call, now, row.status)
            return
        full = keys if last_tokens == self._model.block_size else keys[:-1]
        request = Request(full.tolist(), call.input_tokens, output_tokens)
        self._flying[request] = _Flying(call, request, now, ceiling)
        self._model.submit(now, request)

    def _ended(self, flying: _Flying, now: int) -> None:
        request = flying.request
        assert request.first_token_ns is not None
        assert request.end_ns is not None
        window = self._lanes.window
        late = window is not None and request.end_ns > window[1]
        k_ns = self._model.k_ns
        row = flying.call.row(
            "ok",
            phase="drain" if late and flying.call.phase == "measure" else flying.call.phase,
            http_status=200,
            sent_ns=flying.sent_ns,
            first_token_ns=request.first_token_ns,
            first_content_ns=request.first_token_ns,
            last_token_ns=request.end_ns,
            end_ns=request.end_ns,
            chunk_ns=[request.first_token_ns + k_ns * token for token in range(request.output_tokens)],
            prompt_tokens=request.input_tokens,
            cached_tokens=request.cached_tokens,
            completion_tokens=request.output_tokens,
            finish_reason="length",
            response_model=self._model.deployment.model,
            ceiling_cached_tokens=flying.ceiling,
            endpoint=self._endpoint,
            attempts=1,
        )
        self._record(row)
        self._lanes.ended(flying.call, now, "ok")

    def _cut(self, flying: _Flying, now: int) -> None:
        first = flying.request.first_token_ns
        came = [] if first is None else list(range(first, now + 1, self._model.k_ns))[: flying.request.output_tokens]
        row = flying.call.row(
            "cancelled",
            phase="drain" if flying.call.phase == "measure" else flying.call.phase,
            error_kind="cancelled",
            error_message="window_end",
            sent_ns=flying.sent_ns,
            first_token_ns=came[0] if came else None,
            first_content_ns=came[0] if came else None,
            last_token_ns=came[-1] if came else None,
            end_ns=now,
            chunk_ns=came,
            ceiling_cached_tokens=flying.ceiling,
            endpoint=self._endpoint,
            attempts=1,
        )
        self._record(row)
        self._lanes.ended(flying.call, now, "cancelled")
