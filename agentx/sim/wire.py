"""The server's side of HTTP/1.1: requests come out whole and in order, answers go back whole or as a stream.

A connection that the client closes cancels the answer under way. What comes in is bounded: head, body and
the number of requests sent ahead of their answers.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import httptools
import orjson

LARGEST_BODY = 64 * 1024 * 1024
LARGEST_HEAD = 64 * 1024
MOST_AHEAD = 4
"""Requests that a client may send before it has the answer to the first of them."""
LINGER_S = 2.0
"""Time that a refused client gets to read the answer while it is still sending."""


class RefusedError(Exception):
    """A request that gets an error answer, in the shape of vLLM's."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.document = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request, read to its end."""

    method: str
    path: str
    """Without the query."""
    body: bytes
    keep_alive: bool
    chunked: bool
    """The client understands an answer in chunks (HTTP/1.1)."""


class Reply:
    """Where the answer to one request goes."""

    def __init__(
        self, transport: asyncio.Transport, writable: asyncio.Event, *, keep_alive: bool, chunked: bool
    ) -> None:
        self._transport = transport
        self._writable = writable
        self._chunked = chunked
        self.keep_alive = keep_alive

    def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Send all of the answer."""
        self._transport.write(self._head(status, kind, f"Content-Length: {len(body)}") + body)

    def start(self, kind: str) -> None:
        """Send the head of an answer that comes in parts."""
        if self._chunked:
            self._transport.write(self._head(200, kind, "Transfer-Encoding: chunked"))
        else:  # HTTP/1.0: the end of the connection is the end of the answer
            self.keep_alive = False
            self._transport.write(self._head(200, kind, "Cache-Control: no-store"))

    async def part(self, data: bytes) -> None:
        """Send a part; waits while the client does not read."""
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)
        await self._writable.wait()

    def end(self) -> None:
        """The parts are complete."""
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")

    def _head(self, status: int, kind: str, framing: str) -> bytes:
        connection = "keep-alive" if self.keep_alive else "close"
        lines = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            f"Content-Type: {kind}",
            framing,
            f"Connection: {connection}",
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


Handler = Callable[[HttpRequest, Reply], Awaitable[None]]


class ServerConnection(asyncio.Protocol):
    """One client's connection; `connections` holds those that are open."""

    def __init__(self, handle: Handler, connections: set[ServerConnection]) -> None:
        self._handle = handle
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._ahead: deque[HttpRequest | RefusedError] = deque()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._closing = False
        self._url = b""
        self._head_size = 0
        self._body: list[bytes] = []
        self._body_size = 0
        self._expects = False

    def close(self) -> None:
        """Drop the connection and the answer under way."""
        self._transport.abort()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: nobody waits for the answer under way."""
        self._connections.discard(self)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client does not read what is written."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._closing = True  # the request is answered in HTTP/1.1, what follows it would be another protocol
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, RefusedError) else RefusedError(400, f"this is no HTTP: {error}"))

    # What the parser calls

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url, self._head_size = b"", 0
        self._body, self._body_size = [], 0
        self._expects = False

    def on_url(self, url: bytes) -> None:
        """A part of its target."""
        self._url += url
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; raises RefusedError where it announces too large a body."""
        self._grow_head(len(name) + len(value))
        if name.lower() == b"content-length" and int(value) > LARGEST_BODY:
            raise _too_large()
        if name.lower() == b"expect":
            self._expects = True

    def on_headers_complete(self) -> None:
        """The head is there: a client that waits for leave to send the body gets it."""
        if self._expects and not self._ahead and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_size += len(body)
        if self._body_size > LARGEST_BODY:
            raise _too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if len(self._ahead) >= MOST_AHEAD:
            raise RefusedError(400, f"more than {MOST_AHEAD} requests were sent ahead of their answers")
        request = HttpRequest(
            self._parser.get_method().decode("latin-1"),
            self._url.partition(b"?")[0].decode("latin-1"),
            b"".join(self._body),
            self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            self._parser.get_http_version() != "1.0",
        )
        self._body = []
        self._take(request)

    def _grow_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > LARGEST_HEAD:
            raise RefusedError(431, f"a request head has at most {LARGEST_HEAD} bytes")

    # Answers

    def _refuse(self, refused: RefusedError) -> None:
        """Nothing more is read from this client; it is told why after the answers before."""
        self._closing = True
        self._take(refused)

    def _take(self, item: HttpRequest | RefusedError) -> None:
        self._ahead.append(item)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        whole = False
        try:
            while self._ahead and not self._transport.is_closing():
                await self._answer(self._ahead.popleft())
            whole = True
        finally:
            self._task = None
            if not whole:
                self._transport.abort()  # a cut answer must not look like a whole one

    async def _answer(self, item: HttpRequest | RefusedError) -> None:
        if isinstance(item, RefusedError):
            reply = Reply(self._transport, self._writable, keep_alive=False, chunked=False)
            reply.whole(item.status, orjson.dumps(item.document))
            self._linger()
            return
        reply = Reply(self._transport, self._writable, keep_alive=item.keep_alive, chunked=item.chunked)
        try:
            await self._handle(item, reply)
        except RefusedError as refused:
            reply.whole(refused.status, orjson.dumps(refused.document))
        if not reply.keep_alive:
            self._closing = True
            self._transport.close()

    def _linger(self) -> None:
        """Close after the client had time to read the answer: closing while it sends would lose it."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)


def _too_large() -> RefusedError:
    return RefusedError(413, f"a request body has at most {LARGEST_BODY} bytes", "RequestEntityTooLargeError")
