"""Opening connections: straight to an endpoint, or through a proxy that the user asked for.

Proxies of the environment are never used on their own, and never for loopback: what is measured must be
the path that the user names.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import TypeVar

from agentx.endpoint import Endpoint
from agentx.errors import InputError

AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)

LARGEST_REPLY = 65536
"""Bytes of a proxy's answer to CONNECT after which it is refused."""


class ProxyError(OSError):
    """A proxy that does not open a tunnel."""


def environment_proxy(endpoint: Endpoint) -> Endpoint | None:
    """The environment's proxy for an endpoint (`https_proxy`, `http_proxy`, `all_proxy`, less `no_proxy`)."""
    if is_loopback(endpoint.host):
        return None
    proxies = urllib.request.getproxies_environment()
    url = proxies.get(endpoint.scheme) or proxies.get("all")
    if not url or urllib.request.proxy_bypass(f"{endpoint.host}:{endpoint.port}"):
        return None
    try:
        proxy = Endpoint.parse(url)
    except InputError as error:
        raise InputError(
            f"the environment's proxy for {endpoint.url()} is no HTTP proxy", "look at http_proxy and https_proxy"
        ) from error
    if proxy.scheme != "http":
        raise InputError(f"the proxy {proxy.url()} is spoken to in TLS, which is not supported", "use an http:// proxy")
    return proxy


def is_loopback(host: str) -> bool:
    """True for this machine's own addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost")


def basic_credentials(userinfo: str) -> str:
    """The Authorization value of `user:password` as it stands in a URL."""
    return "Basic " + base64.b64encode(urllib.parse.unquote(userinfo).encode()).decode()


async def dial(
    make: Callable[[], AnyProtocol], endpoint: Endpoint, context: ssl.SSLContext | None, proxy: Endpoint | None
) -> AnyProtocol:
    """A connected protocol; raises OSError (ssl.SSLError and ProxyError are some), or UnicodeError for no host name.

    Through a proxy, https is a tunnel and http is sent to the proxy itself.
    """
    loop = asyncio.get_running_loop()
    if proxy is None:
        name = endpoint.host if context else None
        _, protocol = await loop.create_connection(
            make, endpoint.host, endpoint.port, ssl=context, server_hostname=name
        )
        return protocol
    if context is None:
        return (await _reach(make, proxy))[1]
    transport, tunnel = await _reach(_Tunnel, proxy)
    try:
        await tunnel.open(transport, endpoint, proxy)
        protocol = make()
        secured = await loop.start_tls(transport, protocol, context, server_hostname=endpoint.host)
    except BaseException:
        transport.abort()
        raise
    assert secured is not None
    protocol.connection_made(secured)
    return protocol


async def _reach(make: Callable[[], AnyProtocol], proxy: Endpoint) -> tuple[asyncio.Transport, AnyProtocol]:
    """A connection to a proxy; raises ProxyError where it is not there."""
    try:
        return await asyncio.get_running_loop().create_connection(make, proxy.host, proxy.port)
    except (OSError, UnicodeError) as error:
        raise ProxyError(f"the proxy {proxy.url()} cannot be reached: {error}") from error


class _Tunnel(asyncio.Protocol):
    """Asks a proxy for a tunnel and reads its answer."""

    def __init__(self) -> None:
        self._got = b""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def open(self, transport: asyncio.Transport, endpoint: Endpoint, proxy: Endpoint) -> None:
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        to = f"{host}:{endpoint.port}"
        login = f"Proxy-Authorization: {basic_credentials(proxy.userinfo)}\r\n" if proxy.userinfo else ""
        transport.write(f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{login}\r\n".encode("latin-1"))
        line = (await self._answer).split(b"\r\n")[0].decode("latin-1")
        if not re.match(r"HTTP/1\.[01] 2\d\d", line):
            raise ProxyError(f"the proxy {proxy.url()} opens no tunnel to {to}: {line[:100] or 'no answer'}")

    def data_received(self, data: bytes) -> None:
        self._got += data
        if (b"\r\n\r\n" in self._got or len(self._got) > LARGEST_REPLY) and not self._answer.done():
            self._answer.set_result(self._got)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_result(b"")


def failure(error: BaseException, endpoint: Endpoint) -> tuple[str, str]:
    """(error kind, message) of a connection that could not be opened."""
    where = endpoint.url()
    if isinstance(error, ProxyError):
        return "proxy", str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return "tls_verify", f"the certificate of {where} is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "tls", f"no TLS with {where}: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return "connect_timeout", f"no connection to {where} in time"
    if isinstance(error, socket.gaierror | UnicodeError):
        return "dns", f"the host name of {where} is not known: {getattr(error, 'strerror', error)}"
    if isinstance(error, ConnectionRefusedError):
        return "refused", f"{where} refuses connections"
    return "connect", f"no connection to {where}: {error}"
