"""The public bug reports on the wire, and their siblings: given read boundaries over a real socket, under a told clock.

Server and client share an event loop. Before each write the server sets the client's clock to the
given time, then waits until the client has read: boundaries and times are exact, minutes take no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from agentx import metrics
from agentx.answers import Answer, error_text, is_overflow, observe
from agentx.discover import choose_model
from agentx.endpoint import Endpoint
from agentx.exchange import Exchange, Limits
from agentx.http import HttpClient
from agentx.redact import Redactor
from agentx.runs import RunWriter
from agentx.turns import CallRow
from tests.wire import chunk, delta, read_request

MS = 1_000_000
WIRE = (
    "A01", "A03", "A05", "A07", "A10", "A11", "B01", "B03", "B04", "B07", "B09", "B12", "C01", "C02", "C04.a", "C04.b",
    "C04.c", "C07", "D07", "N02", "N11",
)  # fmt: skip


@dataclass
class Told:
    """A clock that stands where it was put."""

    now: int = 0


class KeptAnswer(Answer):
    """An answer that keeps the text, for the tests."""

    def __init__(self) -> None:
        super().__init__(keep_text=True)

    def finish(self, exchange: Exchange):  # type: ignore[no-untyped-def]
        self.facts = super().finish(exchange)
        return self.facts


def play(
    pieces: Sequence[tuple[float, bytes]],
    headers: dict[str, str] | None = None,
    *,
    close: str = "clean",
    status: int = 200,
    chunked: bool = False,
    limits: Limits | None = None,
) -> tuple[dict[str, Any], KeptAnswer]:
    """The observed columns of one call whose answer is these (ms, bytes), each its own read."""

    async def go() -> tuple[dict[str, Any], KeptAnswer]:
        clock = Told()
        seen: list[Exchange] = []

        async def read_up(writer: asyncio.StreamWriter, data: bytes) -> None:
            """Write, and wait until the client has taken it all in one read."""
            before = sum(len(part) for _, part in seen[0].reads) if seen else 0
            writer.write(data)
            await writer.drain()
            for _ in range(2000):
                await asyncio.sleep(0)
                exchange = seen[0]
                if sum(len(part) for _, part in exchange.reads) > before or exchange.last_read_ns == clock.now:
                    return

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            fields = {**(headers or {"content-type": "text/event-stream"})}
            if chunked:
                fields["transfer-encoding"] = "chunked"
            top = f"HTTP/1.1 {status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n"
            clock.now = 1
            await read_up(writer, top.encode())
            for at_ms, data in pieces:
                clock.now = int(at_ms * MS)
                with contextlib.suppress(ConnectionError):
                    await read_up(writer, chunk(data) if chunked else data)
            if limits is not None:
                await asyncio.sleep(1.0)
            if chunked and close == "clean":
                await read_up(writer, b"0\r\n\r\n")
            writer.close()

        serving: list[asyncio.Task[None]] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.append(asyncio.ensure_future(serve(reader, writer)))
            await serving[0]

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(Endpoint.parse(f"http://127.0.0.1:{port}"), lambda: clock.now, limits=limits)
        done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        answer = KeptAnswer()
        exchange = client.request("/v1/chat/completions", b"{}", done.set_result)
        seen.append(exchange)
        client.send(exchange)
        row = observe(await done, answer)
        client.close()
        await asyncio.gather(*serving)
        server.close()
        await asyncio.sleep(0)
        return row, answer

    return uvloop.run(asyncio.wait_for(go(), 20))


def measured(row: dict[str, Any], answer: KeptAnswer) -> dict[str, Any]:
    """What the log's definitions ask for, by our own metrics."""
    call = CallRow("s", 0, 0, 0, None, "s", "measure", **{**row, "status": "ok"})
    frame = metrics.with_metrics(_frame(call))
    facts = answer.facts

    def ms(value: float | None) -> float | None:
        return None if value is None else value / MS

    chunks = row["chunk_ns"] or []
    return {
        "outcome": row["status"],
        "n_json_events": facts.events,
        "n_output_chunks": len(chunks),
        "ttft_ms": ms(frame["ttft_ns"][0]),
        "ttft_content_ms": ms(frame["ttfc_ns"][0]),
        "inter_chunk_ms": [(b - a) / MS for a, b in itertools.pairwise(chunks)],
        "itl_mean_ms": ms(frame["itl_ns"][0]),
        "tpot_ms": ms(frame["itl_ns"][0]),
        "last_output_ms": ms(row["last_token_ns"]),
        "stream_end_ms": ms(row["end_ns"]),
        "content": facts.content,
        "reasoning": facts.reasoning,
        "output_tokens": row["completion_tokens"] if row["status"] == "ok" else None,
        "prompt_tokens": row["prompt_tokens"],
        "cached_tokens": row["cached_tokens"],
        "reasoning_tokens": row["reasoning_tokens"],
        "done_seen": facts.done,
        "finish_reason": row["finish_reason"],
        "error_message": row["error_message"],
        "error_code": int(facts.error_code) if facts.error_code and facts.error_code.isdigit() else None,
        "counts_as_success": row["status"] == "ok",
        "n_tool_calls": len(facts.tool_calls),
        "tool_calls": facts.tool_calls,
        "content_encoding_recorded": row["content_encoding"],
    }


