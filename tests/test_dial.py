"""Proxies: only when asked for, never for loopback, plain and through a tunnel; and what fails on the way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from agentx.dial import environment_proxy, is_loopback
from agentx.endpoint import Endpoint
from agentx.errors import InputError
from agentx.http import HttpClient
from agentx.target import LiveTarget
from tests.test_cases_scenarios import certificate
from tests.test_http import one
from tests.wire import Wire, delta, serving, sse

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@contextlib.asynccontextmanager
async def proxying(wire: Wire, refuse: bytes = b"") -> AsyncIterator[tuple[int, list[bytes]]]:
    """A proxy that brings everything to one server; gives its port and the heads that it was sent."""
    seen: list[bytes] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        top = await reader.readuntil(b"\r\n\r\n")
        seen.append(top)
        if refuse:
            writer.write(refuse)
            writer.close()
            return
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", wire.port)
        if top.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            onward.write(top)
        await asyncio.gather(pipe(reader, onward), pipe(onward_reader, writer))

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


def through(
    url: str, monkeypatch: pytest.MonkeyPatch, *, tls: Any = None, refuse: bytes = b"", **target: Any
) -> tuple[dict[str, Any], list[bytes], list[bytes]]:
    """(the call's columns, heads that the proxy was sent, requests that the server was sent)."""

    async def go() -> tuple[dict[str, Any], list[bytes], list[bytes]]:
        async with (
            serving(lambda n, r: sse(delta("a", "stop"), "[DONE]"), tls=tls) as wire,
            proxying(wire, refuse) as (port, seen),
        ):
            for name in ("http_proxy", "https_proxy"):
                monkeypatch.setenv(name, f"http://who:sk-TESTONLY-pw@127.0.0.1:{port}")
            client: HttpClient = LiveTarget(url, proxy="env", **target).client(url, time.monotonic_ns)
            row = await one(client)
            client.close()
            return row, seen, wire.requests

    return uvloop.run(asyncio.wait_for(go(), 20))


def test_http_goes_to_the_proxy_with_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    row, seen, requests = through("http://deployment.invalid:8000/team", monkeypatch)
    assert row["status"] == "ok"
    assert len(requests) == 1
    (top,) = seen
    assert top.startswith(b"POST http://deployment.invalid:8000/team/v1/")
    assert b"\r\nHost: deployment.invalid:8000\r\n" in top
    assert b"\r\nProxy-Authorization: Basic " in top


def test_https_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tls = certificate(tmp_path, "DNS:deployment.invalid")
    row, seen, requests = through("https://deployment.invalid", monkeypatch, tls=tls, ca=tmp_path / "cert.pem")
    assert row["status"] == "ok"
    (top,) = seen
    assert top.startswith(b"CONNECT deployment.invalid:443 HTTP/1.1\r\n")
    assert b"Proxy-Authorization" in top
    assert b"Proxy-Authorization" not in requests[0]
    assert requests[0].startswith(b"POST /v1/")


def test_a_tunnel_does_not_hide_a_wrong_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tls = certificate(tmp_path, "DNS:other.invalid")
    row, *_ = through("https://deployment.invalid", monkeypatch, tls=tls, ca=tmp_path / "cert.pem")
    assert row["error_kind"] == "tls_verify"


@pytest.mark.parametrize("refuse", [b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", b"", b"nonsense\r\n\r\n"])
def test_a_proxy_that_opens_no_tunnel_is_named(monkeypatch: pytest.MonkeyPatch, refuse: bytes) -> None:
    row, *_ = through("https://deployment.invalid", monkeypatch, refuse=refuse or b"\0", insecure=True)
    assert row["error_kind"] == "proxy"
    assert "opens no tunnel to deployment.invalid:443" in row["error_message"]
    assert "TESTONLY" not in row["error_message"]


@pytest.mark.parametrize("url", ["http://deployment.invalid", "https://deployment.invalid"])
def test_a_proxy_that_is_not_there_is_named_not_the_deployment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def go() -> dict[str, Any]:
        client = LiveTarget(url, proxy="env").client(url, time.monotonic_ns)
        row = await one(client)
        client.close()
        return row

    row = uvloop.run(asyncio.wait_for(go(), 20))
    assert row["error_kind"] == "proxy"
    assert row["error_message"].startswith("the proxy http://127.0.0.1:9 cannot be reached")


def test_the_environment_is_only_looked_at_when_asked_to_and_never_for_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    away = Endpoint.parse("http://deployment.invalid")
    assert LiveTarget("http://deployment.invalid").proxy_of(away) is None
    found = LiveTarget("http://deployment.invalid", proxy="env").proxy_of(away)
    assert found is not None
    assert (found.host, found.port) == ("127.0.0.1", 9)
    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost", "LOCALHOST.", "api.localhost"):
        endpoint = Endpoint.parse(f"http://{host}:8000")
        assert is_loopback(endpoint.host)
        assert environment_proxy(endpoint) is None
    monkeypatch.setenv("no_proxy", "deployment.invalid")
    assert environment_proxy(away) is None


def test_proxies_that_cannot_be_used_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Endpoint.parse("http://deployment.invalid")
    for url in ("socks5://127.0.0.1:9", "https://127.0.0.1:9"):
        monkeypatch.setenv("all_proxy", url)
        with pytest.raises(InputError, match="proxy"):
            environment_proxy(away)


def test_credentials_are_masked_wherever_a_proxy_or_url_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://who:sk-TESTONLY-pw@127.0.0.1:9")
    assert "sk-TESTONLY-pw" in LiveTarget("http://deployment.invalid", proxy="env").secrets()
    for url in ("http://who:sk-TESTONLY-pw@host:port", "ftp://who:sk-TESTONLY-pw@host", "who:sk-TESTONLY-pw@host?x=1"):
        with pytest.raises(InputError) as caught:
            Endpoint.parse(url)
        assert "TESTONLY" not in "".join(caught.value.lines())


def test_a_host_name_that_is_none_is_told_at_once() -> None:
    async def go() -> dict[str, Any]:
        client = HttpClient(Endpoint.parse(f"http://{'a' * 70}.invalid"), time.monotonic_ns)
        row = await one(client)
        client.close()
        return row

    assert asyncio.run(asyncio.wait_for(go(), 10))["error_kind"] == "dns"
