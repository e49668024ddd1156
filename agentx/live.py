"""The live driver: lanes under the real clock against an HTTP deployment.

One event loop, no task per call. `_pump` takes what is due from the lanes a little ahead of time
(`LEAD_NS`), so that building a prompt is over when the call is due; it sends what is due now and sets
one timer for what comes next. Timers of the loop are a millisecond coarse, so the last stretch before
a due time is passed by yielding to the loop, which keeps reading sockets meanwhile.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentx.answers import Answer, observe
from agentx.call import Call
from agentx.exchange import Exchange
from agentx.http import HttpClient
from agentx.lanes import Lanes
from agentx.prefix import CeilingTracker, LanePlays, PlayBlocks
from agentx.redact import Redactor
from agentx.turns import BlockIds, CallRow, SessionTree
from agentx.units import NS_PER_MS, NS_PER_S
from agentx.watch import LoopWatch

LEAD_NS = 25 * NS_PER_MS
"""How long before its due time a call is taken and its prompt built."""
COARSE_NS = int(1.5 * NS_PER_MS)
"""Below this distance a timer would overshoot: the loop's timers have millisecond steps."""
OVERRUN_TIMES, OVERRUN_CHUNKS = 4, 1024
"""An answer of more output chunks than so many times the tokens asked for, and so many more, is cut: it has no end."""
OVERRUN_TOKEN_BYTES, OVERRUN_BYTES = 64 * 1024, 16 * 1024 * 1024
"""The same in bytes per token asked for, and so many more: comments and empty events are bytes, but no chunks."""
MOST_ATTEMPTS = 10
"""Attempts of one call where it is sent again at all."""
LONGEST_RETRY_NS = 60 * NS_PER_S
TICK_S = 0.25
"""Period of the progress display."""


class Prompts(Protocol):
    """Request bodies for prompts given as content keys."""

    path: str
    """Path of the API the bodies are for, such as `/v1/chat/completions`."""

    def body(self, keys: BlockIds, last_tokens: int, output_tokens: int, stream: Hashable = None) -> bytes:
        """The body of a turn's request; its prompt is the blocks `keys`, the last of `last_tokens`.

        `stream` tells whose turn it is: the next one of it mostly begins alike.
        """
        ...


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How a live run treats its end."""

    grace_ns: int
    """How long calls in flight at the window's end may still run before they are cut."""
    drain: bool = False
    """Wait for all of them instead, however long they take."""
    retry: frozenset[int] = frozenset()
    """HTTP statuses after which a call is sent again; its latency counts from the first attempt."""
    stall_ns: int | None = None
    """How long calls may be in flight without a byte on any of them before the run is ended as stalled."""


@dataclass(slots=True)
class _Sending:
    """A call on its way: prepared, then in flight."""

    call: Call
    client: HttpClient
    exchange: Exchange
    answer: Answer
    keys: BlockIds
    last_tokens: int
    salt: int
    body: bytes
    ceiling: int | None = None
    attempts: int = 0
    """Attempts before this one."""
    first_sent_ns: int | None = None
    """When the first attempt was sent, where this is another."""
    refusal: dict[str, Any] | None = None
    """What the attempt before saw."""