def _frame(row: CallRow):  # type: ignore[no-untyped-def]
    import polars as pl

    from agentx.turns import calls_batch

    return pl.from_arrow(calls_batch([row]))


def pieces_of(case: dict[str, Any]) -> list[tuple[float, bytes]]:
    return [
        (part["at_ms"], bytes.fromhex(part["hex"]) if "hex" in part else part["text"].encode())
        for part in case["chunks"]
    ]


@pytest.mark.parametrize("chunked", [False, True], ids=["until-close", "chunked"])
@pytest.mark.parametrize("name", WIRE)
def test_reported_streams(shared: Path, name: str, chunked: bool) -> None:
    case = json.loads((shared / "cases" / "inputs" / f"{name}.wire.json").read_text(encoding="utf-8"))
    number, _, part = name.partition(".")
    entry = json.loads((shared / "cases" / "expected.json").read_text(encoding="utf-8"))[number]
    expected = entry["expected"][part] if part else entry["expected"]
    found = measured(
        *play(pieces_of(case), case["headers"], close=case["close"], status=case["status"], chunked=chunked)
    )
    compared = {key: value for key, value in expected.items() if key in found}
    assert compared
    for key, value in compared.items():
        assert found[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    for key, wrong in expected.get("must_not_be", {}).items():
        if key in found:
            assert found[key] != wrong, key


def test_limits_on_silence_are_ours_to_set(shared: Path) -> None:
    case = json.loads((shared / "cases" / "inputs" / "N02.wire.json").read_text(encoding="utf-8"))
    row, _ = play(pieces_of(case), limits=Limits(idle_ns=400_000 * MS))
    assert row["status"] == "ok"
    row, _ = play([(1, b": a\n\n"), (60_001, b"")], limits=Limits(idle_ns=60_000 * MS))
    assert (row["status"], row["error_kind"]) == ("error", "idle_timeout")


def test_two_answers_with_trailers_on_one_connection(shared: Path) -> None:
    raw = (shared / "cases" / "inputs" / "N09.http.bin").read_bytes()
    second = raw.index(b"HTTP/1.1 200 OK", 10)

    async def go() -> list[tuple[dict[str, Any], KeptAnswer]]:
        opened = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal opened
            opened += 1
            for part in (raw[:second], raw[second:]):
                if not await read_request(reader):
                    break
                writer.write(part)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(
            Endpoint.parse(f"h://127.0.0.1:{server.sockets[0].getsockname()[1]}".replace("h:", "http:")), lambda: 0
        )
        found = []
        for _ in range(2):
            done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
            answer = KeptAnswer()
            client.send(client.request("/v1/chat/completions", b"{}", done.set_result))
            found.append((observe(await done, answer), answer))
        client.close()
        server.close()
        assert opened == 1
        return found

    found = uvloop.run(asyncio.wait_for(go(), 10))
    assert [(row["status"], answer.facts.content) for row, answer in found] == [("ok", "one"), ("ok", "two")]


def test_urls_models_refusals(shared: Path) -> None:
    cases = json.loads((shared / "cases" / "expected.json").read_text(encoding="utf-8"))
    inputs = shared / "cases" / "inputs"
    for url, full in cases["N07"]["expected"]["cases"].items():
        assert Endpoint.parse(url).url(cases["N07"]["expected"]["endpoint"]) == full
    models = json.loads((inputs / "M01.models.json").read_text())["data"]
    assert choose_model(models, None, "here") == cases["M01"]["expected"]["chosen"]
    answers = json.loads((inputs / "H03.responses.json").read_text())
    classes = [
        "context_overflow" if is_overflow(*error_text(json.dumps(answer["body"]).encode())) else "client_error"
        for answer in answers
    ]
    assert classes == cases["H03"]["expected"]["error_classes"]


def test_the_secret_is_in_no_artefact(shared: Path, tmp_path: Path) -> None:
    given = json.loads((shared / "cases" / "inputs" / "S01.args.json").read_text())
    secret = given["--api-key"]
    words = ["--api-key", secret, f"--api-key={secret}", "--url", given["--url"]]
    for header in given["--header"]:
        words += ["--header", header]
    redact = Redactor([secret])
    RunWriter(tmp_path / "r", {"command": redact.command(words)}).finish({})
    stored = b"".join(path.read_bytes() for path in (tmp_path / "r").iterdir())
    assert secret.encode() not in stored
    assert b"X-Api-Key: ***" in stored
    for text in (f"bad key {secret}", json.dumps({"k": secret}), secret.encode().hex(), f"Bearer {secret}x"):
        assert secret not in redact(text)
        assert secret.encode().hex() not in redact(text)


# Siblings


def sse(*payloads: str | bytes, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + (p if isinstance(p, bytes) else p.encode()) + end for p in payloads)


USAGE = '{"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}'
GOOD = sse(delta("é"), delta("\\ud83d\\ude00好", "stop", USAGE), "[DONE]")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
def test_any_line_end_in_any_pieces(end: bytes, step: int) -> None:
    stream = b"\xef\xbb\xbf: hello" + end + sse(delta("é"), delta("好", "stop", USAGE), "[DONE]", end=end)
    pieces = [(1 + i, stream[i : i + step]) for i in range(0, len(stream), step)]
    row, answer = play(pieces)
    assert (row["status"], answer.facts.content, len(row["chunk_ns"])) == ("ok", "é好", 2)
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (5, 2, 4)


@pytest.mark.parametrize(
    ("stream", "status", "chunks"),
    [
        (GOOD[:-2], "ok", 2),  # the last blank line is missing
        (sse(delta("a", "stop")) + b"data: [DONE]   \n\n", "ok", 1),
        (sse(delta("a", "stop")), "ok", 1),  # a finish reason is enough
        (sse(delta("a"), "[DONE]"), "ok", 1),
        (sse(delta("a"), '{"choices": [{"delta": {}, "finish_reason": ""}]}'), "truncated", 1),
        (sse(delta("a", "stop"), '{"error": {"message": "late", "code": 500}}'), "error", 1),
        (sse(delta("a"), '{"error": "boom"}', "[DONE]"), "error", 1),
        (sse(delta("a"), '{"error": ["boom"]}'), "error", 1),
        (sse(delta("a"), '{"object": "error", "message": "boom", "code": 400}'), "error", 1),
        (b"event: error\ndata: boom\n\n", "error", 0),
        (sse('{"error": null, "choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}'), "ok", 1),
        (sse('{"choices": null, "usage": null}', delta("a", "stop"), '{"choices": []}'), "ok", 1),
        (sse('{"choices": [{"text": "a", "finish_reason": "length"}]}', "[DONE]"), "ok", 1),
        (sse('{"choices": [{"text": "", "finish_reason": "length"}]}', "[DONE]"), "empty", 0),
        (sse('{"choices": [{"delta": {"refusal": "no"}, "finish_reason": "stop"}]}'), "ok", 1),
        (sse('{"choices": [{"delta": {"function_call": {"name": "f"}}, "finish_reason": "function_call"}]}'), "ok", 1),
        (sse('{"choices": [{"delta": {"role": "assistant", "reasoning": null}}]}', delta("a", "stop")), "ok", 1),
        (b"data: not json\n\n" + sse(delta("a", "stop")), "ok", 1),
        (b"", "truncated", 0),
        (b": ping\n\n: ping\n\n", "truncated", 0),
    ],
)
def test_endings_and_shapes(stream: bytes, status: str, chunks: int) -> None:
    row, _ = play([(5, stream)] if stream else [])
    assert (row["status"], len(row["chunk_ns"])) == (status, chunks)


def test_data_lines_join_and_unknown_fields_are_passed_over() -> None:
    event = b'id: 7\nretry: 10\nfoo: bar\ndata: {"choices": [{"delta":\n'
    event += b'data: {"content": "x"}, "finish_reason": "stop"}]}\n\n'
    row, answer = play([(3, event)])
    assert (row["status"], answer.facts.content) == ("ok", "x")


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_compressed_streams_are_read_as_they_come(kind: str) -> None:
    packer = zlib.compressobj(wbits=31 if kind == "gzip" else 15)
    pieces = []
    for at_ms, data in ((10, sse(delta("a"))), (20, sse(delta("b")) + sse(delta("c"))), (30, sse(delta("d", "stop")))):
        pieces.append((at_ms, packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)))
    row, _ = play(pieces, {"content-type": "text/event-stream", "content-encoding": kind})
    assert [at / MS for at in row["chunk_ns"]] == [10, 20, 20, 30]
    assert (row["status"], row["content_encoding"]) == ("ok", kind)


