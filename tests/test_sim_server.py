"""The simulated deployment over HTTP: what a client sees, what is counted, and who goes away."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agentx.deployment import load_deployment
from agentx.sim import wire
from agentx.sim.server import SimServer
from agentx.sim.words import Tokens, block_keys, tokenize

QUICK = load_deployment("mi325x").model_copy(
    update={
        "model": "m",
        "c0_s": 0.05,
        "k_s": 0.01,
        "prefill_tok_s": 1e6,
        "max_model_len": 5000,
        "dp": 1,
        "max_num_seqs": 8,
    }
)
FIRST_S = QUICK.c0_s + QUICK.k_s


@dataclass(frozen=True)
class Served:
    port: int

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()

    def raw(self, data: bytes) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        opened.sendall(data)
        return opened

    def stream(self, path: str, body: object) -> list[tuple[float, Any]]:
        """(seconds since the request, event) of a stream; the last event is the text `[DONE]`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            start = time.monotonic()
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
            lines = [(time.monotonic() - start, line[6:].strip()) for line in answer if line.startswith(b"data: ")]
        return [(at, "[DONE]" if line == b"[DONE]" else json.loads(line)) for at, line in lines]

    def counters(self) -> dict[str, float]:
        """Samples of `/metrics` by name without the prefix, summed over labels."""
        _, text = self.ask("GET", "/metrics")
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:")
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def wait_for(self, name: str, value: float) -> None:
        for _ in range(100):
            if self.counters()[name] == value:
                return
            time.sleep(0.02)
        raise AssertionError(f"{name} is {self.counters()[name]}, not {value}")


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    started: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Task[None]]] = []
    ready = threading.Event()

    async def go() -> None:
        task = asyncio.current_task()
        assert task is not None

        def tell(url: str) -> None:
            started.append((url, asyncio.get_running_loop(), task))
            ready.set()

        with contextlib.suppress(asyncio.CancelledError):
            await SimServer(QUICK).serve("127.0.0.1", 0, tell)

    thread = threading.Thread(target=uvloop.run, args=(go(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    url, loop, task = started[0]
    try:
        yield Served(int(url.rpartition(":")[2]))
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(5)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


def words(count: int) -> str:
    return "".join(f" w{number}" for number in range(count))


def chat(n_in: int, n_out: int, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": words(n_in)}], "max_tokens": n_out, **more}


USAGE = {"stream": True, "stream_options": {"include_usage": True}}


# The tokenizer


def tokens_of(text: str) -> Tokens:
    return np.concatenate([np.empty(0, dtype=np.int64), *tokenize(text)])


@given(st.lists(st.text(st.characters(categories=["L"], max_codepoint=127), min_size=1, max_size=16), max_size=200))
def test_filler_of_single_words_counts_exactly(units: list[str]) -> None:
    tokens = tokens_of("".join(f" {unit}" for unit in units))
    assert len(tokens) == len(units)
    assert len(set(tokens.tolist())) == len(set(units))


def test_what_is_a_token() -> None:
    assert [len(tokens_of(text)) for text in ("", " \n", "one two  three\n", "x" * 33, "a, b")] == [0, 0, 3, 3, 2]


def test_long_texts_come_in_slices_that_lose_nothing() -> None:
    text = words(10_000)
    slices = list(tokenize(text))
    assert [len(part) for part in slices] == [4096, 4096, 1808]
    assert np.concatenate(slices).tolist() == [int(tokens_of(word)[0]) for word in re.findall(r"\s*\S+", text)]


def test_a_blocks_key_depends_on_all_before_it() -> None:
    one, other = np.arange(40), np.concatenate(([99], np.arange(1, 40)))
    assert len(block_keys(one, 16)) == 2
    assert block_keys(one, 16) == block_keys(np.arange(47), 16)
    assert not set(block_keys(one, 16)) & set(block_keys(other, 16))


# What it says of itself


def test_models_and_tokenize(server: Served) -> None:
    status, body = server.ask("GET", "/v1/models")
    entry = json.loads(body)["data"][0]
    assert (status, entry["id"], entry["max_model_len"], entry["parent"]) == (200, "m", 5000, None)
    counts = []
    for asked in ({"prompt": "one two  three"}, {"messages": [{"role": "user", "content": "one two three"}]}):
        status, body = server.ask("POST", "/tokenize", {"model": "m", **asked})
        document = json.loads(body)
        assert (status, document["max_model_len"], len(document["tokens"])) == (200, 5000, document["count"])
        counts.append(document["count"])
    assert counts == [3, 3]
    assert server.ask("GET", "/health") == (200, b"")


# Streams


def test_a_chat_stream_is_timed_and_reports_usage(server: Served) -> None:
    *events, done = server.stream("/v1/chat/completions", chat(200, 10, **USAGE))
    role, *tokens, usage = (event for _, event in events)
    times = [at for at, _ in events]
    assert done[1] == "[DONE]"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"] for event in tokens] == [{"content": " word"}] * 10
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * 9 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 200,
        "total_tokens": 210,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for number, at in enumerate(times[1:11]):  # never early; late only by what this machine is late
        assert FIRST_S + 0.01 * number <= at < FIRST_S + 0.01 * number + 0.5


def test_a_completion_stream_without_usage(server: Served) -> None:
    *events, done = server.stream("/v1/completions", {"model": "m", "prompt": "a b", "max_tokens": 3, "stream": True})
    assert done[1] == "[DONE]"
    assert [(event["object"], event["choices"][0]["text"]) for _, event in events] == [("text_completion", " word")] * 3


def test_whole_answers(server: Served) -> None:
    start = time.monotonic()
    status, body = server.ask("POST", "/v1/chat/completions", chat(50, 5))
    document = json.loads(body)
    assert time.monotonic() - start >= QUICK.c0_s + 5 * QUICK.k_s - 1e-4
    assert (status, document["object"], document["usage"]["total_tokens"]) == (200, "chat.completion", 55)
    choice = document["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" word" * 5, "length")
    status, body = server.ask("POST", "/v1/completions", {"model": "m", "prompt": [5, 6, 7]})
    document = json.loads(body)
    assert (status, document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (200, 3, 16)
    assert len(tokens_of(document["choices"][0]["text"])) == 16


def test_prefixes_are_cached_by_block(server: Served) -> None:
    ids = list(range(3000, 3200))
    usages = []
    for prompt in (ids, ids, [*ids, 1, 2], [9, *ids]):
        _, body = server.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})
        usages.append(json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert usages == [0, 192, 192, 0]


def test_a_texts_ids_are_the_text_to_the_cache(server: Served) -> None:
    text = "".join(f" q{number}" for number in range(130))
    ids = json.loads(server.ask("POST", "/tokenize", {"prompt": text})[1])["tokens"]
    for prompt, cached in ((text, 0), (ids, 128)):
        _, body = server.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})
        assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


# Refusals


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (chat(5000, 10), 400, "maximum context length is 5000 tokens"),
        ({**chat(5, 1), "model": "x"}, 404, "The model `x` does not exist"),
        (chat(5, 0), 400, "max_tokens must be at least 1"),
        (chat(5, 1, n=2), 400, "n must be 1"),
        (chat(0, 1), 400, "prompt is empty"),
        ({"model": "m", "messages": 3, "max_tokens": 1}, 400, "list of messages"),
        ([1], 400, "no JSON object"),
        (b'{"model": ', 400, "no JSON"),
    ],
)
def test_refusals_have_the_shape_of_vllms(server: Served, body: object, status: int, message: str) -> None:
    got, data = server.ask("POST", "/v1/chat/completions", body)
    error = json.loads(data)["error"]
    assert (got, error["code"]) == (status, status)
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]


