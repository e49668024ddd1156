"""The transport against a scripted server: every ending an answer can have."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time

import pytest
import uvloop

from agentx.answers import Answer, is_overflow, observe
from agentx.endpoint import Endpoint
from agentx.errors import InputError
from agentx.exchange import Exchange, Limits
from agentx.http import HttpClient
from tests.wire import SSE_HEAD, Script, Step, chunk, delta, head, reply, serving, sse

USAGE = '{"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}'
GOOD = sse(delta("a"), delta("b", "stop", USAGE), "[DONE]")


def run(coroutine):  # type: ignore[no-untyped-def]
    return uvloop.run(asyncio.wait_for(coroutine, 20))


def client_of(url: str, limits: Limits | None = None) -> HttpClient:
    start = time.monotonic_ns()
    return HttpClient(Endpoint.parse(url), lambda: time.monotonic_ns() - start, limits=limits)


async def one(client: HttpClient, body: bytes = b"{}") -> dict:
    done = asyncio.get_running_loop().create_future()
    answer = Answer()
    exchange = client.request("/v1/chat/completions", body, done.set_result)
    exchange.on_backlog = answer.take
    client.send(exchange)
    ended: Exchange = await done
    return observe(ended, answer)


def play(*scripts: Script, limits: Limits | None = None) -> tuple[list[dict], HttpClient, list[bytes], int]:
    """Rows of as many calls as scripts, one after another over one client."""

    async def go() -> tuple[list[dict], HttpClient, list[bytes], int]:
        async with serving(lambda number, request: scripts[min(number, len(scripts) - 1)]) as wire:
            client = client_of(wire.url, limits)
            rows = [await one(client) for _ in scripts]
            client.close()
            return rows, client, wire.requests, wire.connections

    return run(go())


def test_a_good_answer_fills_every_column() -> None:
    (row,), _, requests, _ = play(GOOD)
    assert (row["status"], row["http_status"], row["finish_reason"], row["response_model"]) == ("ok", 200, "stop", "m")
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (9, 2, 4)
    times = [row[name] for name in ("sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "end_ns")]
    assert times == sorted(times)
    assert row["uploaded_ns"] >= row["sent_ns"]
    assert len(row["chunk_ns"]) == 2
    assert b"Accept-Encoding: identity" in requests[0]


def test_connections_are_kept_alive() -> None:
    rows, client, _, connections = play(GOOD, GOOD, GOOD)
    assert connections == client.connections_opened == 1
    assert [row["connection_reused"] for row in rows] == [False, True, True]


@pytest.mark.parametrize(
    ("script", "status", "kind"),
    [
        (Script([Step(0, SSE_HEAD + chunk(f"data: {delta('a')}\n\n".encode()))], "clean"), "truncated", "truncated"),
        (Script([Step(0, SSE_HEAD + chunk(f"data: {delta('a')}\n\n".encode()))], "reset"), "error", "reset"),
        (sse(delta("a")), "truncated", "truncated"),
        (sse(delta("a"), "[DONE]"), "ok", None),
        (sse(delta(None, "stop"), "[DONE]"), "empty", None),
        (sse(delta("a"), '{"error": {"message": "EngineDeadError", "code": 500}}', "[DONE]"), "error", "in_stream"),
        (sse('{"error": {"message": "maximum context length is 10 tokens", "code": 400}}'), "overflow", "context"),
        (reply('{"error": {"message": "temperature must be"}}', "400 Bad Request"), "error", "http_400"),
        (reply('{"error": {"message": "x", "type": "exceed_context_size_error"}}', "400 No"), "overflow", "context"),
        (reply("busy", "429 Too Many Requests"), "error", "http_429"),
        (reply("<html>bad gateway</html>", "502 Bad Gateway"), "error", "http_502"),
        (Script([], "clean"), "error", "closed"),
        (Script([Step(0, b"nonsense\r\n\r\n")], "clean"), "error", "protocol"),
        (Script([Step(0, head("200 OK", "Content-Type: text/event-stream")), Step(0, b"data: what\n\n")], "clean"),
         "error", "protocol"),
        (Script([Step(0, b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 300_000)], "clean"), "error", "protocol"),
    ],
)  # fmt: skip
def test_endings(script: Script, status: str, kind: str | None) -> None:
    (row,), *_ = play(script)
    assert (row["status"], row["error_kind"]) == (status, kind)
    assert row["end_ns"] is not None


def test_an_answer_that_is_no_stream_is_read_whole() -> None:
    body = (
        '{"model": "m", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": ' + USAGE + "}"
    )
    (row,), *_ = play(reply(body))
    assert (row["status"], row["completion_tokens"], len(row["chunk_ns"])) == ("ok", 2, 1)


def test_interim_answers_and_trailers_are_passed_over() -> None:
    body = chunk(f"data: {delta('a', 'stop')}\n\n".encode()) + b"0\r\nX-Sum: 1\r\n\r\n"
    script = Script([Step(0, b"HTTP/1.1 100 Continue\r\nX-B: 2\r\n\r\n" + SSE_HEAD + body)])
    rows, _, _, connections = play(script, script)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert connections == 1


def test_gzip_streams_are_decoded_as_they_come() -> None:
    packer = __import__("zlib").compressobj(wbits=31)
    steps = [Step(0, head("200 OK", "Content-Type: text/event-stream", "Content-Encoding: gzip"))]
    for number, event in enumerate((delta("a"), delta("b", "stop", USAGE), "[DONE]")):
        data = packer.compress(f"data: {event}\n\n".encode()) + packer.flush(__import__("zlib").Z_SYNC_FLUSH)
        steps.append(Step(0.05 * number, data))
    steps.append(Step(0.11, packer.flush()))
    (row,), *_ = play(Script(steps, "clean"))
    assert (row["status"], row["content_encoding"], row["completion_tokens"]) == ("ok", "gzip", 2)
    assert row["last_token_ns"] - row["first_token_ns"] > 30e6


def test_a_gzip_bomb_is_an_error_not_a_full_memory() -> None:
    bomb = gzip.compress(b"data: " + b" " * 50_000_000)
    steps = [Step(0, head("200 OK", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}") + bomb)]
    (row,), *_ = play(Script(steps))
    assert (row["status"], row["error_kind"]) == ("error", "protocol")


def test_a_connection_closed_while_idle_is_not_an_error() -> None:
    async def go() -> tuple[list[dict], int]:
        async with serving(lambda number, request: Script(GOOD.steps, "keep" if number else "clean")) as wire:
            client = client_of(wire.url)
            rows = [await one(client)]
            rows.append(await one(client))  # the server may be closing right now: sent again on a fresh connection
            await asyncio.sleep(0.05)
            rows.append(await one(client))
            client.close()
            return rows, len(wire.requests)

    rows, seen = run(go())
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert seen == 3


def test_a_reset_after_the_request_on_a_fresh_connection_is_an_error() -> None:
    (row,), *_ = play(Script([], "reset"))
    assert (row["status"], row["attempts"]) == ("error", 1)


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (Limits(first_byte_ns=200_000_000), "first_byte_timeout"),
        (Limits(idle_ns=200_000_000), "idle_timeout"),
        (Limits(total_ns=200_000_000), "total_timeout"),
    ],
)
def test_limits_are_separate_and_named(limits: Limits, kind: str) -> None:
    (row,), *_ = play(Script([Step(5.0, b"")]), limits=limits)
    assert (row["status"], row["error_kind"]) == ("error", kind)


def test_nobody_there_is_one_clear_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def go() -> dict:
        return await one(client_of(f"http://127.0.0.1:{port}"))

    row = run(go())
    assert (row["status"], row["error_kind"], row["sent_ns"], row["attempts"]) == ("error", "refused", None, 0)


def test_cancelled_calls_keep_what_had_come() -> None:
    async def go() -> dict:
        script = Script([Step(0, SSE_HEAD + chunk(f"data: {delta('a')}\n\n".encode())), Step(9, b"")])
        async with serving(lambda number, request: script) as wire:
            client = client_of(wire.url)
            done = asyncio.get_running_loop().create_future()
            answer = Answer()
            exchange = client.request("/v1/chat/completions", b"{}", done.set_result)
            client.send(exchange)
            await asyncio.sleep(0.2)
            client.cancel(exchange)
            return observe(await done, answer)

    row = run(go())
    assert (row["status"], len(row["chunk_ns"])) == ("cancelled", 1)


def test_large_requests_stamp_the_upload() -> None:
    async def go() -> dict:
        async with serving(lambda number, request: GOOD) as wire:
            return await one(client_of(wire.url), b"x" * 8_000_000)

    row = run(go())
    assert row["status"] == "ok"
    assert row["sent_ns"] <= row["uploaded_ns"] <= row["headers_ns"]


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("http://h:9000", "http://h:9000/v1/chat/completions"),
        ("http://h:9000/v1/", "http://h:9000/v1/chat/completions"),
        ("https://gw/team/a/v1", "https://gw/team/a/v1/chat/completions"),
        ("h:9000", "http://h:9000/v1/chat/completions"),
        ("http://[::1]:80/", "http://[::1]/v1/chat/completions"),
        ("http://user:secret@h/v1", "http://h/v1/chat/completions"),
        ("http://h/v1api", "http://h/v1api/v1/chat/completions"),
    ],
)
def test_base_urls(url: str, full: str) -> None:
    assert Endpoint.parse(url).url("/v1/chat/completions") == full


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h/v1?x=1"])
def test_bad_base_urls(url: str) -> None:
    with pytest.raises(InputError, match="--url"):
        Endpoint.parse(url)


def test_context_refusals_are_told_from_other_refusals() -> None:
    for text in (
        "This model's maximum context length is 8192 tokens.",
        "Input tokens exceed the configured limit of 200000 tokens.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "request (176284 tokens) exceeds the available context size (32768 tokens), try increasing it",
        "prompt is too long: 210000 tokens > 200000 maximum",
    ):
        assert is_overflow(text), text
    for text in ("temperature must be non-negative", "max_tokens must be at least 1", "rate limit exceeded"):
        assert not is_overflow(text), text