def test_an_encoding_nobody_asked_for_is_named() -> None:
    row, _ = play([(1, gzip.compress(GOOD))], {"content-type": "text/event-stream", "content-encoding": "br"})
    assert (row["status"], row["error_kind"]) == ("error", "protocol")
    assert "'br'" in row["error_message"]


@pytest.mark.parametrize("count", ["-1", "1e3", '"7"', "true", "99999999999", "null", "[1]"])
def test_counts_that_are_no_counts_are_not_measured(count: str) -> None:
    row, _ = play([(1, sse(delta("a", "stop", f'{{"prompt_tokens": {count}, "completion_tokens": {count}}}')))])
    assert (row["status"], row["prompt_tokens"], row["completion_tokens"]) == ("ok", None, None)


# Recorded bytes


def recorded(shared: Path, engine: str, name: str) -> tuple[dict[str, Any], KeptAnswer]:
    """The saved exchange, replayed with its own reads and times through the real client."""
    folder = shared / "captures" / engine
    raw = (folder / f"{name}.raw").read_bytes()
    reads = [line.split("\t") for line in (folder / f"{name}.recv.tsv").read_text().splitlines()[1:]]

    async def go() -> tuple[dict[str, Any], KeptAnswer]:
        clock = Told()
        exchange_of: list[Exchange] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            at = 0
            for time_s, size in reads:
                clock.now = int(float(time_s) * 1e9)
                writer.write(raw[at : at + int(size)])
                at += int(size)
                await writer.drain()
                for _ in range(2000):
                    await asyncio.sleep(0)
                    if exchange_of[0].last_read_ns == clock.now:
                        break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(Endpoint.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), lambda: clock.now)
        done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        answer = KeptAnswer()
        exchange_of.append(client.request("/v1/chat/completions", b"{}", done.set_result))
        client.send(exchange_of[0])
        row = observe(await done, answer)
        client.close()
        server.close()
        return row, answer

    return uvloop.run(asyncio.wait_for(go(), 10))


