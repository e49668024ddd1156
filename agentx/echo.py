"""A truthful deployment: it answers on a given schedule and says in each event when it was sent.

It is the other end of the self-check and of the benchmarks: what a client measures against it minus
what it says is the client's own error. Send times are on the machine's monotonic clock, which every
process of a machine shares.

The schedule is in the base URL: `/echo/TTFT_US/ITL_US` answers each POST with its `max_tokens` events,
the first after TTFT_US microseconds, one every ITL_US microseconds; 0 sends the rest in one write.
Every event carries `"sent_ns": "…"`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

from agentx.errors import DeploymentError

_REQUEST = re.compile(rb"^(GET|POST) (?:/echo/(\d+)/(\d+))?(/\S*) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_STAMP_DIGITS = 20
_MODELS = (
    b'{"object":"list","data":[{"id":"echo","object":"model","owned_by":"agentx","parent":null,'
    b'"max_model_len":10000000}]}'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(fields: bytes) -> bytes:
    return b'data: {"id":"echo","object":"chat.completion.chunk","created":1,"model":"echo",%s}\n\n' % fields


_MARK = b"#" * _STAMP_DIGITS
_TOKEN_BEFORE, _TOKEN_AFTER = _chunk(
    _event(b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"sent_ns":"%s"' % _MARK)
).split(_MARK)


def _token() -> bytes:
    return b"%s%0*d%s" % (_TOKEN_BEFORE, _STAMP_DIGITS, time.monotonic_ns(), _TOKEN_AFTER)


def _end(n: int, prompt_tokens: int) -> bytes:
    finish = _event(b'"choices":[{"index":0,"delta":{},"finish_reason":"length"}]')
    usage = _event(
        b'"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":0}}' % (prompt_tokens, n, prompt_tokens + n)
    )
    return _chunk(finish) + _chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n"


@dataclass(slots=True)
class _Stream:
    """An answer on its way."""

    connection: _EchoConnection
    left: int
    total: int
    itl_ns: int
    prompt_tokens: int
    due_ns: int


class _Wheel:
    """One timer for all streams: what is due is sent, then it sleeps until the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[int, int, _Stream]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def add(self, stream: _Stream) -> None:
        self._count += 1
        heapq.heappush(self._due, (stream.due_ns, self._count, stream))
        if self._due[0][2] is stream or self._timer is None:
            self._set()

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait = (self._due[0][0] - time.monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(wait, self._turn) if wait > 0.001 else self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._timer = None
        while self._due and self._due[0][0] <= time.monotonic_ns():
            _, _, stream = heapq.heappop(self._due)
            if stream.connection.send(stream):
                self._count += 1
                heapq.heappush(self._due, (stream.due_ns, self._count, stream))
        if self._due:
            self._set()


class _EchoConnection(asyncio.Protocol):
    def __init__(self, wheel: _Wheel) -> None:
        self._wheel = wheel
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        request = b"".join(self._parts)
        head_end = request.find(b"\r\n\r\n")
        if head_end < 0:
            self._parts, self._missing = [request], 0
            return
        length = _LENGTH.search(request, 0, head_end + 2)
        size = head_end + 4 + (int(length[1]) if length else 0)
        if len(request) < size:
            self._parts, self._missing = [request], size - len(request)
            return
        self._parts, self._missing = [], 0
        self._answer(request[:size], head_end)

    def _answer(self, request: bytes, head_end: int) -> None:
        assert self._transport is not None
        line = _REQUEST.match(request)
        if line is None:
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return
        if line[1] == b"GET":
            found = line[4].endswith((b"/models", b"/health"))
            self._transport.write(
                (b"HTTP/1.1 200 OK" if found else b"HTTP/1.1 404 Not Found")
                + b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(_MODELS) if found else 0, _MODELS if found else b"")
            )
            return
        wanted = _MAX_TOKENS.search(request, head_end)
        n = max(1, int(wanted[1])) if wanted else 1
        ttft_us, itl_us = int(line[2] or 0), int(line[3] or 0)
        prompt_tokens = (len(request) - head_end) // 5
        now = time.monotonic_ns()
        stream = _Stream(self, n, n, itl_us * 1000, prompt_tokens, now + ttft_us * 1000)
        self._transport.write(_HEAD)
        if ttft_us > 0 or self.send(stream):
            self._wheel.add(stream)

    def send(self, stream: _Stream) -> bool:
        """Send what is due of the stream; True where more is to come."""
        transport = self._transport
        if transport is None:
            return False
        if stream.itl_ns == 0:
            token = _token()
            transport.write(token * stream.left + _end(stream.total, stream.prompt_tokens))
            return False
        stream.left -= 1
        if stream.left == 0:
            transport.write(_token() + _end(stream.total, stream.prompt_tokens))
            return False
        transport.write(_token())
        stream.due_ns += stream.itl_ns
        return True


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    wheel = _Wheel(loop)
    listener = socket.create_server(("127.0.0.1", port))
    server = await loop.create_server(lambda: _EchoConnection(wheel), sock=listener, backlog=4096)
    sys.stderr.write(f"echo on http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stderr.flush()
    async with server:
        await asyncio.gather(server.serve_forever(), _watch_parent())


async def _watch_parent() -> None:
    """End when standard input closes: a self-check that is killed leaves no server behind."""
    gone = asyncio.Event()

    def look() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            gone.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), look)
    await gone.wait()
    raise SystemExit


@contextlib.contextmanager
def running_echo() -> Iterator[str]:
    """The base URL of an echo deployment in a process of its own, ended with the block."""
    command = [sys.executable, "-m", "agentx.echo", "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if not line.startswith("echo on "):
            raise DeploymentError(f"the echo deployment did not start: {line.strip()}", "leave it out: --no-self-check")
        yield line.removeprefix("echo on ").strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stderr.close()


def main() -> None:
    """Serve until standard input closes; the port is the first argument, 0 takes a free one."""
    gc.freeze()
    gc.disable()
    uvloop.run(_serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))


if __name__ == "__main__":
    main()
