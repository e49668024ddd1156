"""What a deployment says of itself: model, context window, cache unit, tokenizer, and one probe call.

Nothing is guessed where a wrong guess would spoil a run: several models without a choice are an
error that lists them. What a server does not tell is None with its source "unknown", and a warning
says what follows from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentx.answers import Answer, error_text, observe
from agentx.errors import DeploymentError, InputError
from agentx.exchange import Exchange
from agentx.http import HttpClient

LOOK_S = 10.0
"""Limit of one look at a describing endpoint in seconds."""
PROBE_S = 600.0
"""Limit of the probe call in seconds: a busy deployment may queue it."""

HINTS = {
    "tls_verify": "trust the certificate with --ca FILE, or check none with --insecure",
    "tls": "check --url: does this port speak https?",
    "protocol": "check --url: does this port speak http, and not https?",
}
"""What to do about a first look that failed, by error kind."""


@dataclass(slots=True)
class Deployment:
    """Facts of a live deployment, each as found; `warnings` say what was not."""

    model: str
    models: list[str] = field(default_factory=list)
    kind: str = "unknown"
    """vllm, sglang, llamacpp, agentx (our own simulation, served) or unknown, from `owned_by`."""
    max_model_len: int | None = None
    max_model_len_source: str = "unknown"
    cache_block: int | None = None
    """Tokens in the cache's unit."""
    cache_block_source: str = "unknown"
    tokenize: str | None = None
    """How `/tokenize` wants its text: `content` (llama.cpp) or `prompt` (vLLM); None where there is none."""
    vocab_size: int | None = None
    warnings: list[str] = field(default_factory=list)


async def discover(client: HttpClient, model: str | None, max_context: int | None) -> Deployment:
    """The deployment behind `client`, which must answer.

    `model` is the user's choice, `max_context` the user's limit in tokens. Raises DeploymentError
    where nothing answers and InputError where a choice is needed.
    """
    document = await _models(client)
    entries = _entries(document)
    chosen = choose_model(entries, model, client.endpoint.url("/v1/models"))
    found = Deployment(chosen, [str(entry.get("id")) for entry in entries])
    entry = next((entry for entry in entries if entry.get("id") == chosen), {})
    found.kind = _kind(entry)
    meta = entry.get("meta")
    found.vocab_size = _positive(meta, "n_vocab")
    if not entries:
        found.warnings.append("the deployment lists no models at /v1/models: the model name is taken as given")
    await _context(client, found, entry, max_context)
    await _cache_block(client, found)
    await _tokenize(client, found)
    return found


def choose_model(entries: list[dict[str, Any]], wanted: str | None, where: str) -> str:
    """The model to replay against: the wanted one, or the only base model that is listed.

    Raises InputError where the wanted one is not listed or the choice is not clear.
    """
    names = [str(entry.get("id")) for entry in entries]
    if wanted is not None:
        if names and wanted not in names:
            raise InputError(f"--model {wanted!r} is not served: {where} lists {_several(names)}", "name one of these")
        return wanted
    bases = [str(entry.get("id")) for entry in entries if not entry.get("parent")]
    if len(bases) == 1:
        return bases[0]
    if not names:
        raise InputError(f"{where} lists no model", "name the model with --model")
    raise InputError(f"{where} lists {len(names)} models: {_several(names)}", "choose one with --model")


async def tokenize(client: HttpClient, found: Deployment, text: str) -> list[int]:
    """The server's token ids of a text, without special tokens.

    Raises DeploymentError where the server does not tell.
    """
    if found.tokenize == "content":
        request: dict[str, Any] = {"content": text, "add_special": False}
    else:
        request = {"model": found.model, "prompt": text, "add_special_tokens": False}
    exchange = await client.fetch("/tokenize", orjson.dumps(request), LOOK_S)
    tokens = _json(exchange).get("tokens")
    listed = tokens if isinstance(tokens, list) else [tokens]
    ids = [token.get("id") if isinstance(token, dict) else token for token in listed]
    known = [token for token in ids if type(token) is int]
    if tokens is not listed or len(known) != len(ids):
        raise DeploymentError(f"{client.endpoint.url('/tokenize')} gave no tokens: {_said(exchange)}")
    return known


async def probe(client: HttpClient, path: str, body: bytes) -> dict[str, Any]:
    """The observed columns of one call, as a run would record them."""
    answer = Answer()
    exchange = await client.fetch(path, body, PROBE_S)
    return observe(exchange, answer)


# The describing endpoints


