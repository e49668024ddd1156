"""The lane rules as properties, under a virtual clock and random service times."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.call import Call
from agentx.errors import InputError
from agentx.lane import LONGEST_BACKOFF_NS
from agentx.lanes import Lanes, LaneSettings
from agentx.turns import ROOT, CallRow, SessionTree, Stream

EMPTY = np.empty(0, dtype=np.uint64)


def stream(
    name: str, think: list[int], parent: int = ROOT, spawn: int = ROOT, join: int = ROOT, size: int = 10
) -> Stream:
    n = len(think)
    return Stream(name, parent, spawn, join, think, [size] * n, [5] * n, ["m"] * n, [0] * n, [EMPTY] * n)


@dataclass
class Replay:
    """Drives lanes with service times from a function and remembers everything."""

    lanes_settings: LaneSettings
    sessions: list[SessionTree]
    service: object
    status: object = None
    sent: list[Call] = field(default_factory=list)
    ends: dict[tuple[int, int, str, int], int] = field(default_factory=dict)
    skipped: list[CallRow] = field(default_factory=list)
    starts: dict[tuple[int, int, str, int], int] = field(default_factory=dict)
    most_per_stream: int = 0

    def run(self) -> Replay:
        lanes = Lanes(self.sessions, self.lanes_settings, self.skipped.append)
        self.lanes = lanes
        lanes.begin(0)
        running: list[tuple[int, int, Call]] = []
        now = 0
        while not lanes.finished:
            while call := lanes.take(now):
                key = (call.lane, call.play, call.session_id, call.turn)
                assert key not in self.starts
                self.starts[key] = now
                self.sent.append(call)
                heapq.heappush(running, (now + self.service(call), len(self.sent), call))  # type: ignore[operator]
                streams = [(c.lane, c.play, c.session_id) for _, _, c in running]
                self.most_per_stream = max(self.most_per_stream, max(streams.count(s) for s in streams))
            times = [running[0][0]] if running else []
            due = lanes.next_due_ns()
            times += [due] if due is not None else []
            if not times:
                assert lanes.finished
                break
            now = max(now, min(times))
            while running and running[0][0] <= now:
                _, _, call = heapq.heappop(running)
                self.ends[(call.lane, call.play, call.session_id, call.turn)] = now
                lanes.ended(call, now, self.status(call) if self.status else "ok")  # type: ignore[operator]
        return self


@st.composite
def trees(draw: st.DrawFn, name: str, index: int) -> SessionTree:
    times = st.integers(0, 50)
    streams = [stream(name, draw(st.lists(times, min_size=1, max_size=6)))]
    for number in range(draw(st.integers(0, 4))):
        parent = draw(st.integers(0, len(streams) - 1))
        n = streams[parent].n_turns
        spawn = draw(st.integers(-1, n - 1))
        join = draw(st.sampled_from([ROOT, *([spawn + 1] if spawn + 1 < n else [])]))
        think = draw(st.lists(times, min_size=1, max_size=4))
        streams.append(stream(f"{name}/{number}", think, parent, spawn, join))
    return SessionTree(name, index, tuple(streams))


@st.composite
def corpora(draw: st.DrawFn) -> list[SessionTree]:
    return [draw(trees(f"s{i}", i)) for i in range(draw(st.integers(1, 4)))]


settings_of = st.builds(
    LaneSettings,
    lanes=st.integers(1, 5),
    duration_ns=st.integers(0, 800),
    seed=st.integers(0, 5),
    ramp_ns=st.integers(0, 40),
    think_cap_ns=st.sampled_from([None, 0, 20]),
    idle_cap_ns=st.sampled_from([None, 5]),
    start_window=st.sampled_from([None, (0.9, 0.98), (0.25, 0.75)]),
)


def capped(think: int, cap: int | None) -> int:
    return think if cap is None else min(think, cap)


@settings(max_examples=300, deadline=None)
@given(corpora(), settings_of, st.integers(1, 37))
def test_lane_rules(sessions: list[SessionTree], lane_settings: LaneSettings, stride: int) -> None:
    replay = Replay(lane_settings, sessions, lambda call: 1 + (stride * (call.turn + 3 * call.lane)) % 60).run()
    cap = lane_settings.think_cap_ns
    window = replay.lanes.window
    assert replay.most_per_stream <= 1
    by_play: dict[tuple[int, int, str], list[Call]] = defaultdict(list)
    for call in replay.sent:
        by_play[(call.lane, call.play, call.tree.session_id)].append(call)
        key = (call.lane, call.play, call.session_id, call.turn)
        assert replay.starts[key] >= call.due_ns
        if window is not None and call.phase == "measure":
            assert window[0] <= replay.starts[key] < window[1]
    for (lane, play, _), calls in by_play.items():
        tree = calls[0].tree
        for call in calls:
            source = tree.streams[call.stream]
            think = capped(int(source.think_ns[call.turn]), cap)
            before = replay.ends.get((lane, play, call.session_id, call.turn - 1))
            bounds = []
            exact = True
            if call.turn > 0 and before is not None:
                assert replay.starts[(lane, play, call.session_id, call.turn)] >= before
                bounds.append(before + think)
            if call.turn == 0 and source.parent != ROOT:
                parent_id = tree.streams[source.parent].session_id
                if source.spawn_turn != ROOT:
                    bounds.append(replay.ends[(lane, play, parent_id, source.spawn_turn)] + think)
                else:
                    exact = False  # it starts with its parent, whose first turn may itself wait for it
            for child in tree.streams:
                if child.parent == call.stream and child.join_turn == call.turn and child.parent != ROOT:
                    last = replay.ends.get((lane, play, child.session_id, child.n_turns - 1))
                    passed = calls[0].phase == "warmup" and child.spawn_turn <= calls[0].turn and child.parent == 0
                    assert last is not None or passed or calls[0].phase == "warmup"
                    if last is not None:
                        assert replay.starts[(lane, play, call.session_id, call.turn)] >= last, "join not honoured"
                        bounds.append(last)
            if bounds and lane_settings.idle_cap_ns is None and call.phase == "measure":
                floor = [window[0]] if window and call.turn == calls[0].turn + 1 and calls[0].phase == "warmup" else []
                earliest = max(bounds)
                assert call.due_ns >= earliest
                if exact and not floor:
                    assert call.due_ns == earliest
    # Every turn of every drawn session exactly once.
    drawn = set(by_play) | {(r.lane, r.play, r.root_session_id) for r in replay.skipped}
    by_name = {tree.session_id: tree for tree in sessions}
    expected = sum(by_name[name].n_turns for _, _, name in drawn)
    keys = [(c.lane, c.play, c.session_id, c.turn) for c in replay.sent]
    keys += [(r.lane, r.play, r.session_id, r.turn) for r in replay.skipped]
    assert len(keys) == len(set(keys)) == expected


@settings(max_examples=60, deadline=None)
@given(corpora(), settings_of)
def test_same_seed_same_plan_whatever_the_server(sessions: list[SessionTree], lane_settings: LaneSettings) -> None:
    def plan(service: int) -> dict[int, list[tuple[int, str]]]:
        replay = Replay(lane_settings, sessions, lambda call: service).run()
        order: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for call in replay.sent:
            place = (call.play, call.tree.session_id)
            if place not in order[call.lane]:
                order[call.lane].append(place)
        return order

    fast, slow = plan(1), plan(70)
    for lane, sessions_played in slow.items():
        shared_length = min(len(sessions_played), len(fast[lane]))
        assert sessions_played[:shared_length] == fast[lane][:shared_length]


def test_sessions_are_drawn_without_replacement_and_counted_as_plays() -> None:
    sessions = [SessionTree(f"s{i}", i, (stream(f"s{i}", [0]),)) for i in range(5)]
    replay = Replay(LaneSettings(lanes=2, duration_ns=40, seed=1), sessions, lambda call: 5).run()
    plays = defaultdict(list)
    for call in replay.sent:
        plays[call.play].append(call.session_id)
    assert all(len(ids) == len(set(ids)) for ids in plays.values())
    assert len(plays[0]) == 5
    assert plays[0] != plays[1]


def test_warmup_opens_the_window_and_is_not_measured() -> None:
    sessions = [SessionTree("s", 0, (stream("s", [0] + [10] * 9),))]
    replay = Replay(
        LaneSettings(lanes=1, duration_ns=1000, seed=0, start_window=(0.5, 0.5)), sessions, lambda c: 7
    ).run()
    assert replay.lanes.window == (7, 1007)
    assert [(c.turn, c.phase) for c in replay.sent[:2]] == [(4, "warmup"), (5, "measure")]
    assert replay.sent[1].due_ns == 17
    assert [r.turn for r in replay.skipped if r.error_kind == "before_start"] == [0, 1, 2, 3]


def test_idle_cap_moves_every_due_time() -> None:
    sessions = [SessionTree(f"s{i}", i, (stream(f"s{i}", [0, 1000 + 10 * i]),)) for i in range(2)]
    replay = Replay(LaneSettings(lanes=2, duration_ns=500, seed=0, idle_cap_ns=50), sessions, lambda c: 5).run()
    second = sorted(c.due_ns for c in replay.sent if c.turn == 1)[:2]
    assert second == [55, 65]


def test_overflow_ends_the_tree_and_is_recorded() -> None:
    tree = SessionTree("s", 0, (stream("s", [0, 0, 0]), stream("s/a", [0, 0], 0, 0, 1)))
    other = SessionTree("t", 1, (stream("t", [0]),))
    replay = Replay(
        LaneSettings(lanes=1, duration_ns=100, seed=3),
        [tree, other],
        lambda c: 5,
        lambda c: "overflow" if c.session_id == "s/a" else "ok",
    ).run()
    first = [(r.session_id, r.turn) for r in replay.skipped if r.error_kind == "overflow" and r.play == 0]
    assert first == [("s", 1), ("s", 2), ("s/a", 1)]
    assert any(c.session_id == "t" for c in replay.sent)


def test_failures_keep_the_session_but_wait_longer() -> None:
    sessions = [SessionTree("s", 0, (stream("s", [0] * 12),))]
    replay = Replay(LaneSettings(1, 10**12, 0), sessions, lambda c: 1, lambda c: "error").run()
    gaps = np.diff([c.due_ns for c in replay.sent])
    assert gaps[0] == 1
    assert gaps[1] == 1 + 10**9
    assert max(gaps) == 1 + LONGEST_BACKOFF_NS
    assert [c.turn for c in replay.sent[:12]] == list(range(12))


def test_more_lanes_than_sessions_play_side_by_side() -> None:
    sessions = [SessionTree("s", 0, (stream("s", [0, 5]),))]
    replay = Replay(LaneSettings(lanes=3, duration_ns=12, seed=0), sessions, lambda c: 4).run()
    assert {c.play for c in replay.sent if c.lane == 2} >= {2}


def test_nothing_to_replay_is_refused() -> None:
    with pytest.raises(InputError, match="no session"):
        Lanes([], LaneSettings(1, 1, 0), lambda row: None)
    with pytest.raises(InputError, match="at least 1"):
        Lanes([SessionTree("s", 0, (stream("s", [0]),))], LaneSettings(0, 1, 0), lambda row: None)


@settings(max_examples=100, deadline=None)
@given(corpora(), settings_of, st.integers(1, 3))
def test_sessions_are_played_as_often_as_asked_for(
    sessions: list[SessionTree], lane_settings: LaneSettings, plays: int
) -> None:
    endless = replace(lane_settings, plays=plays, duration_ns=10**9)
    replay = Replay(endless, sessions, lambda call: 3).run()
    drawn = {(c.play, c.tree.session_id) for c in replay.sent} | {(r.play, r.root_session_id) for r in replay.skipped}
    assert drawn == {(play, tree.session_id) for play in range(plays) for tree in sessions}
    assert len(replay.sent) + len(replay.skipped) == plays * sum(tree.n_turns for tree in sessions)
    assert replay.lanes.window is not None
    assert replay.lanes.window[1] == max(replay.ends.values())