class LiveDriver:
    """Replays `lanes` through `clients`; every call that ends becomes a row given to `record`."""

    def __init__(
        self,
        lanes: Lanes,
        clients: Sequence[HttpClient],
        prompts: Prompts,
        blocks_of: Callable[[SessionTree, int], PlayBlocks],
        ceilings: CeilingTracker | None,
        record: Callable[[CallRow], None],
        settings: LiveSettings,
        *,
        redact: Redactor,
        tick: Callable[[], None] = lambda: None,
        answer: Callable[[], Answer] = Answer,
        extra_headers: Callable[[Call], str] = lambda call: "",
    ) -> None:
        """`clients` share one clock; a lane sends to one of them, so a session stays where it began.

        `blocks_of` gives the blocks of a session tree's play; it is asked once per play of a lane. Without
        `ceilings` the rows have none.
        """
        self.lanes = lanes
        self._clients = clients
        self._prompts = prompts
        self._ceilings = ceilings
        self._plays = LanePlays(blocks_of, ceilings)
        self._record = record
        self._settings = settings
        self._redact = redact
        self._tick = tick
        self._answer = answer
        self._extra_headers = extra_headers
        self._now = clients[0].now_ns
        self._loop = asyncio.get_running_loop()
        self._ready: list[tuple[int, int, _Sending]] = []
        self._flying: dict[Exchange, _Sending] = {}
        self._taken = 0
        self._wake: asyncio.TimerHandle | asyncio.Handle | None = None
        self._soon = False
        """The pump runs with this turn of the loop."""
        self._over = self._loop.create_future()
        self._cut_at_ns: int | None = None
        self._last_sign_ns = 0
        self._watch = LoopWatch()
        self.ended_because = "window"
        """Why the run ended: `window`, `interrupted`, `stalled`, or what `stop` was told."""

    async def run(self) -> None:
        """Replay until nothing is in flight and nothing will start."""
        ticking = self._loop.create_task(self._ticking())
        before = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._on_fault)
        self.lanes.draw()
        self._watch.start()
        self.lanes.begin(self._now())
        try:
            self._pump()
            await self._over
        finally:
            ticking.cancel()
            self._loop.set_exception_handler(before)
            self._watch.stop()
            if self._wake is not None:
                self._wake.cancel()
            for client in self._clients:
                client.close()

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault in a callback ends the run: the call that it was about would never end."""
        fault = context.get("exception")
        if isinstance(fault, Exception) and not self._over.done():
            self._over.set_exception(fault)
        else:
            loop.default_exception_handler(context)

    def interrupt(self) -> None:
        """First call: start nothing more and wait for what is in flight. Second call: cut that too."""
        if self.ended_because == "interrupted":
            self._cut("interrupted")
        else:
            self.ended_because = "interrupted"
            self.lanes.close(self._now(), "interrupted")
            self._drop_ready("interrupted")
        self._pump_soon()

    def stop(self, reason: str) -> None:
        """End now for `reason`: start nothing more and cut what is in flight."""
        if self.lanes.finished:
            return
        self.ended_because = reason
        self.lanes.close(self._now(), "stopped")
        self._drop_ready("stopped")
        self._cut(reason)
        self._pump_soon()

    def open_window(self, at_ns: int) -> None:
        """Open the window where the lanes do not open it themselves."""
        self.lanes.open_window(at_ns)
        self._pump_soon()

    def facts(self) -> dict[str, Any]:
        """How the event loop did."""
        return self._watch.facts()

    def in_flight_rows(self) -> list[CallRow]:
        """A row per call in flight, as it would stand if the run were killed now."""
        rows = []
        for sending in list(self._flying.values()):
            exchange = sending.exchange
            rows.append(
                sending.call.row(
                    "cancelled",
                    error_kind="killed",
                    sent_ns=exchange.sent_ns,
                    uploaded_ns=exchange.uploaded_ns,
                    headers_ns=exchange.headers_ns,
                    ceiling_cached_tokens=sending.ceiling,
                    endpoint=sending.client.url,
                    attempts=exchange.attempts,
                )
            )
        return rows

    # The pump

    def _pump(self) -> None:
        self._wake, self._soon = None, False
        if self._over.done():
            return
        now = self._now()
        while call := self.lanes.take(now, LEAD_NS):
            self._prepare(call)
            now = self._now()
        while self._ready and self._ready[0][0] <= now:
            self._send(heapq.heappop(self._ready)[2])
            now = self._now()
        self._cut_if_late(now)
        if self.lanes.finished:
            self._over.set_result(None)
            return
        wake = self._next_ns()
        if wake is not None:
            self._sleep_until(wake, now)

    def _next_ns(self) -> int | None:
        """When the pump is needed next if no call ends before."""
        times = [self._ready[0][0]] if self._ready else []
        due = self.lanes.next_due_ns()
        if due is not None:
            window = self.lanes.window
            times.append(due if window is not None and due >= window[1] else due - LEAD_NS)
        if self._cut_at_ns is not None and self._flying:
            times.append(self._cut_at_ns)
        return min(times, default=None)

    def _sleep_until(self, wake_ns: int, now_ns: int) -> None:
        wait = wake_ns - now_ns
        if wait > COARSE_NS:
            self._wake = self._loop.call_later((wait - COARSE_NS) / NS_PER_S, self._pump)
        else:
            self._wake = self._loop.call_soon(self._pump)

    def _pump_soon(self) -> None:
        if self._soon:
            return
        if self._wake is not None:
            self._wake.cancel()
        self._wake, self._soon = self._loop.call_soon(self._pump), True

    def _cut_if_late(self, now_ns: int) -> None:
        """Cut what is in flight when the grace after the window is over."""
        window = self.lanes.window
        if window is None or self._settings.drain or self.ended_because != "window" or now_ns < window[1]:
            return
        self._drop_ready("window_end")
        self._cut_at_ns = window[1] + self._settings.grace_ns
        if now_ns >= self._cut_at_ns:
            self._cut("window_end")

    def _cut(self, reason: str) -> None:
        for exchange, sending in list(self._flying.items()):
            sending.client.cancel(exchange, "cancelled", reason)

    def _drop_ready(self, reason: str) -> None:
        """Calls that were prepared but are not sent any more."""
        ready, self._ready = self._ready, []
        for _, _, sending in sorted(ready, key=lambda entry: entry[:2]):
            row = sending.call.row("skipped", error_kind=reason)
            if sending.refusal is not None:
                row = self._row(sending, sending.refusal)
            self._record(row)
            self.lanes.ended(sending.call, self._now(), row.status)

    # One call

    def _prepare(self, call: Call) -> None:
        blocks = self._plays.of(call.lane, call.tree, call.play)
        keys, last_tokens = blocks.turn(call.stream, call.turn)
        body = self._prompts.body(keys, last_tokens, call.output_tokens, (call.lane, call.stream))
        client = self._clients[call.lane % len(self._clients)]
        exchange, answer = self._exchange(client, call, body)
        sending = _Sending(call, client, exchange, answer, keys, last_tokens, blocks.salt, body)
        self._queue(call.due_ns, sending)

    def _exchange(self, client: HttpClient, call: Call, body: bytes) -> tuple[Exchange, Answer]:
        answer = self._answer()
        exchange = client.request(self._prompts.path, body, self._ended, extra=self._extra_headers(call))
        exchange.on_backlog = self._take
        return exchange, answer

    def _take(self, exchange: Exchange) -> None:
        """Read what has gathered of an answer in flight, and cut one that does not end."""
        sending = self._flying[exchange]
        sending.answer.take(exchange)
        asked = max(1, sending.call.output_tokens)
        chunks, size = sending.answer.chunks, sending.answer.size
        if chunks > OVERRUN_CHUNKS + OVERRUN_TIMES * asked or size > OVERRUN_BYTES + OVERRUN_TOKEN_BYTES * asked:
            message = f"{chunks} chunks of output in {size} bytes came for {asked} tokens asked for"
            sending.client.cancel(exchange, "overrun", message)

    def _queue(self, due_ns: int, sending: _Sending) -> None:
        self._taken += 1
        heapq.heappush(self._ready, (due_ns, self._taken, sending))

    def _send(self, sending: _Sending) -> None:
        if sending.ceiling is None and self._ceilings is not None:
            sending.ceiling = self._ceilings.observe(sending.salt, sending.keys, sending.last_tokens)
        self._flying[sending.exchange] = sending
        sending.client.send(sending.exchange)

    def _sends_again(self, sending: _Sending) -> bool:
        """Queue another attempt of a call that was refused for now; False where the refusal stands."""
        exchange, window = sending.exchange, self.lanes.window
        if exchange.status not in self._settings.retry or sending.attempts + 1 >= MOST_ATTEMPTS:
            return False
        due_ns = self._now() + retry_after_ns(exchange, sending.attempts)
        if self.ended_because != "window" or (window is not None and due_ns >= window[1]):
            return False
        if sending.first_sent_ns is None:
            sending.first_sent_ns = exchange.sent_ns
        sending.refusal = observe(exchange, sending.answer)
        sending.attempts += exchange.attempts
        sending.exchange, sending.answer = self._exchange(sending.client, sending.call, sending.body)
        self._queue(due_ns, sending)
        return True

    def _ended(self, exchange: Exchange) -> None:
        sending = self._flying.pop(exchange)
        self._last_sign_ns = max(self._last_sign_ns, exchange.end_ns or 0)
        if self._sends_again(sending):
            self._pump_soon()
            return
        row = self._row(sending, observe(exchange, sending.answer))
        self._record(row)
        assert exchange.end_ns is not None
        self.lanes.ended(sending.call, exchange.end_ns, row.status)
        self._pump_soon()

    def _row(self, sending: _Sending, observed: dict[str, Any]) -> CallRow:
        """The row of a call that has ended with what its last attempt saw."""
        window, end_ns, call = self.lanes.window, observed["end_ns"], sending.call
        late = window is not None and end_ns is not None and end_ns > window[1]
        if observed["error_message"] is not None:
            observed["error_message"] = self._redact(observed["error_message"])
        last_sent_ns = observed["sent_ns"]
        if sending.first_sent_ns is not None:
            observed["sent_ns"] = sending.first_sent_ns
            observed["attempts"] += sending.attempts
        return call.row(
            phase="drain" if call.phase == "measure" and late else call.phase,
            ceiling_cached_tokens=sending.ceiling,
            endpoint=sending.client.url,
            last_sent_ns=last_sent_ns,
            **observed,
        )

    async def _ticking(self) -> None:
        while True:
            self._tick()
            self._look_for_stall()
            await asyncio.sleep(TICK_S)

    def silent_ns(self) -> int | None:
        """Time since anything came on any call in flight; None while none is."""
        if not self._flying:
            return None
        for exchange in self._flying:
            self._last_sign_ns = max(self._last_sign_ns, exchange.last_read_ns or exchange.sent_ns or 0)
        return self._now() - self._last_sign_ns

    def _look_for_stall(self) -> None:
        limit = self._settings.stall_ns
        silent = self.silent_ns() if limit is not None else None
        if silent is not None and limit is not None and silent >= limit:
            self.stop("stalled")


def retry_after_ns(exchange: Exchange, attempts: int) -> int:
    """How long to wait before the next attempt: what the server asked for, else 1, 2, 4 … s; at most a minute."""
    asked = exchange.header("retry-after")
    told = asked.isascii() and asked.isdigit()
    seconds = min(float(asked), LONGEST_RETRY_NS / NS_PER_S) if told else float(2 ** min(attempts, 6))
    return min(int(seconds * NS_PER_S), LONGEST_RETRY_NS)
