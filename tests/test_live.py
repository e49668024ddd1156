"""The live driver on the wire: order, cut-off, interruption, overflow, and the lag of its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import orjson
import pytest
import uvloop

from agentx.endpoint import Endpoint
from agentx.exchange import Exchange
from agentx.http import HttpClient
from agentx.lanes import Lanes, LaneSettings
from agentx.live import OVERRUN_CHUNKS, LiveDriver, LiveSettings, retry_after_ns
from agentx.prefix import CeilingTracker, PlayBlocks
from agentx.redact import Redactor
from agentx.turns import ROOT, BlockIds, CallRow, SessionTree, Stream
from tests.wire import SSE_HEAD, Script, Step, Wire, chunk, delta, head, reply, serving, sse

MS = 1_000_000
BLOCK = 64


NAMES = {5: "s", 6: "s/a", 7: "s/b", 8: "s/c"}
"""Output length to the stream that has it: what tells streams apart on the wire."""


class PlainPrompts:
    """A prompt that says how long it is, and for how many tokens it asks: enough to know the turn."""

    path = "/v1/chat/completions"

    def body(self, keys: BlockIds, last_tokens: int, output_tokens: int, stream: object = None) -> bytes:
        return orjson.dumps({"turn": len(keys) - 1, "session": NAMES[output_tokens]})


def stream(name: str, think_ms: list[int], parent: int = ROOT, spawn: int = ROOT, join: int = ROOT) -> Stream:
    n = len(think_ms)
    output = next(tokens for tokens, known in NAMES.items() if known == name)
    ids = [np.arange(1, dtype=np.uint64) + k for k in range(n)]
    think, inputs = [t * MS for t in think_ms], [BLOCK * (k + 1) for k in range(n)]
    return Stream(name, parent, spawn, join, think, inputs, [output] * n, ["m"] * n, list(range(n)), ids)


def usage(n: int) -> str:
    return f'{{"prompt_tokens": 10, "completion_tokens": {n}}}'


def ok(after_s: float = 0.0) -> Script:
    return sse(delta("a"), delta("b", "stop", usage(2)), "[DONE]", at_s=after_s)


def replay(
    sessions: list[SessionTree],
    answer: Callable[[int, bytes], Script],
    lane_settings: LaneSettings,
    live: LiveSettings,
    during: Callable[[LiveDriver], None] | None = None,
    at_s: float = 0.0,
) -> tuple[list[CallRow], Wire, LiveDriver]:
    rows: list[CallRow] = []

    async def go() -> tuple[Wire, LiveDriver]:
        async with serving(answer) as wire:
            start = time.monotonic_ns()
            client = HttpClient(Endpoint.parse(wire.url), lambda: time.monotonic_ns() - start)
            lanes = Lanes(sessions, lane_settings, rows.append)
            driver = LiveDriver(
                lanes,
                [client],
                PlainPrompts(),
                lambda tree, play: PlayBlocks(tree, play, block_size=BLOCK, scope="local", nonce="n", cache_bust=True),
                CeilingTracker(BLOCK, BLOCK),
                rows.append,
                live,
                redact=Redactor(["sk-TESTONLY-1"]),
            )
            if during is not None:
                asyncio.get_running_loop().call_later(at_s, during, driver)
            await driver.run()
            return wire, driver

    wire, driver = uvloop.run(asyncio.wait_for(go(), 30))
    return rows, wire, driver


def sent_order(wire: Wire) -> list[tuple[str, int]]:
    bodies = [orjson.loads(request.partition(b"\r\n\r\n")[2]) for request in wire.requests]
    return [(body["session"], body["turn"]) for body in bodies]


def test_subagents_are_spawned_before_and_joined_by_their_parent() -> None:
    tree = SessionTree(
        "s", 0, (stream("s", [0, 10, 10]), stream("s/a", [0, 30], 0, 0, 1), stream("s/b", [5], 0, 0, 1),
                 stream("s/c", [0], 0, 1, ROOT)),
    )  # fmt: skip
    rows, wire, _ = replay([tree], lambda n, r: ok(0.01), LaneSettings(1, 300 * MS, 0), LiveSettings(1000 * MS))
    first = sent_order(wire)[:7]
    assert first[0] == ("s", 0)
    assert set(first[1:4]) == {("s/a", 0), ("s/a", 1), ("s/b", 0)}
    assert first[4] == ("s", 1)
    assert set(first[5:7]) == {("s/c", 0), ("s", 2)}
    by_place = {(r.session_id, r.turn): r for r in rows if r.play == 0}
    ended = max(by_place[("s/a", 1)].end_ns, by_place[("s/b", 0)].end_ns)
    assert by_place[("s", 1)].due_ns == max(ended, by_place[("s", 0)].end_ns + 10 * MS)
    assert by_place[("s/b", 0)].due_ns == by_place[("s", 0)].end_ns + 5 * MS
    assert by_place[("s/a", 0)].parent_session_id == "s"


def test_every_row_is_there_and_the_ceiling_counts_what_was_sent() -> None:
    tree = SessionTree("s", 0, (stream("s", [0, 5, 5]),))
    rows, _, driver = replay([tree], lambda n, r: ok(), LaneSettings(2, 200 * MS, 0), LiveSettings(500 * MS))
    sent = [row for row in rows if row.status == "ok"]
    assert {row.ceiling_cached_tokens for row in sent if row.turn == 0} == {0}
    assert {row.ceiling_cached_tokens for row in sent if row.turn == 2} == {2 * BLOCK}
    keys = [(row.lane, row.play, row.session_id, row.turn) for row in rows]
    assert len(keys) == len(set(keys))
    assert len(rows) % 3 == 0
    assert driver.ended_because == "window"
    assert all(row.sent_ns >= row.due_ns for row in sent)


def test_calls_past_the_grace_are_cancelled_not_errors() -> None:
    slow = Script([*sse(delta("a")).steps[:1], Step(0.05, b"40\r\ndata: " + b" " * 58), Step(60.0, b"")])
    tree = SessionTree("s", 0, (stream("s", [0, 0]),))
    started = time.monotonic()
    rows, _, _ = replay([tree], lambda n, r: slow, LaneSettings(3, 100 * MS, 0), LiveSettings(100 * MS))
    assert time.monotonic() - started < 5
    assert (
        sorted((row.status, row.error_kind) for row in rows)
        == [("cancelled", "cancelled")] * 3 + [("skipped", "window_end")] * 3
    )
    assert {row.phase for row in rows if row.status == "cancelled"} == {"drain"}


def test_drain_waits_for_everything() -> None:
    tree = SessionTree("s", 0, (stream("s", [0]),))
    rows, _, _ = replay([tree], lambda n, r: ok(0.4), LaneSettings(2, 50 * MS, 0), LiveSettings(0, drain=True))
    assert [(row.status, row.phase) for row in rows] == [("ok", "drain")] * 2


def test_interrupt_drains_then_cuts() -> None:
    tree = SessionTree("s", 0, (stream("s", [0, 0, 0]),))
    rows, _, driver = replay(
        [tree], lambda n, r: ok(0.3), LaneSettings(2, 60_000 * MS, 0), LiveSettings(0), LiveDriver.interrupt, 0.1
    )
    assert driver.ended_because == "interrupted"
    assert [row.status for row in rows].count("ok") == 2
    assert {row.error_kind for row in rows if row.status == "skipped"} == {"interrupted"}

    def twice(driver: LiveDriver) -> None:
        driver.interrupt()
        driver.interrupt()

    rows, _, _ = replay([tree], lambda n, r: ok(20), LaneSettings(2, 60_000 * MS, 0), LiveSettings(0), twice, 0.1)
    assert [row.status for row in rows].count("cancelled") == 2


def test_overflow_ends_the_session_and_secrets_are_masked() -> None:
    refusal = reply('{"error": {"message": "maximum context length is 9, key sk-TESTONLY-1"}}', "400 Bad Request")
    tree = SessionTree("s", 0, (stream("s", [0, 0]),))
    rows, _, _ = replay([tree], lambda n, r: refusal, LaneSettings(1, 30 * MS, 0), LiveSettings(100 * MS))
    overflow = [row for row in rows if row.status == "overflow"]
    assert overflow
    assert all("sk-TESTONLY" not in (row.error_message or "") for row in rows)
    assert {row.error_kind for row in rows if row.status == "skipped"} <= {"overflow", "window_end"}


def test_in_flight_calls_are_known_for_the_journal() -> None:
    seen: list[list[CallRow]] = []
    tree = SessionTree("s", 0, (stream("s", [0]),))
    replay(
        [tree], lambda n, r: ok(0.2), LaneSettings(2, 50 * MS, 0), LiveSettings(1000 * MS),
        lambda driver: seen.append(driver.in_flight_rows()), 0.1,
    )  # fmt: skip
    assert [(row.status, row.error_kind) for row in seen[0]] == [("cancelled", "killed")] * 2


@pytest.mark.parametrize("lanes", [1, 32])
def test_calls_go_when_they_are_due(lanes: int) -> None:
    tree = SessionTree("s", 0, (stream("s", [0] + [40] * 20),))
    rows, _, _ = replay([tree], lambda n, r: ok(), LaneSettings(lanes, 500 * MS, 0), LiveSettings(500 * MS))
    lags = [row.sent_ns - row.due_ns for row in rows if row.status == "ok" and row.turn > 0]
    assert len(lags) >= 3 * lanes
    assert float(np.median(lags)) < 3 * MS


def test_a_refusal_for_now_is_sent_again_and_counts_from_the_first_attempt() -> None:
    busy = Script([Step(0, head("429 Too Many Requests", "Retry-After: 1", "Content-Length: 0"))])
    tree = SessionTree("s", 0, (stream("s", [0]),))
    live = LiveSettings(3000 * MS, retry=frozenset({429}))
    rows, wire, _ = replay(
        [tree], lambda n, r: busy if n == 0 else ok(0.05), LaneSettings(1, 2000 * MS, 0, plays=1), live
    )
    (row,) = rows
    assert (row.status, row.attempts, len(wire.requests)) == ("ok", 2, 2)
    assert row.last_sent_ns - row.sent_ns >= 1000 * MS
    assert row.first_token_ns - row.sent_ns >= 1050 * MS
    assert row.first_token_ns - row.last_sent_ns < 900 * MS


@pytest.mark.parametrize("asked", ["9" * 400, "-1", "1e9", "Wed, 21 Oct 2026 07:28:00 GMT", "²", ""])
def test_any_wait_that_a_server_asks_for_is_at_most_a_minute(asked: str) -> None:
    exchange = Exchange(b"", b"", lambda ended: None)
    exchange.header_lines.append((b"retry-after", asked.encode()))
    assert 0 < retry_after_ns(exchange, 0) <= 60_000 * MS


def test_a_refusal_that_cannot_be_sent_again_stands() -> None:
    busy = Script([Step(0, head("503 Service Unavailable", "Retry-After: 9", "Content-Length: 0"))])
    tree = SessionTree("s", 0, (stream("s", [0]),))
    for retry in (frozenset[int](), frozenset({503})):
        rows, *_ = replay(
            [tree], lambda n, r: busy, LaneSettings(1, 1000 * MS, 0, plays=1), LiveSettings(0, retry=retry)
        )
        assert [(row.status, row.error_kind, row.attempts) for row in rows] == [("error", "http_503", 1)]


class _BrokenError(Exception):
    """A fault of our own."""


@pytest.mark.parametrize("where", ["prompt", "record"])
def test_a_fault_in_a_callback_ends_the_run_instead_of_losing_a_call(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise _BrokenError

    def later(driver: LiveDriver) -> None:
        if where == "prompt":
            monkeypatch.setattr(PlainPrompts, "body", broken)
        else:
            monkeypatch.setattr(driver, "_record", broken)

    tree = SessionTree("s", 0, (stream("s", [0] * 5),))
    started = time.monotonic()
    with pytest.raises(_BrokenError):
        replay([tree], lambda n, r: ok(0.05), LaneSettings(2, 60_000 * MS, 0), LiveSettings(0), later, 0.2)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("what", ["chunks", "comments"])
def test_an_answer_without_end_is_cut_in_the_warmup_too(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would end it: bytes come, so it is no stall, and no window is open yet."""
    endless = sse(*[delta("x")] * (OVERRUN_CHUNKS + 1200), every_s=0.0005)
    if what == "comments":
        monkeypatch.setattr("agentx.live.OVERRUN_BYTES", 1024)
        monkeypatch.setattr("agentx.live.OVERRUN_TOKEN_BYTES", 1024)
        comments = (Step(n * 0.0005, chunk(b": still here\n\n")) for n in range(4096))
        endless = Script([Step(0.0, SSE_HEAD), *comments])
    tree = SessionTree("s", 0, (stream("s", [0, 0]),))
    rows, *_ = replay(
        [tree],
        lambda n, r: endless if n == 0 else ok(),
        LaneSettings(1, 500 * MS, 0, start_window=(0.9, 0.9), plays=1),
        LiveSettings(0),
    )
    warm, measured = sorted((row for row in rows if row.sent_ns is not None), key=lambda row: row.turn)
    assert (warm.phase, warm.status, warm.error_kind) == ("warmup", "error", "overrun")
    assert (measured.phase, measured.status) == ("measure", "ok")


def test_interrupted_before_it_began_sends_nothing() -> None:
    tree = SessionTree("s", 0, (stream("s", [0]),))
    lanes = Lanes([tree], LaneSettings(1, 1000 * MS, 0), lambda row: None)
    lanes.close(0, "interrupted")
    lanes.draw()
    lanes.begin(5)
    assert lanes.finished
    assert lanes.take(6) is None


def test_silence_ends_the_run_as_stalled() -> None:
    tree = SessionTree("s", 0, (stream("s", [0, 0]),))
    started = time.monotonic()
    rows, _, driver = replay(
        [tree], lambda n, r: ok(30), LaneSettings(2, 60_000 * MS, 0), LiveSettings(0, stall_ns=500 * MS)
    )
    assert time.monotonic() - started < 10
    assert driver.ended_because == "stalled"
    assert sorted(row.status for row in rows) == ["cancelled"] * 2 + ["skipped"] * 2
