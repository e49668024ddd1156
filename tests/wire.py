"""A scripted loopback server: each connection plays given bytes at given times, whatever is asked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """Bytes to send `at_s` after the request has arrived."""

    at_s: float
    data: bytes


@dataclass(frozen=True)
class Script:
    """What the server does with one request."""

    steps: Sequence[Step]
    close: str = "keep"
    """keep, clean (orderly end) or reset."""


@dataclass
class Wire:
    """A running scripted server and what it saw."""

    host: str
    scheme: str
    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


def head(status: str = "200 OK", *headers: str) -> bytes:
    return ("\r\n".join((f"HTTP/1.1 {status}", *headers)) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


SSE_HEAD = head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked")


def sse(*events: str, at_s: float = 0.0, every_s: float = 0.0) -> Script:
    """A chunked event stream, one event per HTTP chunk."""
    steps = [Step(at_s, SSE_HEAD)]
    steps += [Step(at_s + i * every_s, chunk(f"data: {event}\n\n".encode())) for i, event in enumerate(events)]
    last = steps[-1]
    return Script([*steps[:-1], Step(last.at_s, last.data + b"0\r\n\r\n")])


def reply(body: str, status: str = "200 OK") -> Script:
    """A plain JSON reply."""
    data = body.encode()
    return Script([Step(0.0, head(status, "Content-Type: application/json", f"Content-Length: {len(data)}") + data)])


def delta(content: str | None = None, finish: str | None = None, usage: str | None = None) -> str:
    """One chat completion chunk."""
    inner = "{}" if content is None else f'{{"content": "{content}"}}'
    reason = "null" if finish is None else f'"{finish}"'
    tail = "" if usage is None else f', "usage": {usage}'
    return f'{{"model": "m", "choices": [{{"index": 0, "delta": {inner}, "finish_reason": {reason}}}]{tail}}}'


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[int, bytes], Script],
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    idle_close_s: float | None = None,
) -> AsyncIterator[Wire]:
    """A server that plays `answer(request number, request)` for each request on any connection.

    A connection without a request for `idle_close_s` is closed.
    """
    wire = Wire(host=f"[{host}]" if ":" in host else host, scheme="https" if tls else "http")
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while request := await asyncio.wait_for(read_request(reader), idle_close_s):
                wire.requests.append(request)
                script = answer(len(wire.requests) - 1, request)
                start = asyncio.get_running_loop().time()
                for step in script.steps:
                    await asyncio.sleep(max(0.0, start + step.at_s - asyncio.get_running_loop().time()))
                    writer.write(step.data)
                    await writer.drain()
                if script.close == "reset":
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.transport.abort()
                    return
                if script.close == "clean":
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(handle, host, 0, limit=2**26, ssl=tls)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    try:
        top = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = 0
    for line in top.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return top + await reader.readexactly(length)