@pytest.mark.parametrize("prompt", [None, ["a", "b"], [-1], [True], [2**63], []])
def test_prompts_that_are_none(server: Served, prompt: object) -> None:
    assert server.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})[0] == 400


def test_unknown_paths_and_methods(server: Served) -> None:
    assert server.ask("GET", "/v1/nothing")[0] == 404
    assert server.ask("GET", "/v1/chat/completions")[0] == 405
    assert server.ask("POST", "/health", b"")[0] == 405


# The connection


def test_one_connection_takes_many_requests_and_a_few_ahead(server: Served) -> None:
    body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with server.raw(post + post + last) as opened:
        answer = b"".join(iter(lambda: opened.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"completion_tokens":2') == 2
    assert b"Connection: close" in answer


def test_a_body_in_chunks_and_a_client_that_asks_for_leave(server: Served) -> None:
    body = json.dumps({"prompt": "a b c"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.raw(head) as opened:
        assert opened.recv(100).startswith(b"HTTP/1.1 100 ")
        opened.sendall(b"4\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (body[:4], len(body) - 4, body[4:]))
        assert b'"count":3' in opened.recv(65536)


def test_an_old_client_gets_a_stream_that_ends_with_the_connection(server: Served) -> None:
    body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 2, "stream": True}).encode()
    with server.raw(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as opened:
        answer = b"".join(iter(lambda: opened.recv(65536), b""))
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello there\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20, b"400"),
    ],
)
def test_what_is_no_request_is_told_and_dropped(server: Served, data: bytes, status: bytes) -> None:
    with server.raw(data) as opened:
        answer = b"".join(iter(lambda: opened.recv(65536), b""))
    assert b"HTTP/1.1 " + status in answer
    assert server.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_body_is_413_even_while_it_is_sent(
    server: Served, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr(wire, "LARGEST_BODY", 100_000)
    body = iter([b"x" * 50_000] * 40) if chunked else b"x" * 2_000_000
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"at most 100000 bytes" in answer.read()


# Counters


def test_every_counter_is_there_before_the_first_call() -> None:
    with serving() as fresh:
        counters = fresh.counters()
    for name in (
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success_total"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
    ):
        assert counters[name] == 0, name


def test_the_counters_are_the_sums_of_what_was_answered(server: Served) -> None:
    before = server.counters()
    sizes = [(40 + 37 * number, 1 + number) for number in range(24)]
    asked = [chat(n_in, n_out, **(USAGE if n_out % 2 else {})) for n_in, n_out in sizes]

    def whole(body: dict[str, object]) -> bytes:
        return server.ask("POST", "/v1/chat/completions", body)[1]

    def usage(body: dict[str, object]) -> dict[str, Any]:
        streamed = "stream" in body
        answer = server.stream("/v1/chat/completions", body)[-2][1] if streamed else json.loads(whole(body))
        found: dict[str, Any] = answer["usage"]
        return found

    with ThreadPoolExecutor(24) as pool:
        usages = list(pool.map(usage, asked))
    after = server.counters()
    grew = {name: after[name] - before[name] for name in after}
    prompts = sum(n_in for n_in, _ in sizes)
    tokens = sum(n_out for _, n_out in sizes)
    assert [(each["prompt_tokens"], each["completion_tokens"]) for each in usages] == sizes
    assert (grew["prompt_tokens_total"], grew["prefix_cache_queries_total"]) == (prompts, prompts)
    assert grew["prefix_cache_hits_total"] == sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    assert (grew["generation_tokens_total"], grew["request_success_total"]) == (tokens, 24)
    assert (grew["time_to_first_token_seconds_count"], grew["e2e_request_latency_seconds_count"]) == (24, 24)
    assert grew["inter_token_latency_seconds_count"] == tokens - 24
    assert grew["inter_token_latency_seconds_sum"] == pytest.approx(0.01 * (tokens - 24))
    assert (after["num_requests_running"], after["num_requests_waiting"], after["kv_cache_usage_perc"]) == (0, 0, 0)


def test_names_and_kinds_of_the_counters_are_vllms(server: Served, shared: Path) -> None:
    raw = (shared / "captures" / "vllm" / "metrics_after.raw").read_text(encoding="utf-8")
    recorded = dict(line.split()[2:4] for line in raw.splitlines() if line.startswith("# TYPE vllm:"))
    _, text = server.ask("GET", "/metrics")
    ours = dict(line.split()[2:4] for line in text.decode().splitlines() if line.startswith("# TYPE "))
    assert ours.items() <= recorded.items()


# Clients that go away


def reset(opened: socket.socket) -> None:
    """Close at once and without a word, as a killed client's machine does."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    opened.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_a_client_that_goes_away_frees_its_slot(
    server: Served, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    server.wait_for("num_requests_running", 0)
    before = server.counters()
    body = json.dumps(chat(10, 4000, stream=stream)).encode()
    opened = server.raw(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    server.wait_for("num_requests_running", 1)
    time.sleep(0.05)
    leave(opened)
    server.wait_for("num_requests_running", 0)
    after = server.counters()
    assert after["request_success_total"] == before["request_success_total"]
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 10
    assert 0 < after["generation_tokens_total"] - before["generation_tokens_total"] < 1000


def test_who_waits_for_a_slot_gets_it_when_others_leave(server: Served) -> None:
    body = json.dumps(chat(10, 4000, stream=True)).encode()
    post = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    held = [server.raw(post) for _ in range(QUICK.slots + 2)]
    server.wait_for("num_requests_running", QUICK.slots)
    server.wait_for("num_requests_waiting", 2)
    assert server.counters()["kv_cache_usage_perc"] > 0
    held.pop().close()
    server.wait_for("num_requests_waiting", 1)
    held.pop(0).close()
    server.wait_for("num_requests_waiting", 0)
    assert server.counters()["num_requests_running"] == QUICK.slots
    for opened in held:
        opened.close()
    server.wait_for("num_requests_running", 0)


def test_it_stops_at_once_with_clients_connected() -> None:
    with serving() as fresh:
        idle = fresh.raw(b"")
        busy = fresh.raw(b"GET /health HTTP/1.1\r\n\r\n")
        assert busy.recv(100)
    assert busy.recv(65536) == b""
    idle.close()
    busy.close()


# The command


def run_serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentx", "serve", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "NO_COLOR": "1"})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_tells_where_and_stops_on_a_signal(number: int) -> None:
    with run_serve("--sim", "mi300x", "--port", "0") as process:
        assert process.stdout is not None
        name, _, url = process.stdout.readline().strip().partition(" on ")
        assert name == "serving mi300x"
        served = Served(int(url.rpartition(":")[2]))
        assert json.loads(served.ask("GET", "/v1/models")[1])["data"][0]["max_model_len"] == 900_000
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "serve what?"),
        (("--sim", "mi325x", "--tiny"), "serve what?"),
        (("--sim", "mi3"), "deployment 'mi3' is not known"),
        (("--sim", "mi325x", "--slots", "4"), "--slots and --context belong to --tiny"),
    ],
)
def test_serve_refuses(arguments: tuple[str, ...], message: str) -> None:
    with run_serve(*arguments) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err


def test_serve_tells_that_a_port_is_taken(server: Served) -> None:
    with run_serve("--sim", "mi325x", "--port", str(server.port)) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{server.port}" in err
