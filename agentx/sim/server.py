"""The simulated deployment over HTTP, in real time: an OpenAI-compatible API in front of the model.

Served are `/v1/models`, `/v1/chat/completions`, `/v1/completions` (text or token ids), `/tokenize`,
`/metrics` with vLLM's names, and `/health`. A chat prompt is its messages' texts one after the other: its
template adds no token. Every answer has exactly `max_tokens` tokens of one word each; what else a request
asks of the output (sampling, `min_tokens`, `ignore_eos`, `stop`) changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from agentx.deployment import Deployment
from agentx.sim.counters import Counters
from agentx.sim.model import Request, SimModel
from agentx.sim.realtime import RealTimeModel
from agentx.sim.wire import HttpRequest, RefusedError, Reply, ServerConnection
from agentx.sim.words import Tokens, block_keys, tokenize

DEFAULT_MAX_TOKENS = 16
"""Output length where a request names none: the completions API's own, for chat as well."""
WORD = " word"
"""The text of every output token: one token of its own tokenizer."""

_GET = ("/v1/models", "/metrics", "/health")
_POST = ("/v1/chat/completions", "/v1/completions", "/tokenize")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A completion request, understood."""

    id: str
    created: int
    chat: bool
    stream: bool
    usage: bool
    """A last event with the usage is asked for."""


class SimServer:
    """One deployment behind HTTP; `speed` above 1 makes its time pass faster."""

    def __init__(self, deployment: Deployment, speed: float = 1.0) -> None:
        self.deployment = deployment
        self._time = RealTimeModel(SimModel(deployment, deployment.block_size), speed)
        self._counters = Counters(self._time.model)
        self._started = int(time.time())
        self._asked = 0

    async def serve(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        """Serve until cancelled; `ready` is told the base URL once it listens. Raises OSError where it cannot."""
        connections: set[ServerConnection] = set()
        server = await asyncio.get_running_loop().create_server(
            lambda: ServerConnection(self._answer, connections), host, port, backlog=4096
        )
        bound = server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{bound}")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            # serve_forever would wait for idle connections before it lets go.
            server.close()
            for connection in list(connections):
                connection.close()

    async def _answer(self, request: HttpRequest, reply: Reply) -> None:
        method, path = request.method, request.path
        if method == "GET" and path == "/v1/models":
            reply.whole(200, orjson.dumps(self._models()))
        elif method == "GET" and path == "/metrics":
            text = self._counters.exposition(self._time.now_ns())
            reply.whole(200, text, "text/plain; version=0.0.4; charset=utf-8")
        elif method == "GET" and path == "/health":
            reply.whole(200, b"", "text/plain")
        elif method == "POST" and path == "/tokenize":
            reply.whole(200, orjson.dumps(await self._tokenized(_object(request.body))))
        elif method == "POST" and path in _POST:
            await self._complete(_object(request.body), path == "/v1/chat/completions", reply)
        elif path in _GET or path in _POST:
            raise RefusedError(405, f"{path} does not take {method}", "MethodNotAllowedError")
        else:
            raise RefusedError(404, f"{path} is not served", "NotFoundError")

    def _models(self) -> dict[str, Any]:
        entry = {
            "id": self.deployment.model,
            "object": "model",
            "created": self._started,
            "owned_by": "agentx",
            "root": self.deployment.model,
            "parent": None,
            "max_model_len": self.deployment.max_model_len,
        }
        return {"object": "list", "data": [entry]}

    async def _tokenized(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("model") is not None:
            self._check_model(fields)
        tokens = await _prompt(fields, chat="messages" in fields)
        return {"count": len(tokens), "max_model_len": self.deployment.max_model_len, "tokens": tokens.tolist()}

    def _check_model(self, fields: dict[str, Any]) -> None:
        if fields.get("model") != self.deployment.model:
            raise RefusedError(404, f"The model `{fields.get('model')}` does not exist.", "NotFoundError", "model")

    # Completions

    async def _complete(self, fields: dict[str, Any], chat: bool, reply: Reply) -> None:
        self._check_model(fields)
        request = await self._request(fields, chat)
        self._asked += 1
        options = fields.get("stream_options")
        asked = _Asked(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{self._asked}",
            created=int(time.time()),
            chat=chat,
            stream=fields.get("stream") is True,
            usage=isinstance(options, dict) and options.get("include_usage") is True,
        )
        answer = self._stream if asked.stream else self._whole
        try:
            await answer(asked, request, reply)
        finally:
            self._time.leave(request)

    async def _request(self, fields: dict[str, Any], chat: bool) -> Request:
        """The request that the model takes; raises RefusedError where it cannot be."""
        limit = fields.get("max_completion_tokens")
        limit = fields.get("max_tokens", DEFAULT_MAX_TOKENS) if limit is None else limit
        limit = DEFAULT_MAX_TOKENS if limit is None else limit
        if type(limit) is not int or limit < 1:
            raise RefusedError(400, f"max_tokens must be at least 1, got {limit!r}.", param="max_tokens")
        if fields.get("n", 1) not in (1, None):
            raise RefusedError(400, "only one answer to a request is simulated: n must be 1", param="n")
        tokens = await _prompt(fields, chat)
        if len(tokens) == 0:
            raise RefusedError(400, "The prompt is empty.", param="prompt")
        refusal = self._time.model.refusal(len(tokens), limit)
        if refusal is not None:
            raise RefusedError(400, refusal, param="input_tokens")
        return Request(block_keys(tokens, self.deployment.block_size), len(tokens), limit)

    async def _tokens(self, request: Request) -> AsyncIterator[int]:
        """The numbers of the output tokens from 0, each when it is due; they are counted."""
        arrived = self._time.now_ns()
        await self._time.submit(request)
        assert request.first_token_ns is not None
        for number in range(request.output_tokens):
            await self._time.until(request.first_token_ns + number * self._time.model.k_ns)
            if number == 0:
                self._counters.first_token(request, arrived)
            else:
                self._counters.next_token()
            if number == request.output_tokens - 1:
                self._counters.finished(request, arrived)
            yield number

    async def _whole(self, asked: _Asked, request: Request, reply: Reply) -> None:
        async for _ in self._tokens(request):
            pass
        text = WORD * request.output_tokens
        part = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
        document = self._document(asked, [_choice(part, "length")])
        reply.whole(200, orjson.dumps(document | {"usage": _usage(request)}))

    async def _stream(self, asked: _Asked, request: Request, reply: Reply) -> None:
        """As vLLM streams: the head at once, a chunk with the role together with the first token."""
        part = {"delta": {"content": WORD}} if asked.chat else {"text": WORD}
        token = _event(self._document(asked, [_choice(part, None)]))
        last = _event(self._document(asked, [_choice(part, "length")]))
        reply.start("text/event-stream; charset=utf-8")
        async for number in self._tokens(request):
            if number == 0 and asked.chat:
                role = _choice({"delta": {"role": "assistant", "content": ""}}, None)
                await reply.part(_event(self._document(asked, [role])))
            await reply.part(token if number < request.output_tokens - 1 else last)
        if asked.usage:
            await reply.part(_event(self._document(asked, []) | {"usage": _usage(request)}))
        await reply.part(b"data: [DONE]\n\n")
        reply.end()

    def _document(self, asked: _Asked, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "text_completion"
        if asked.chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        return {
            "id": asked.id,
            "object": kind,
            "created": asked.created,
            "model": self.deployment.model,
            "choices": choices,
        }


def _choice(part: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}


def _usage(request: Request) -> dict[str, Any]:
    return {
        "prompt_tokens": request.input_tokens,
        "total_tokens": request.input_tokens + request.output_tokens,
        "completion_tokens": request.output_tokens,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
    }


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusedError(400, f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, "the body is no JSON object")
    return fields


async def _prompt(fields: dict[str, Any], chat: bool) -> Tokens:
    """The tokens of a request's prompt; raises RefusedError where it has none."""
    prompt = fields.get("prompt")
    if chat:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise RefusedError(400, "messages must be a list of messages", param="messages")
        return await _tokens_of([_content(message.get("content")) for message in messages])
    if isinstance(prompt, str):
        return await _tokens_of([prompt])
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**63 for token in prompt):
        return np.array(prompt, dtype=np.int64)
    raise RefusedError(400, "prompt must be a text or a list of token ids", param="prompt")


async def _tokens_of(texts: list[str]) -> Tokens:
    """The tokens of texts one after the other; other streams get their turn in between."""
    found = [np.empty(0, dtype=np.int64)]
    for text in texts:
        for part in tokenize(text):
            found.append(part)
            await asyncio.sleep(0)
    return np.concatenate(found)


def _content(content: object) -> str:
    """The text of a message: itself, or its text parts one after the other."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
