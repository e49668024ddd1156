"""The simulated deployment: its law, its limits, and the same model over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agentx.deployment import Deployment, deployment_names, load_deployment
from agentx.errors import AgentxError, InputError
from agentx.lanes import Lanes, LaneSettings
from agentx.prefix import PlayBlocks
from agentx.sim.driver import SimDriver
from agentx.sim.model import BlockCache, Event, Request, SimModel
from agentx.sim.server import SimServer
from agentx.turns import ROOT, CallRow, SessionTree, Stream, calls_batch
from agentx.units import NS_PER_S

MI325X = load_deployment("mi325x")
MI300X = load_deployment("mi300x")


def run_model(model: SimModel, arrivals: list[tuple[int, Request]]) -> dict[Request, int]:
    """Finish times of requests that arrive at given times."""
    done: dict[Request, int] = {}
    pending = sorted(arrivals, key=lambda entry: entry[0])
    while pending or model.next_event_ns() is not None:
        event = model.next_event_ns()
        if pending and (event is None or pending[0][0] <= event):
            model.submit(*pending.pop(0))
            continue
        assert event is not None
        for kind, request in model.advance(event):
            if kind is Event.FINISHED:
                done[request] = event
        assert len(model.running) <= model.deployment.slots
    return done


def request(n_in: int, n_out: int, first: int = 0) -> Request:
    return Request([first + k for k in range(n_in // 64)], n_in, n_out)


@pytest.mark.parametrize("deployment", [MI325X, MI300X], ids=lambda d: d.name)
@pytest.mark.parametrize("n_out", [1, 64, 256, 1024])
def test_one_request_alone_follows_the_published_fit(deployment: Deployment, n_out: int) -> None:
    alone = request(1024, n_out)
    done = run_model(SimModel(deployment, 64), [(0, alone)])
    assert done[alone] / NS_PER_S == pytest.approx(deployment.c0_s + deployment.k_s * n_out, rel=1e-6)
    assert alone.first_token_ns is not None
    assert (done[alone] - alone.first_token_ns) == (n_out - 1) * round(deployment.k_s * NS_PER_S)


def test_the_constants_are_the_seeds() -> None:
    assert (MI325X.slots, MI300X.slots) == (256, 64)
    assert (MI325X.max_model_len, MI300X.max_model_len) == (1_000_000, 900_000)
    assert deployment_names() == ["mi300x", "mi325x"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4000), st.integers(1, 60), st.integers(0, 3)), max_size=40),
    st.integers(1, 4),
)
def test_limits_hold_and_nothing_is_lost(arrivals: list[tuple[int, int, int, int]], slots: int) -> None:
    small = MI325X.model_copy(update={"dp": 1, "max_num_seqs": slots, "kv_pool_tokens": 2048})
    model = SimModel(small, 64)
    requests = [(t * NS_PER_S, request(n_in, n_out, 1000 * first)) for t, n_in, n_out, first in arrivals]
    done = run_model(model, requests)
    assert len(done) == len(requests)
    assert len(model.cache) <= 2048 // 64
    for arrived, one in requests:
        assert one.first_token_ns is not None
        assert arrived < one.first_token_ns <= done[one] == one.end_ns
        assert one.cached_tokens % 64 == 0
        assert 0 <= one.cached_tokens < one.input_tokens
    order = [one for _, one in sorted(requests, key=lambda entry: entry[0])]
    firsts = [one.first_token_ns for one in order]
    assert firsts == sorted(firsts)  # type: ignore[type-var]


def test_the_cache_serves_leading_runs_and_forgets_the_least_recent() -> None:
    cache = BlockCache(4)
    cache.keep([1, 2, 3])
    assert (cache.leading([1, 2, 9, 3]), cache.leading([2, 3])) == (2, 2)
    cache.keep([7, 8])
    assert len(cache) == 4
    assert (cache.leading([7, 8]), cache.leading([1, 2, 3])) == (2, 2)


def test_the_last_token_is_never_served() -> None:
    model = SimModel(MI325X, 64)
    one, two, three = request(128, 1), request(128, 1), request(129, 1)
    run_model(model, [(0, one), (NS_PER_S, two), (2 * NS_PER_S, three)])
    assert [r.cached_tokens for r in (one, two, three)] == [0, 64, 128]


def tree(turns: int, name: str) -> SessionTree:
    ids = [np.arange(4, dtype=np.uint64)] + [np.array([100 + k], dtype=np.uint64) for k in range(turns - 1)]
    keep = [0, *range(4, 3 + turns)]
    sizes = [64 * (4 + k) + 10 for k in range(turns)]
    think = [0] + [NS_PER_S] * (turns - 1)
    return SessionTree(name, 0, (Stream(name, ROOT, ROOT, ROOT, think, sizes, [20] * turns, ["m"] * turns, keep, ids),))


def simulate(
    lanes: LaneSettings, deployment: Deployment = MI325X, grace_ns: int = 0, drain: bool = False
) -> list[CallRow]:
    rows: list[CallRow] = []
    driver = SimDriver(
        Lanes([tree(5, "a"), tree(3, "b")], lanes, rows.append),
        SimModel(deployment, 64),
        lambda one, play: PlayBlocks(one, play, block_size=64, scope="local", nonce="n", cache_bust=True),
        rows.append,
        grace_ns=0,
        drain=drain,
    )
    driver.run()
    return rows


def test_a_replay_is_exact_and_the_same_every_time() -> None:
    lanes = LaneSettings(4, 60 * NS_PER_S, 3, NS_PER_S, start_window=(0.4, 0.9))
    rows = simulate(lanes)
    assert pa.Table.from_batches([calls_batch(rows)]).equals(pa.Table.from_batches([calls_batch(simulate(lanes))]))
    done = [row for row in rows if row.status == "ok"]
    assert done
    for row in done:
        assert row.sent_ns == row.due_ns
        assert row.prompt_tokens == row.planned_input_tokens
        assert row.cached_tokens == row.ceiling_cached_tokens
        assert len(row.chunk_ns or []) == row.completion_tokens == 20


def test_the_windows_end_cuts_or_drains() -> None:
    lanes = LaneSettings(2, 4 * NS_PER_S, 3)
    cut = [row for row in simulate(lanes) if row.status == "cancelled"]
    assert cut
    assert all(row.end_ns == 4 * NS_PER_S and row.phase == "drain" for row in cut)
    assert all(row.chunk_ns is not None and all(t <= 4 * NS_PER_S for t in row.chunk_ns) for row in cut)
    drained = simulate(lanes, drain=True)
    assert {row.status for row in drained} == {"ok", "skipped"}


def test_what_does_not_fit_the_window_is_overflow() -> None:
    tiny = MI325X.model_copy(update={"max_model_len": 300})
    rows = simulate(LaneSettings(1, 5 * NS_PER_S, 0), tiny)
    assert {row.status for row in rows} <= {"ok", "overflow", "skipped", "cancelled"}
    assert any(
        row.status == "overflow" and "maximum context length is 300" in (row.error_message or "") for row in rows
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_num_seqs: 32", "dp: missing"),
        ("dp: 8\nslot: 3", "slot: unknown key"),
    ],
)
def test_deployment_files_are_strict(tmp_path, change: str, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "d.yaml"
    path.write_text(change)
    with pytest.raises(AgentxError) as caught:
        load_deployment(str(path))
    assert any(message in line for line in caught.value.lines())


def test_unknown_deployments_are_told_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_deployment("mi325")
    assert caught.value.hint == "did you mean 'mi325x'?"


# Over HTTP

QUICK = MI325X.model_copy(update={"c0_s": 0.05, "k_s": 0.01, "prefill_tok_s": 1e6, "max_model_len": 5000, "model": "m"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    found: list[int] = []
    ready = threading.Event()
    stop: list[object] = []

    def tell(url: str) -> None:
        found.append(int(url.rpartition(":")[2]))
        ready.set()

    async def go() -> None:
        task = asyncio.current_task()
        stop.extend((asyncio.get_running_loop(), task))
        await SimServer(QUICK).serve("127.0.0.1", 0, tell)

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            uvloop.run(go())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield found[0]
    loop, task = stop
    loop.call_soon_threadsafe(task.cancel)  # type: ignore[attr-defined]
    thread.join(10)


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def chat(n_in: int, n_out: int, **more: object) -> dict:
    text = "".join(f" w{k}" for k in range(n_in))
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": n_out, **more}


def test_models_and_tokenize(port: int) -> None:
    status, body = ask(port, "GET", "/v1/models")
    entry = json.loads(body)["data"][0]
    assert (status, entry["id"], entry["max_model_len"], entry["parent"]) == (200, "m", 5000, None)
    for asked in ({"prompt": "one two  three"}, {"messages": [{"role": "user", "content": "one two three"}]}):
        status, body = ask(port, "POST", "/tokenize", {"model": "m", **asked})
        assert (status, json.loads(body)["count"]) == (200, 3)


def test_streams_are_timed_and_report_usage(port: int) -> None:
    asked = chat(200, 10, stream=True, stream_options={"include_usage": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(asked))
    answer = connection.getresponse()
    lines = [(time.monotonic() - start, line) for line in answer if line.startswith(b"data: ")]
    connection.close()
    assert lines[-1][1] == b"data: [DONE]\n"
    events = [json.loads(line[6:]) for _, line in lines[:-1]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [event["choices"][0] if event["choices"] else {} for event in events]
    tokens = [at for (at, _), choice in zip(lines, choices, strict=False) if choice.get("delta", {}).get("content")]
    assert len(tokens) == 10
    assert 0.06 <= tokens[0] < 0.6
    assert 0.08 < tokens[-1] - tokens[0] < 0.6
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 10)


def test_prefixes_are_cached_by_block(port: int) -> None:
    ids = list(range(3000, 3200))
    asked = {"model": "m", "prompt": ids, "max_tokens": 1}
    usages = []
    for prompt in (ids, ids, [*ids, 1, 2], [9, *ids]):
        _, body = ask(port, "POST", "/v1/completions", {**asked, "prompt": prompt})
        usages.append(json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert usages == [0, 192, 192, 0]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (chat(5000, 10), 400, "maximum context length is 5000 tokens"),
        ({**chat(5, 1), "model": "x"}, 404, "does not exist"),
        (chat(5, 0), 400, "max_tokens must be at least 1"),
        ({"model": "m", "messages": 3, "max_tokens": 1}, 400, "list of messages"),
        ([1], 400, "no JSON object"),
    ],
)
def test_refusals_are_vllms(port: int, body: object, status: int, message: str) -> None:
    got, data = ask(port, "POST", "/v1/chat/completions", body)
    assert got == status
    assert message in json.loads(data)["error"]["message"]


def test_unknown_paths_are_404(port: int) -> None:
    assert ask(port, "GET", "/v1/nothing")[0] == 404
    assert ask(port, "GET", "/health")[0] == 200


def values(port: int) -> dict[str, float]:
    _, text = ask(port, "GET", "/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_metrics_count_what_was_served(port: int) -> None:
    before = values(port)
    ask(port, "POST", "/v1/chat/completions", chat(130, 7))
    after = values(port)

    def grew(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0.0)

    assert (grew("prompt_tokens_total"), grew("generation_tokens_total"), grew("request_success_total")) == (130, 7, 1)
    assert grew("prefix_cache_queries_total") == 130
    assert grew("time_to_first_token_seconds_count") == 1
    assert grew("inter_token_latency_seconds_count") == 6
    assert after["vllm:num_requests_running"] == 0


def test_a_client_that_goes_away_frees_its_slot(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(chat(10, 4000, stream=True)))
    connection.getresponse().read(10)
    time.sleep(0.2)
    assert values(port)["vllm:num_requests_running"] == 1
    connection.close()
    time.sleep(0.7)
    assert values(port)["vllm:num_requests_running"] == 0
