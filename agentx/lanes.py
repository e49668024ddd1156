"""Lanes: which turn goes when. A state machine without a clock and without a socket.

A run has N independent *lanes*. A lane holds one session tree until it drains (the root stream and
every subagent), then draws the next. The rules:

* **Order.** Position p of a seeded sequence of sessions is session `permutation(p // S)[p % S]` of S:
  every session once, in another order each time round; p // S is its `play`. Lane l of N takes the
  positions l, l + N, l + 2N, ...: what a lane plays depends on the seed alone, never on the server.
* **Due.** Turn k+1 is due when turn k ended plus its think time (at most the think cap). A subagent's
  first turn is due its recorded offset after the end of the parent turn that spawns it. A parent
  turn that waits for subagents (join) is due when the last of them has ended, if that is later.
* **Start window.** A lane's first session starts at a fraction of its root's turns. The turn before is
  sent as warm-up, so that the prefix is cached; the measured window opens when every warm-up call
  has ended, and each lane's first measured turn is due from then on, spread over the ramp.
* **Idle cap.** When no call is in flight and the next is due later than the cap, all due times move
  forward together by the excess.
* **Failures.** A failed call does not end its session: the next turn keeps its place. A lane whose
  calls fail one after another waits longer each time. A context refusal ends the session tree.
* **End.** Nothing starts after the window, which also ends when every session was played as often as
  asked for. Every turn of a drawn session is recorded exactly once: by
  the driver when it was sent, else here as skipped, with the reason.

A driver calls `begin` once, then asks `next_due_ns`, calls `take` until it gives None, sends what it
got, and reports each end with `ended`. Under a real clock that is a live run, under a virtual clock a simulated one.

Lanes never look at each other but in two places, the opening of the window and the idle cap. So a part of
the lanes plays the same in a process of its own, if the window is opened for all parts at one time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from agentx.call import Call, planned_row
from agentx.errors import InputError
from agentx.lane import Lane
from agentx.rng import generator
from agentx.turns import ROOT, CallRow, SessionTree

FAILURES = frozenset({"error", "truncated", "empty"})


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What shapes the schedule; part of what makes two runs comparable."""

    lanes: int
    duration_ns: int
    seed: int
    ramp_ns: int = 0
    think_cap_ns: int | None = None
    idle_cap_ns: int | None = None
    start_window: tuple[float, float] | None = None
    """Fractions of the root's turns between which a lane's first session starts; None: at its beginning."""
    plays: int | None = None
    """Times each session is played at most; None: again and again until the window ends."""