@pytest.mark.parametrize("engine", ["vllm", "llama_cpp"])
@pytest.mark.parametrize(
    "name", ["chat_cold", "chat_repeat", "chat_turn2", "chat_out1", "chat_continuous_usage", "completion_ids"]
)
def test_recorded_streams_are_read_to_the_token(shared: Path, engine: str, name: str) -> None:
    asked = json.loads((shared / "captures" / engine / f"{name}.request.json").read_text())
    row, answer = recorded(shared, engine, name)
    assert (row["status"], row["completion_tokens"], row["finish_reason"]) == ("ok", asked["max_tokens"], "length")
    assert 1 <= len(row["chunk_ns"]) <= asked["max_tokens"]
    assert row["sent_ns"] <= row["headers_ns"] <= row["first_token_ns"] <= row["last_token_ns"] <= row["end_ns"]
    assert answer.facts.done
    unit = 64 if engine == "vllm" else 1
    prompt, cached = row["prompt_tokens"], row["cached_tokens"]
    if name == "chat_cold":
        assert cached == 0
    if name in ("chat_repeat", "chat_out1"):
        assert cached == (prompt - 1) // unit * unit
    if name == "chat_turn2":
        assert 0 < cached < prompt


@pytest.mark.parametrize("engine", ["vllm", "llama_cpp"])
def test_recorded_endings(shared: Path, engine: str) -> None:
    row, _ = recorded(shared, engine, "err_too_long")
    assert (row["status"], row["error_kind"], row["http_status"]) == ("overflow", "context", 400)
    row, _ = recorded(shared, engine, "chat_client_cut")
    assert row["status"] == "truncated"
    assert len(row["chunk_ns"]) > 0
    row, _ = recorded(shared, engine, "chat_no_usage_opt")
    assert (row["status"], row["completion_tokens"], row["cached_tokens"]) == ("ok", None, None)
    row, _ = recorded(shared, engine, "err_bad_model")
    expected = ("error", 404) if engine == "vllm" else ("ok", 200)
    assert (row["status"], row["http_status"]) == expected
