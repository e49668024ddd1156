"""The transport: HTTP/1.1 over asyncio with the time stamped at each socket read.

On the hot path a read is stamped, run through the C parser for its framing, and its body bytes are
appended; nothing else. What the bytes mean is found out after the stream has ended (`agentx.sse`).

Nothing here times out on its own: connect, first byte, idle and total limits are separate and only
apply where they are set. A call is sent again by itself in one case: a reused connection that the
server had closed while idle, before any byte of an answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import cast

import httptools

from agentx.dial import basic_credentials, dial, failure
from agentx.endpoint import Endpoint
from agentx.errors import InputError
from agentx.exchange import Exchange, Limits
from agentx.units import NS_PER_S

LARGEST_HEAD = 256 * 1024
"""Bytes of response headers after which an answer is refused."""
BACKLOG_READS = 512
"""Reads of one answer that gather before they are looked at: about a millisecond of parsing."""
LARGEST_FETCH = 16 * 1024 * 1024
"""Bytes of a fetched answer."""
SWEEP_S = 0.25
"""How often the limits of calls in flight are looked at."""


class _Connection(asyncio.Protocol):
    """One keep-alive connection; it carries one exchange at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._now = client.now_ns
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._time = 0
        self._head_bytes = 0
        self._message_over = False
        self._reusable = False
        self.used = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # resume_writing then tells when all is handed over

    def data_received(self, data: bytes) -> None:
        self._time = self._now()
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes nobody asked for
            return
        exchange.last_read_ns = self._time
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._message_over:
                self._fail("protocol", f"not HTTP/1.1: {error}")
                return
            self._reusable = False  # the answer is whole, what follows it is not
        if exchange.headers_ns is None:
            self._head_bytes += len(data)
            if self._head_bytes > LARGEST_HEAD:
                self._fail("protocol", f"over {LARGEST_HEAD} bytes of headers")
                return
        if self._message_over:
            self._over()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and exchange.headers_ns is not None:
            exchange.closed_clean = True
            exchange.complete = not exchange.says_its_end
            self._client.over(exchange)
        elif exchange.connection_reused and exchange.last_read_ns is None and exchange.attempts == 1:
            self._client.send_again(exchange)
        elif exc is None:
            self._client.fail(exchange, "closed", "the server closed the connection without an answer")
        else:
            self._client.fail(exchange, "reset", f"connection lost: {exc}")

    def resume_writing(self) -> None:
        if self._exchange is not None and self._exchange.uploaded_ns is None:
            self._exchange.uploaded_ns = self._now()

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.headers_ns is None:
            exchange.header_lines.append((name, value))

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        status = self._parser.get_status_code()
        if exchange is None or status < 200:
            return
        exchange.headers_ns = self._time
        exchange.status = status

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.headers_ns is None:
            return
        exchange.reads.append((self._time, body))
        if exchange.on_backlog is not None and len(exchange.reads) >= BACKLOG_READS:
            exchange.on_backlog(exchange)

    def on_message_complete(self) -> None:
        if self._exchange is None:
            return
        if self._exchange.headers_ns is None:
            self._exchange.header_lines.clear()  # an interim 1xx answer
        else:
            self._message_over = True
            self._reusable = self._parser.should_keep_alive()  # the parser only knows it now

    # Used by the client

    def send(self, exchange: Exchange, now: int) -> None:
        """Hand a request to the socket at the time `now`."""
        transport = self._transport
        assert transport is not None
        self._exchange = exchange
        self._head_bytes = 0
        self._message_over = False
        exchange.connection = self
        exchange.connection_reused = self.used
        exchange.attempts += 1
        self.used = True
        if exchange.sent_ns is None:
            exchange.sent_ns = now
        exchange.uploaded_ns = None
        if len(exchange.body) < 65536:
            transport.write(exchange.head + exchange.body)
        else:
            transport.writelines((exchange.head, exchange.body))
        if transport.get_write_buffer_size() == 0:
            exchange.uploaded_ns = self._now()

    def close(self) -> None:
        """Close at once; an exchange in it is forgotten."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()
        self._client.discard(self)

    @property
    def usable(self) -> bool:
        """Open and carrying nothing."""
        return self._transport is not None and not self._transport.is_closing() and self._exchange is None

    def _over(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.complete = True
        if self._reusable and self.usable:
            self._client.keep(self)
        else:
            self.close()
        self._client.over(exchange)

    def _fail(self, kind: str, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        self.close()
        if exchange is not None:
            self._client.fail(exchange, kind, message)


class HttpClient:
    """Sends exchanges to one endpoint over as many keep-alive connections as they need at once."""

    def __init__(
        self,
        endpoint: Endpoint,
        now_ns: Callable[[], int],
        *,
        headers: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: Endpoint | None = None,
    ) -> None:
        """`headers` go with every request; `now_ns` is the run's clock."""
        self.endpoint = endpoint
        self.url = endpoint.url()
        self.proxy = proxy
        self.now_ns = now_ns
        self.limits = limits or Limits()
        self.connections_opened = 0
        self._ssl = ssl_context or (ssl.create_default_context() if endpoint.scheme == "https" else None)
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._active: dict[Exchange, None] = {}
        self._connecting: dict[Exchange, asyncio.Task[None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._fixed = self._fixed_headers(headers or {})
        self._target = endpoint.url() if proxy and self._ssl is None else endpoint.prefix

    def request(
        self, path: str, body: bytes, on_end: Callable[[Exchange], None], method: str = "POST", extra: str = ""
    ) -> Exchange:
        """A request of `path` (under the endpoint's prefix), not yet sent; `extra` are whole header lines."""
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        head = f"{method} {self._target}{path} HTTP/1.1\r\n{self._fixed}{extra}{length}\r\n"
        return Exchange(head.encode("latin-1"), body, on_end)

    def send(self, exchange: Exchange) -> None:
        """Send it, on an idle connection where there is one; its `on_end` is called once."""
        exchange.started_ns = self.now_ns()
        self._active[exchange] = None
        if self._sweeper is None and self._limited():
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.send(exchange, exchange.started_ns)
                return
        self._connect(exchange)

    def cancel(self, exchange: Exchange, kind: str = "cancelled", message: str = "") -> None:
        """End it now by closing its connection; `on_end` is called with this error kind."""
        if exchange in self._active:
            self._drop_connection(exchange)
            self.fail(exchange, kind, message)

    async def fetch(self, path: str, body: bytes | None = None, limit_s: float = 30.0) -> Exchange:
        """The finished exchange of a GET, or of a POST where there is a body."""
        done: asyncio.Future[None] = self._loop.create_future()

        def ended(_: Exchange) -> None:
            if not done.done():
                done.set_result(None)

        exchange = self.request(path, body or b"", ended, "GET" if body is None else "POST")
        exchange.on_backlog = self._bound_size
        self.send(exchange)
        try:
            await asyncio.wait_for(asyncio.shield(done), limit_s)
        except TimeoutError:
            self.cancel(exchange, "timeout", f"{exchange.lacks()} within {limit_s:g} s")
        except asyncio.CancelledError:
            self.cancel(exchange)
            raise
        return exchange

    def _bound_size(self, exchange: Exchange) -> None:
        """End a fetched answer that does not end by itself."""
        if len(exchange.reads) % BACKLOG_READS == 0 and len(exchange.content()) > LARGEST_FETCH:
            self.cancel(exchange, "protocol", f"an answer of over {LARGEST_FETCH} bytes")

    def close(self) -> None:
        """Close every connection; what is in flight ends as cancelled."""
        for exchange in list(self._active):
            self.cancel(exchange)
        for connection in list(self._open):
            connection.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # Used by the connections

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose exchange is whole."""
        self._idle.append(connection)

    def discard(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def send_again(self, exchange: Exchange) -> None:
        """Send once more on a fresh connection: the server had closed the reused one."""
        self._connect(exchange)

    def over(self, exchange: Exchange) -> None:
        """The answer ended, whole or cut."""
        exchange.end_ns = exchange.last_read_ns if exchange.complete and not exchange.closed_clean else self.now_ns()
        self._end(exchange)

    def fail(self, exchange: Exchange, kind: str, message: str) -> None:
        """The exchange ended without a usable answer."""
        exchange.error_kind = kind
        exchange.error_message = message
        exchange.end_ns = self.now_ns()
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        self._active.pop(exchange, None)
        exchange.connection = None
        exchange.on_end(exchange)

    def _drop_connection(self, exchange: Exchange) -> None:
        task = self._connecting.pop(exchange, None)
        if task is not None:
            task.cancel()
        if exchange.connection is not None:
            exchange.connection.close()

    # Connecting

    def _connect(self, exchange: Exchange) -> None:
        self._connecting[exchange] = self._loop.create_task(self._connect_and_send(exchange))

    async def _connect_and_send(self, exchange: Exchange) -> None:
        endpoint = self.endpoint
        limit = self.limits.connect_ns
        try:
            async with asyncio.timeout(None if limit is None else limit / NS_PER_S):
                connection = await dial(lambda: _Connection(self), endpoint, self._ssl, self.proxy)
        except (OSError, UnicodeError) as error:
            self._connecting.pop(exchange, None)
            self.fail(exchange, *failure(error, endpoint))
            return
        self._connecting.pop(exchange, None)
        self.connections_opened += 1
        self._open.add(connection)
        if connection.usable:
            connection.send(exchange, self.now_ns())
        else:
            self.fail(exchange, "closed", "the server closed the connection as soon as it was open")

    # Limits

    def _limited(self) -> bool:
        limits = self.limits
        return any(limit is not None for limit in (limits.first_byte_ns, limits.idle_ns, limits.total_ns))

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._active else None
        now = self.now_ns()
        for exchange in list(self._active):
            broken = exchange.broken_limit(self.limits, now)
            if broken is not None:
                self.cancel(exchange, *broken)

    def _fixed_headers(self, headers: Mapping[str, str]) -> str:
        fixed: dict[str, tuple[str, str]] = {
            "host": ("Host", self.endpoint.authority),
            "accept": ("Accept", "text/event-stream, application/json"),
            "accept-encoding": ("Accept-Encoding", "identity"),
            "user-agent": ("User-Agent", "agentx"),
        }
        if self.endpoint.userinfo:
            fixed["authorization"] = ("Authorization", basic_credentials(self.endpoint.userinfo))
        if self.proxy and self.proxy.userinfo and self._ssl is None:
            fixed["proxy-authorization"] = ("Proxy-Authorization", basic_credentials(self.proxy.userinfo))
        for name, value in headers.items():
            if any(c in name + value for c in "\r\n") or not name:
                raise InputError(f"header {name!r} holds a line break or no name", "write --header 'Name: value'")
            if not (name.isascii() and value.isascii()):
                raise InputError(f"header {name!r} has letters beyond ASCII", "headers are ASCII: encode the value")
            fixed[name.lower()] = (name, value)
        return "".join(f"{name}: {value}\r\n" for name, value in fixed.values())