class Lanes:
    """The lanes of one run over `sessions`; rows of turns that are never sent go to `record`."""

    def __init__(
        self,
        sessions: Sequence[SessionTree],
        settings: LaneSettings,
        record: Callable[[CallRow], None],
        *,
        part: Sequence[int] | None = None,
        on_warm: Callable[[], None] | None = None,
    ) -> None:
        """`part` are the numbers of the lanes that are played here; None: all of them.

        With `on_warm` the window does not open by itself: it is told when every warm-up call has ended,
        and `open_window` is up to the driver.
        """
        if len(sessions) == 0:
            raise InputError("no session to replay", "check the corpus and the context limit")
        if settings.lanes < 1:
            raise InputError(f"concurrency is {settings.lanes}, at least 1 is needed", "give --concurrency 1 or more")
        self._sessions = sessions
        self._settings = settings
        self._record = record
        self._order = lru_cache(maxsize=4)(self._draw_order)
        self._pending: list[tuple[int, int, int, int, int, int]] = []
        self._sequence = 0
        self._shift_ns = 0
        self._warming = 0
        self._closed = False
        self._close_reason = ""
        self.in_flight = 0
        self.window: tuple[int, int] | None = None
        """(start, end) of the measured window; None while warm-up calls are out."""
        self._on_warm = on_warm
        self._lanes = {number: Lane(number) for number in (range(settings.lanes) if part is None else part)}

    def draw(self) -> None:
        """Give every lane its first session: it takes a while, and no time may pass between start and first calls."""
        if not self._closed:
            for lane in self._lanes.values():
                self._draw(lane)

    def begin(self, now_ns: int) -> None:
        """Start: warm-up calls are due from now on, or the window opens now."""
        if self._closed:  # interrupted before it began
            return
        if not any(lane.epoch for lane in self._lanes.values()):
            self.draw()
        for lane in self._lanes.values():
            self._begin_first(lane, now_ns)
        if self._warming == 0:
            self._warm(now_ns)

    @property
    def finished(self) -> bool:
        """Nothing is in flight and nothing will start."""
        return self._closed and self.in_flight == 0

    @property
    def size(self) -> int:
        """Number of lanes."""
        return len(self._lanes)

    @property
    def busy(self) -> int:
        """Lanes with at least one call in flight."""
        return sum(lane.in_flight > 0 for lane in self._lanes.values())

    def next_due_ns(self) -> int | None:
        """When to call `take` next if no call ends before: a due time, or the window's end; None when closed."""
        if self._closed:
            return None
        due = self._peek()
        if self.window is None:
            return due
        return self.window[1] if due is None else min(due, self.window[1])

    def take(self, now_ns: int, lead_ns: int = 0) -> Call | None:
        """A call that is due by `now_ns` + `lead_ns`, now in flight; None when there is none.

        A lead lets a driver prepare a call before it is due. Closes at the window's end.
        """
        if self._closed:
            return None
        if self.window is not None and now_ns >= self.window[1]:
            self.close(now_ns)
            return None
        due = self._peek()
        if due is None or due > now_ns + lead_ns or (self.window is not None and due >= self.window[1]):
            return None
        _, _, number, _, stream, turn = heapq.heappop(self._pending)
        lane = self._lanes[number]
        lane.streams[stream].next_turn = turn + 1
        lane.in_flight += 1
        self.in_flight += 1
        phase = "warmup" if self.window is None else "measure"
        return Call(number, lane.play, lane.playing, stream, turn, phase, due)

    def ended(self, call: Call, now_ns: int, status: str) -> None:
        """The call is over at `now_ns` with a run-table status; what follows it becomes due."""
        lane = self._lanes[call.lane]
        lane.in_flight -= 1
        self.in_flight -= 1
        lane.failures = lane.failures + 1 if status in FAILURES else 0
        if self._closed and self.in_flight == 0:
            self._skip_unplayed()
        if not self._closed:
            if status == "overflow" and not lane.aborted:
                self._abort(lane, "overflow")
            if call.phase == "warmup":
                self._warmup_ended(lane, now_ns)
            else:
                self._advance(lane, call.stream, call.turn, now_ns)
            if self.window is not None:
                self._look_ahead(now_ns)

    def close(self, now_ns: int, reason: str = "window_end") -> None:
        """Start nothing any more, the window ends.

        Every turn not sent is recorded as skipped for `reason`, when nothing is in flight any more: there may be many,
        and the times of calls in flight must not wait for that.
        """
        if self._closed:
            return
        self._closed = True
        self._close_reason = reason
        if self.window is not None:
            self.window = (self.window[0], max(self.window[0], min(self.window[1], now_ns)))
        self._pending.clear()
        if self.in_flight == 0:
            self._skip_unplayed()

    def _skip_unplayed(self) -> None:
        for lane in self._lanes.values():
            if lane.tree is not None and not lane.aborted:
                self._skip(lane, lane.unplayed(), self._close_reason)
                lane.tree = None

    # Drawing and starting sessions.

    def _draw_order(self, play: int) -> npt.NDArray[np.int64]:
        return generator(self._settings.seed, "order", play).permutation(len(self._sessions))

    def _draw(self, lane: Lane) -> bool:
        """Give the lane its next session; False where every session has been played often enough."""
        position = lane.number + lane.drawn * self._settings.lanes
        play, place = divmod(position, len(self._sessions))
        if self._settings.plays is not None and play >= self._settings.plays:
            lane.take_up(None, play)
            return False
        lane.drawn += 1
        lane.take_up(self._sessions[int(self._order(play)[place])], play)
        return True

    def _begin_first(self, lane: Lane, now_ns: int) -> None:
        window, tree = self._settings.start_window, lane.tree
        if tree is None:
            return
        root = tree.streams[0]
        if window is not None:
            fraction = generator(self._settings.seed, "start", lane.number).uniform(*window)
            lane.start_turn = min(int(fraction * root.n_turns), root.n_turns - 1)
        if lane.start_turn > 0:
            self._skip(lane, lane.pass_before(lane.start_turn - 1), "before_start")
            self._warming += 1
            self._push(lane, 0, lane.start_turn - 1, now_ns + self._ramp_ns(lane))

    def _ramp_ns(self, lane: Lane) -> int:
        return self._settings.ramp_ns * lane.number // self._settings.lanes

    def _warm(self, now_ns: int) -> None:
        if self._on_warm is None:
            self.open_window(now_ns)
        else:
            self._on_warm()

    def open_window(self, now_ns: int) -> None:
        """Open the measured window at `now_ns`; every warm-up call has ended."""
        if self._closed:
            return
        self.window = (now_ns, now_ns + self._settings.duration_ns)
        for lane in self._lanes.values():
            due = now_ns + self._ramp_ns(lane)
            if lane.tree is None or (lane.aborted and not self._draw(lane)):
                continue
            if lane.start_turn > 0 and lane.streams[0].next_turn == lane.start_turn:
                due = max(due, lane.streams[0].ended_ns + self._think_ns(lane, 0, lane.start_turn))
                self._push(lane, 0, lane.start_turn, due)
                continue
            self._start(lane, 0, due)
        self._look_ahead(now_ns)

    def _warmup_ended(self, lane: Lane, now_ns: int) -> None:
        lane.streams[0].ended_ns = now_ns
        self._warming -= 1
        if self._warming == 0:
            self._warm(now_ns)

    # What follows a turn.

    def _advance(self, lane: Lane, stream: int, turn: int, now_ns: int) -> None:
        if not lane.aborted:
            progress = lane.streams[stream]
            progress.ended_ns = now_ns
            self._spawn(lane, stream, turn, now_ns)
            if progress.next_turn < lane.playing.streams[stream].n_turns:
                self._reach(lane, stream)
            else:
                self._stream_done(lane, stream, now_ns)
        if lane.over and self._draw(lane):
            self._start(lane, 0, now_ns + lane.backoff_ns())

    def _start(self, lane: Lane, stream: int, start_ns: int) -> None:
        """Begin a stream: the subagents that start with it, then its first turn unless it waits for them."""
        progress = lane.streams[stream]
        progress.ended_ns = start_ns
        self._spawn(lane, stream, ROOT, start_ns)
        progress.blocked = lane.waits(stream, 0)
        if not progress.blocked:
            self._push(lane, stream, 0, start_ns)

    def _spawn(self, lane: Lane, stream: int, turn: int, now_ns: int) -> None:
        """Start the subagents that the end of this turn spawns (ROOT: that begin with the stream)."""
        for number in lane.spawned(stream, turn):
            self._start(lane, number, now_ns + self._think_ns(lane, number, 0))

    def _reach(self, lane: Lane, stream: int) -> None:
        """Make the stream's next turn due, unless subagents that it joins are still out."""
        progress = lane.streams[stream]
        progress.blocked = lane.waits(stream, progress.next_turn)
        if not progress.blocked:
            think = self._think_ns(lane, stream, progress.next_turn)
            self._push(lane, stream, progress.next_turn, progress.ended_ns + think + lane.backoff_ns())

    def _stream_done(self, lane: Lane, stream: int, now_ns: int) -> None:
        lane.streams[stream].done = True
        parent = lane.playing.streams[stream].parent
        if parent == ROOT:
            return
        progress = lane.streams[parent]
        if progress.blocked and not lane.waits(parent, progress.next_turn):
            progress.blocked = False
            turn = progress.next_turn
            think = self._think_ns(lane, parent, turn) if turn > 0 else 0  # a first turn's pause is in its start
            self._push(lane, parent, turn, max(now_ns, progress.ended_ns + think))

    def _abort(self, lane: Lane, reason: str) -> None:
        self._skip(lane, lane.unplayed(), reason)
        lane.aborted = reason
        lane.epoch += 1

    def _think_ns(self, lane: Lane, stream: int, turn: int) -> int:
        think = int(lane.playing.streams[stream].think_ns[turn])
        cap = self._settings.think_cap_ns
        return think if cap is None else min(think, cap)

    # Turns that are never sent.

    def _skip(self, lane: Lane, turns: Iterable[tuple[int, int]], reason: str) -> None:
        """Record (stream, turn) pairs of the lane's tree as never sent."""
        phase = "warmup" if reason == "before_start" else "measure"
        for stream, turn in turns:
            self._record(
                planned_row(
                    lane.playing, stream, turn, lane.play, lane.number, "skipped", phase=phase, error_kind=reason
                )
            )

    # The heap of pending turns; due times in it are those before the idle cap's shift.

    def _push(self, lane: Lane, stream: int, turn: int, due_ns: int) -> None:
        self._sequence += 1
        entry = (due_ns + self._shift_ns, self._sequence, lane.number, lane.epoch, stream, turn)
        heapq.heappush(self._pending, entry)

    def _peek(self) -> int | None:
        """Due time of the earliest pending turn that is not stale."""
        while self._pending:
            due, _, number, epoch, _, _ = self._pending[0]
            if epoch == self._lanes[number].epoch:
                return due - self._shift_ns
            heapq.heappop(self._pending)
        return None

    def _look_ahead(self, now_ns: int) -> None:
        """Where nothing is in flight: apply the idle cap, and close when every session was played often enough."""
        if self.in_flight > 0:
            return
        due, cap = self._peek(), self._settings.idle_cap_ns
        if due is None:
            self.close(now_ns)
        elif cap is not None and due > now_ns + cap:
            self._shift_ns += due - now_ns - cap
