"""The simulated deployment over HTTP, in real time: an OpenAI-compatible API in front of the model.

Served are `/v1/models`, `/v1/chat/completions`, `/v1/completions` (text or token ids), `/tokenize`,
`/metrics` with vLLM's names, and `/health`. Its tokenizer is a plain one: every run of characters up
to the next white space is one token. A chat prompt is its messages' texts one after the other, with no
template of its own. Every answer has exactly `max_tokens` tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentx.deployment import Deployment
from agentx.sim.model import Event, Request, SimModel
from agentx.units import NS_PER_S

LARGEST_BODY = 64 * 1024 * 1024
LARGEST_HEAD = 64 * 1024
LOOK_S = 0.25
"""How often a waiting request looks whether its client is still there."""
DEFAULT_MAX_TOKENS = 16
"""Output length where a request names none, as in the completions API."""

_WORD = re.compile(rb"\s*\S+")
_TTFT_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class RefusedError(Exception):
    """A request that gets an error answer."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


@dataclass(slots=True)
class _Waiter:
    """A request whose handler waits for the model."""

    decoding: asyncio.Future[None]
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _Metrics:
    """Counters under vLLM's names."""

    registry: CollectorRegistry
    prompt: Counter
    generation: Counter
    queries: Counter
    hits: Counter
    success: Counter
    running: Gauge
    waiting: Gauge
    usage: Gauge
    ttft: Histogram
    itl: Histogram
    labels: tuple[str, str]


def _metrics(model: str, block_size: int) -> _Metrics:
    registry = CollectorRegistry()
    names = ("model_name", "engine")

    def counter(name: str, text: str, more: Sequence[str] = ()) -> Counter:
        return Counter(f"vllm:{name}", text, (*names, *more), registry=registry)

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, names, registry=registry)

    def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, names, registry=registry, buckets=buckets)

    config = Gauge("vllm:cache_config_info", "Cache configuration.", ("block_size", "engine"), registry=registry)
    config.labels(str(block_size), "0").set(1)
    return _Metrics(
        registry,
        prompt=counter("prompt_tokens", "Prompt tokens processed."),
        generation=counter("generation_tokens", "Output tokens made."),
        queries=counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        hits=counter("prefix_cache_hits", "Prompt tokens served from the prefix cache."),
        success=counter("request_success", "Finished requests.", ("finished_reason",)),
        running=gauge("num_requests_running", "Requests that hold a slot."),
        waiting=gauge("num_requests_waiting", "Requests that wait."),
        usage=gauge("kv_cache_usage_perc", "Part of the prefix cache that is filled."),
        ttft=histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS),
        itl=histogram("inter_token_latency_seconds", "Time per output token.", _ITL_BUCKETS),
        labels=(model, "0"),
    )


@dataclass(slots=True)
class _Asked:
    """A completion request, understood."""

    chat: bool
    tokens: int
    keys: list[int]
    max_tokens: int
    stream: bool
    usage: bool
    id: str = field(default="")


