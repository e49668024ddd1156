"""The HTTP layer under any bytes: splits change nothing, and no stream crashes it, hangs it or loses a call."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentx.answers import Answer, observe
from agentx.endpoint import Endpoint
from agentx.exchange import Exchange
from agentx.http import HttpClient, _Connection
from tests.wire import delta, head

USAGE = '{"prompt_tokens": 5, "completion_tokens": 3}'
EVENTS = [delta("one"), delta("zwei ü"), delta("3", "length", USAGE), "[DONE]"]
BODY = "".join(f"data: {event}\n\n" for event in EVENTS).encode()
SSE = "Content-Type: text/event-stream"


def chunked(body: bytes, size: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in pieces) + b"0\r\n" + trailer + b"\r\n"


ANSWERS = {
    "chunked": head("200 OK", SSE, "Transfer-Encoding: chunked") + chunked(BODY, 40),
    "one chunk a byte": head("200 OK", SSE, "Transfer-Encoding: chunked") + chunked(BODY, 1),
    "extensions and trailers": head("200 OK", SSE, "Transfer-Encoding: chunked")
    + chunked(BODY, 64, b";name=value", b"X-Checksum: 1\r\n"),
    "length": head("200 OK", SSE, f"Content-Length: {len(BODY)}") + BODY,
    "until closed": head("200 OK", SSE, "Connection: close") + BODY,
    "gzip": head("200 OK", SSE, "Content-Encoding: gzip", "Transfer-Encoding: chunked")
    + chunked(gzip.compress(BODY, mtime=0), 11),
    "after an interim answer": head("100 Continue") + head("200 OK", SSE, f"Content-Length: {len(BODY)}") + BODY,
    "crlf events": head("200 OK", SSE, "Transfer-Encoding: chunked") + chunked(BODY.replace(b"\n", b"\r\n"), 33),
    "an error": head("429 Too Many Requests", "Content-Length: 26") + b'{"error":{"message":"no"}}',
}


class FakeTransport(asyncio.Transport):
    """A socket that takes everything and knows when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


async def _fed(pieces: Sequence[bytes], reset: bool) -> tuple[dict[str, Any], HttpClient]:
    """The columns of one call whose answer comes in these pieces and then ends."""
    ended: list[Exchange] = []
    client = HttpClient(Endpoint.parse("http://127.0.0.1:1"), lambda: 7)
    answer = Answer()
    exchange = client.request("/v1/chat/completions", b"{}", ended.append)
    exchange.on_backlog = answer.take
    connection = _Connection(client)
    transport = FakeTransport()
    connection.connection_made(transport)
    client._open.add(connection)
    client._idle.append(connection)
    client.send(exchange)
    for piece in pieces:
        if piece and not transport.closed:
            connection.data_received(piece)
    if not transport.closed:
        connection.eof_received()
    connection.connection_lost(ConnectionResetError("reset") if reset else None)
    assert ended == [exchange]
    assert not client._active
    assert not client._connecting
    assert not client._open
    row = observe(exchange, answer)
    client.close()
    return row, client


def fed(pieces: Sequence[bytes], reset: bool = False) -> dict[str, Any]:
    return asyncio.run(_fed(pieces, reset))[0]


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


WHOLE = {name: fed([answer]) for name, answer in ANSWERS.items()}


def test_every_form_of_the_answer_says_the_same() -> None:
    facts = ("status", "finish_reason", "prompt_tokens", "completion_tokens", "chunk_ns")
    rows = {name: {key: row[key] for key in facts} for name, row in WHOLE.items()}
    assert rows.pop("an error")["status"] == "error"
    assert {json.dumps(row) for row in rows.values()} == {json.dumps(rows["chunked"])}
    assert rows["chunked"]["status"] == "ok"
    assert rows["chunked"]["completion_tokens"] == 3


@given(name=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 4000), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_split_gives_the_same_row(name: str, cuts: list[int]) -> None:
    assert fed(split(ANSWERS[name], cuts)) == WHOLE[name]


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_a_byte_at_a_time_gives_the_same_row(name: str) -> None:
    assert fed([ANSWERS[name][at : at + 1] for at in range(len(ANSWERS[name]))]) == WHOLE[name]


@given(name=st.sampled_from(sorted(ANSWERS)), at=st.integers(0, 4000), reset=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_cut_stream_ends_once_and_is_never_ok_before_its_last_event(name: str, at: int, reset: bool) -> None:
    answer = ANSWERS[name]
    cut = answer[: at % len(answer)]
    row = fed([cut], reset)
    assert row["status"] in ("ok", "error", "truncated", "empty")
    if b"[DONE]" not in cut and b'"length"' not in cut and name not in ("gzip", "one chunk a byte"):
        assert row["status"] in ("error", "truncated")


edits = st.lists(
    st.tuples(st.integers(0, 4000), st.sampled_from(["flip", "drop", "insert", "repeat"]), st.binary(max_size=6)),
    min_size=1,
    max_size=8,
)


def mutated(answer: bytes, changes: Sequence[tuple[int, str, bytes]]) -> bytes:
    data = bytearray(answer)
    for place, kind, extra in changes:
        at = place % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << (len(extra) % 8)
        elif kind == "drop":
            del data[at : at + 1 + len(extra)]
        elif kind == "insert":
            data[at:at] = extra
        elif kind == "repeat":
            data[at:at] = data[at : at + 20]
    return bytes(data)


@given(name=st.sampled_from(sorted(ANSWERS)), changes=edits, cuts=st.lists(st.integers(0, 4000), max_size=6))
@example(name="chunked", changes=[(95, "insert", b"ffffffffffffffff")], cuts=[])
@settings(max_examples=600, deadline=None)
def test_no_mutation_crashes_hangs_or_loses_a_call(
    name: str, changes: list[tuple[int, str, bytes]], cuts: list[int]
) -> None:
    row = fed(split(mutated(ANSWERS[name], changes), cuts))
    assert row["status"] in ("ok", "error", "truncated", "empty", "overflow")
    assert row["attempts"] == 1


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=200, deadline=None)
def test_no_bytes_at_all_crash_it(data: bytes, cuts: list[int]) -> None:
    assert fed(split(data, cuts))["status"] in ("error", "truncated", "empty", "ok")


@pytest.mark.parametrize(
    "answer",
    [
        head("200 OK", "Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\n",
        head("200 OK", "Transfer-Encoding: chunked") + b"-5\r\nhello\r\n",
        head("200 OK", "Content-Length: -1") + b"x",
        head("200 OK", "Content-Length: 99999999999999999999") + b"x",
        head("200 OK", "Content-Length: 5", "Content-Length: 7") + b"xxxxxxx",
        head("200 OK", "Content-Length: 5", "Transfer-Encoding: chunked") + b"xxxxx",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 99999 No\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nX-Binary: \xff\xfe\x80\r\nContent-Length: 0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"<html>not http</html>",
        head("200 OK", SSE, "Content-Encoding: gzip", "Content-Length: 9") + b"not gzip!",
        head("200 OK", SSE, "Content-Encoding: br", "Content-Length: 1") + b"x",
        head("101 Switching Protocols") + b"raw",
        head("204 No Content"),
        head("304 Not Modified", "Content-Length: 10"),
    ],
)
def test_framing_that_no_server_should_send_is_an_error_of_one_call(answer: bytes) -> None:
    for pieces in ([answer], [answer[at : at + 7] for at in range(0, min(len(answer), 3000), 7)]):
        row = fed(pieces)
        assert row["status"] in ("error", "truncated")
        assert row["error_kind"]