async def _models(client: HttpClient) -> object:
    path = "/v1/models"
    where = client.endpoint.url(path)
    exchange = await client.fetch(path, limit_s=LOOK_S)
    if exchange.error_kind is not None:
        hint = HINTS.get(exchange.error_kind, "check --url and that the server is up")
        raise DeploymentError(f"{where}: {exchange.error_message or exchange.error_kind}", hint)
    if exchange.status in (401, 403):
        raise DeploymentError(
            f"{where} answered {exchange.status}: {_said(exchange)}",
            "put the key into the variable named by --api-key-env",
        )
    if exchange.status in (404, 405, 501):
        return {}
    if exchange.status in (301, 302, 303, 307, 308):
        to = exchange.header("location") or "nothing"
        raise DeploymentError(
            f"{where} is elsewhere: it answers {exchange.status} and names {to}",
            "give the URL it leads to: calls that are measured are not redirected",
        )
    if exchange.status != 200:
        raise DeploymentError(f"{where} answered {exchange.status}: {_said(exchange)}", "check --url")
    document = _json(exchange)
    if not isinstance(document.get("data"), list):
        raise DeploymentError(
            f"{where} is no model list: {_said(exchange)}", "point --url at an OpenAI-compatible API, without /v1/…"
        )
    return document


def _entries(document: object) -> list[dict[str, Any]]:
    data = document.get("data", []) if isinstance(document, dict) else []
    return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _several(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _kind(entry: dict[str, Any]) -> str:
    owner = str(entry.get("owned_by", "")).lower()
    return owner if owner in ("vllm", "sglang", "llamacpp", "agentx") else "unknown"


async def _context(client: HttpClient, found: Deployment, entry: dict[str, Any], limit: int | None) -> None:
    """The served context window: /v1/models, else /server_info, else the user's limit."""
    served = _positive(entry, "max_model_len")
    source = "/v1/models"
    if served is None:
        info = _json(await client.fetch("/server_info", limit_s=LOOK_S))
        served, source = _find(info, ("max_model_len", "context_length", "max_context_length")), "/server_info"
    if served is None:
        served, source = _positive(entry.get("meta"), "n_ctx"), "/v1/models meta.n_ctx"
    if served is None:
        found.max_model_len, found.max_model_len_source = limit, "--max-context" if limit else "unknown"
    elif limit is not None and limit < served:
        found.max_model_len, found.max_model_len_source = limit, "--max-context"
    else:
        found.max_model_len, found.max_model_len_source = served, source
        if limit is not None and limit > served:
            found.warnings.append(f"--max-context {limit} is over the served window of {served} tokens, which counts")
    if found.max_model_len is None:
        found.warnings.append("the context window is unknown, so no session is dropped for it: give --max-context")


async def _cache_block(client: HttpClient, found: Deployment) -> None:
    """The unit of the prefix cache, where the deployment tells it."""
    if found.kind == "llamacpp":
        found.cache_block, found.cache_block_source = 1, "llama.cpp caches single tokens"
        return
    exchange = await client.fetch("/metrics", limit_s=LOOK_S)
    if exchange.status != 200:
        return
    text = exchange.content().decode("utf-8", "replace")
    block = re.search(r'^\S*cache_config_info\{[^}\n]*\bblock_size="(\d+)"', text, re.MULTILINE)
    if block and len(block[1]) < 8 and int(block[1]) > 0:
        found.cache_block, found.cache_block_source = int(block[1]), "/metrics cache_config_info"


async def _tokenize(client: HttpClient, found: Deployment) -> None:
    """Which form of /tokenize the server takes."""
    for form in ("prompt", "content"):
        found.tokenize = form
        try:
            if await tokenize(client, found, "one two"):
                return
        except DeploymentError:
            pass
    found.tokenize = None


def _json(exchange: Exchange) -> dict[str, Any]:
    if exchange.status != 200 or exchange.error_kind is not None or not exchange.complete:
        return {}
    try:
        document = orjson.loads(exchange.content())
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _said(exchange: Exchange) -> str:
    message, _ = error_text(exchange.content()[:2000])
    return message[:200] or exchange.error_message or f"status {exchange.status}, no text"


def _positive(fields: object, name: str) -> int | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _find(document: object, names: tuple[str, ...], depth: int = 4) -> int | None:
    """The first positive number under any of the names, looked for a few levels deep."""
    if not isinstance(document, dict) or depth == 0:
        return None
    for name in names:
        if (value := _positive(document, name)) is not None:
            return value
    for inner in document.values():
        if (value := _find(inner, names, depth - 1)) is not None:
            return value
    return None