class SimServer:
    """One deployment behind HTTP; `speed` above 1 makes its time pass faster."""

    def __init__(self, deployment: Deployment, speed: float = 1.0) -> None:
        self.deployment = deployment
        self._model = SimModel(deployment, deployment.block_size)
        self._speed = speed
        self._start = time.monotonic_ns()
        self._waiters: dict[Request, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = _metrics(deployment.model, deployment.block_size)
        self._served = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        """Serve until cancelled; `ready` is told the base URL once it listens."""
        server = await asyncio.start_server(self._connection, host, port, limit=LARGEST_HEAD, backlog=4096)
        bound = server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{bound}")
        try:
            await server.serve_forever()
        finally:
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    # Time

    def _now(self) -> int:
        """Time of the model."""
        return int((time.monotonic_ns() - self._start) * self._speed)

    async def _until(self, time_ns: int) -> None:
        wait = (time_ns - self._now()) / self._speed / NS_PER_S
        if wait > 0:
            await asyncio.sleep(wait)

    def _advance(self) -> None:
        self._timer = None
        self._tell(self._model.advance(self._now()))

    def _tell(self, happened: Sequence[tuple[Event, Request]]) -> None:
        for event, request in happened:
            waiter = self._waiters.get(request)
            if event is Event.DECODING and waiter is not None and not waiter.decoding.done():
                waiter.decoding.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._model.next_event_ns()
        if due is not None:
            wait = max(0.0, (due - self._now()) / self._speed / NS_PER_S)
            self._timer = asyncio.get_running_loop().call_later(wait, self._advance)

    # HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False where the connection is at its end."""
        try:
            top = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        try:
            method, path, headers = _head(top)
            body = await _body(reader, headers)
            await self._route(method, path, body, reader, writer)
        except RefusedError as refused:
            error = {"message": refused.message, "type": refused.kind, "param": None, "code": refused.status}
            self._reply(writer, refused.status, {"error": error})
            if refused.status in (411, 413):
                return False
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    async def _route(
        self, method: str, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if method == "GET" and path == "/v1/models":
            self._reply(writer, 200, self._models())
        elif method == "GET" and path == "/metrics":
            self._write(writer, 200, "text/plain; version=0.0.4", self._exposition())
        elif method == "GET" and path == "/health":
            self._write(writer, 200, "text/plain", b"")
        elif method == "POST" and path == "/tokenize":
            self._reply(writer, 200, self._tokenized(_json(body)))
        elif method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            await self._complete(self._understand(_json(body), path.endswith("chat/completions")), reader, writer)
        else:
            raise RefusedError(404, "NotFoundError", f"{method} {path} is not served")

    def _reply(self, writer: asyncio.StreamWriter, status: int, document: object) -> None:
        self._write(writer, status, "application/json", orjson.dumps(document))

    def _write(self, writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
        writer.write(_response_head(status, kind, len(body)) + body)

    # What it says of itself

    def _models(self) -> dict[str, Any]:
        entry = {
            "id": self.deployment.model,
            "object": "model",
            "created": 0,
            "owned_by": "agentx",
            "root": self.deployment.model,
            "parent": None,
            "max_model_len": self.deployment.max_model_len,
        }
        return {"object": "list", "data": [entry]}

    def _exposition(self) -> bytes:
        metrics, model = self._metrics, self._model
        metrics.running.labels(*metrics.labels).set(len(model.running))
        metrics.waiting.labels(*metrics.labels).set(model.waiting)
        metrics.usage.labels(*metrics.labels).set(len(model.cache) / model.cache.capacity)
        return generate_latest(metrics.registry)

    def _tokenized(self, fields: dict[str, Any]) -> dict[str, Any]:
        tokens = _tokens_of(fields, chat="messages" in fields)
        return {"count": len(tokens), "max_model_len": self.deployment.max_model_len, "tokens": tokens}

    # Completions

    def _understand(self, fields: dict[str, Any], chat: bool) -> _Asked:
        model = fields.get("model")
        if model != self.deployment.model:
            raise RefusedError(404, "NotFoundError", f"The model `{model}` does not exist.")
        limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
        limit = DEFAULT_MAX_TOKENS if limit is None else limit
        if type(limit) is not int or limit < 1:
            raise RefusedError(400, "BadRequestError", f"max_tokens must be at least 1, got {limit!r}.")
        tokens = _tokens_of(fields, chat)
        refusal = self._model.refusal(len(tokens), limit)
        if refusal is not None:
            raise RefusedError(400, "BadRequestError", refusal)
        options = fields.get("stream_options")
        self._served += 1
        return _Asked(
            chat=chat,
            tokens=len(tokens),
            keys=_block_keys(tokens, self.deployment.block_size),
            max_tokens=limit,
            stream=fields.get("stream") is True,
            usage=isinstance(options, dict) and options.get("include_usage") is True,
            id=f"{'chatcmpl' if chat else 'cmpl'}-{self._served}",
        )

    async def _complete(self, asked: _Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = Request(asked.keys, asked.tokens, asked.max_tokens)
        now = self._now()
        waiter = self._waiters[request] = _Waiter(asyncio.get_running_loop().create_future(), now)
        gone = asyncio.ensure_future(_closed(reader))
        self._model.submit(now, request)
        self._set_timer()
        answer = self._stream if asked.stream else self._whole
        work = asyncio.ensure_future(answer(asked, request, waiter, writer))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionResetError
            work.result()
            self._count(request, waiter)
        finally:
            gone.cancel()
            work.cancel()
            del self._waiters[request]
            if request.end_ns is None or request.end_ns > self._now():
                self._tell(self._model.cancel(self._now(), request))

    async def _whole(self, asked: _Asked, request: Request, waiter: _Waiter, writer: asyncio.StreamWriter) -> None:
        await waiter.decoding
        assert request.end_ns is not None
        await self._until(request.end_ns)
        text = " word" * asked.max_tokens
        answer = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
        document = self._document(asked, [{"index": 0, **answer, "finish_reason": "length"}], stream=False)
        self._reply(writer, 200, {**document, "usage": self._usage(request)})

    async def _stream(self, asked: _Asked, request: Request, waiter: _Waiter, writer: asyncio.StreamWriter) -> None:
        writer.write(_response_head(200, "text/event-stream; charset=utf-8", None))
        await waiter.decoding
        assert request.first_token_ns is not None
        for number in range(asked.max_tokens):
            await self._until(request.first_token_ns + number * self._model.k_ns)
            if number == 0 and asked.chat:
                self._event(asked, writer, [{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            last = number == asked.max_tokens - 1
            part = {"delta": {"content": " word"}} if asked.chat else {"text": " word"}
            self._event(asked, writer, [{"index": 0, **part, "finish_reason": "length" if last else None}])
            await writer.drain()
        if asked.usage:
            self._event(asked, writer, [], self._usage(request))
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(
        self, asked: _Asked, writer: asyncio.StreamWriter, choices: list[dict[str, Any]], usage: object = None
    ) -> None:
        document = self._document(asked, choices, stream=True)
        if usage is not None:
            document["usage"] = usage
        _chunk(writer, b"data: " + orjson.dumps(document) + b"\n\n")

    def _document(self, asked: _Asked, choices: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" if asked.chat else "text_completion"
        if asked.chat and stream:
            kind += ".chunk"
        created = int(time.time())
        return {"id": asked.id, "object": kind, "created": created, "model": self.deployment.model, "choices": choices}

    def _usage(self, request: Request) -> dict[str, Any]:
        return {
            "prompt_tokens": request.input_tokens,
            "completion_tokens": request.output_tokens,
            "total_tokens": request.input_tokens + request.output_tokens,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        }

    def _count(self, request: Request, waiter: _Waiter) -> None:
        metrics = self._metrics
        labels = metrics.labels
        metrics.prompt.labels(*labels).inc(request.input_tokens)
        metrics.generation.labels(*labels).inc(request.output_tokens)
        metrics.queries.labels(*labels).inc(request.input_tokens)
        metrics.hits.labels(*labels).inc(request.cached_tokens)
        metrics.success.labels(*labels, "length").inc()
        assert request.first_token_ns is not None
        metrics.ttft.labels(*labels).observe((request.first_token_ns - waiter.arrived_ns) / NS_PER_S)
        for _ in range(request.output_tokens - 1):
            metrics.itl.labels(*labels).observe(self._model.k_ns / NS_PER_S)


async def _closed(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed its side."""
    while not reader.at_eof():
        await asyncio.sleep(LOOK_S)


def _response_head(status: int, kind: str, length: int | None) -> bytes:
    """The head of an answer; chunked where the length is not known."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    reason = http.HTTPStatus(status).phrase
    return f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode("latin-1")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _head(top: bytes) -> tuple[str, str, dict[str, str]]:
    """(method, path, headers) of a request head."""
    first, *lines = top.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3:
        raise RefusedError(400, "BadRequestError", "no HTTP request line")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return parts[0], parts[1].partition("?")[0], headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "transfer-encoding" in headers:
        raise RefusedError(411, "BadRequestError", "a request needs a Content-Length")
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > LARGEST_BODY:
        raise RefusedError(413, "BadRequestError", f"a request body of {length} bytes, at most {LARGEST_BODY} are read")
    return await reader.readexactly(int(length))


def _json(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusedError(400, "BadRequestError", f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, "BadRequestError", "the body is no JSON object")
    return fields


def _tokens_of(fields: dict[str, Any], chat: bool) -> list[int]:
    """Token ids of a request's prompt; raises RefusedError where it has none."""
    if chat:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RefusedError(400, "BadRequestError", "messages must be a list of messages")
        return [token for message in messages for token in _tokenize(_content(message.get("content")))]
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return _tokenize(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise RefusedError(400, "BadRequestError", "prompt must be a text or a list of token ids")


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _tokenize(text: str) -> list[int]:
    return [zlib.crc32(word) & 0x7FFFFFFF for word in _WORD.findall(text.encode())]


def _block_keys(tokens: list[int], block_size: int) -> list[int]:
    """A key per full block that depends on everything before it."""
    keys = []
    chain = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = b",".join(b"%d" % token for token in tokens[start : start + block_size])
        chain = hashlib.blake2b(chain + block, digest_size=8).digest()
        keys.append(int.from_bytes(chain, "big"))
    return keys
