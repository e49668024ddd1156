"""A live deployment as the user names it, and what must be known of it before a call is sent."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agentx import tokens
from agentx.call import Call
from agentx.dial import environment_proxy
from agentx.discover import Deployment, discover, probe, tokenize
from agentx.endpoint import Endpoint
from agentx.errors import AgentxError, DeploymentError, InputError
from agentx.exchange import Limits
from agentx.http import HttpClient
from agentx.prefix import salt_of
from agentx.prompts import Extras, Filler, PromptBuilder
from agentx.redact import Redactor

Result = TypeVar("Result")

CANARIES = 8
"""Short calls at once that must pass before a run: some deployments break for concurrent calls only."""
PATIENCE_S = 10.0
"""How long a first call may take until the user is told that it does, and again and again."""
AFTER_S = 30.0
"""Limit of the canary after an aborted run."""
PROBE_TOKENS = 64
"""Filler tokens of the probe call."""
AFFINITY = ("X-Session-ID", "X-Correlation-ID", "X-SMG-Routing-Key", "X-Dynamo-Session-ID")
"""Headers by which routers keep a session on a worker: the first two are common, then SGLang's and Dynamo's."""
ATTEMPTS = (
    Extras(),
    Extras(ignore_eos=False),
    Extras(min_tokens=False),
    Extras(min_tokens=False, ignore_eos=False),
    Extras(min_tokens=False, ignore_eos=False, usage=False),
)
"""What is asked for, and what is asked for next where the server refuses."""


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """Where and how to send."""

    url: str
    more_urls: tuple[str, ...] = ()
    """Further deployments of the same model: a lane sends to one of them all."""
    model: str | None = None
    endpoint: str = "chat"
    """chat or completions."""
    prompt: str = "text"
    """text or token-ids."""
    tokenizer: Path | None = None
    api_key_env: str = "OPENAI_API_KEY"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    affinity: str | None = None
    """Header that tells a router which stream a call belongs to; `auto` sends the usual ones."""
    retry: frozenset[int] = frozenset()
    """Statuses after which a call is sent again."""
    limits: Limits = field(default_factory=Limits)
    ca: Path | None = None
    insecure: bool = False
    proxy: str | None = None
    """`env`: the proxies of the environment, never for loopback; None: no proxy whatever the environment says."""

    def api_key(self) -> str:
        """The key from the environment, empty where there is none."""
        return os.environ.get(self.api_key_env, "").strip()

    def secrets(self) -> list[str]:
        """Everything that must never be printed or stored."""
        endpoints = [Endpoint.parse(url) for url in (self.url, *self.more_urls)]
        endpoints += [proxy for endpoint in endpoints if (proxy := self.proxy_of(endpoint)) is not None]
        passwords = [endpoint.userinfo.partition(":")[2] for endpoint in endpoints]
        return [secret for secret in (self.api_key(), *passwords, *self.headers.values()) if secret]

    def all_headers(self) -> dict[str, str]:
        """The headers of every request."""
        key = self.api_key()
        return {**({"Authorization": f"Bearer {key}"} if key else {}), **self.headers}

    def affinity_headers(self, nonce: str) -> Callable[[Call], str]:
        """A function giving the header lines that keep a stream's calls together.

        A subagent is a stream of its own: with its parent's id a router would pin a burst to one worker.
        """
        names = AFFINITY if self.affinity == "auto" else (self.affinity,) if self.affinity else ()

        def lines(call: Call) -> str:
            if not names:
                return ""
            value = f"{salt_of(nonce, call.tree.session_id, call.session_id, call.play):016x}"
            return "".join(f"{name}: {value}\r\n" for name in names)

        return lines

    def client(self, url: str, now_ns: Callable[[], int]) -> HttpClient:
        """A client of one of the URLs; raises InputError where the URL or a header is none."""
        endpoint = Endpoint.parse(url)
        context = self.ssl_context() if endpoint.scheme == "https" else None
        return HttpClient(
            endpoint,
            now_ns,
            headers=self.all_headers(),
            limits=self.limits,
            ssl_context=context,
            proxy=self.proxy_of(endpoint),
        )

    def proxy_of(self, endpoint: Endpoint) -> Endpoint | None:
        """The proxy that calls to an endpoint go through."""
        return environment_proxy(endpoint) if self.proxy == "env" else None

    def ssl_context(self) -> ssl.SSLContext:
        """How certificates are checked."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"--ca {self.ca}: cannot be read: {error}", "give a PEM file") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(slots=True)
class Ready:
    """A deployment that has been looked at, and what is needed to send to it."""

    target: LiveTarget
    clients: list[HttpClient]
    found: Deployment
    prompts: PromptBuilder
    cache_block: int
    extras: Extras
    warnings: list[str]

    def facts(self) -> dict[str, Any]:
        """What goes into the run's manifest."""
        return {
            "kind": "live",
            "name": self.clients[0].endpoint.authority,
            "urls": [client.url for client in self.clients],
            "engine": self.found.kind,
            "model": self.found.model,
            "models": self.found.models,
            "max_model_len": self.found.max_model_len,
            "max_model_len_source": self.found.max_model_len_source,
            "cache_block": self.cache_block,
            "cache_block_source": self.found.cache_block_source,
            "endpoint": self.prompts.path,
            "prompt": self.target.prompt,
            "prompt_exact": self.prompts.filler.table.exact,
            "prompt_words": f"{len(self.prompts.filler.table)} from {self.prompts.filler.table.source}",
            "template_tokens": self.prompts.overhead_tokens,
            "min_tokens": self.extras.min_tokens,
            "ignore_eos": self.extras.ignore_eos,
            "affinity": self.target.affinity,
            "retry": sorted(self.target.retry),
            "tls_insecure": self.target.insecure,
            "proxies": sorted({client.proxy.url() for client in self.clients if client.proxy is not None}),
        }


async def connect(
    target: LiveTarget,
    now_ns: Callable[[], int],
    note: Callable[[str], None],
    *,
    block_size: int,
    max_context: int | None = None,
    cache_block: int | None = None,
) -> Ready:
    """The deployment, found and probed with one or a few calls of one token.

    `block_size` is the corpus's, `max_context` and `cache_block` are the user's word in tokens. Raises
    DeploymentError where it does not complete a call, InputError where a choice is needed.
    """
    clients = [target.client(url, now_ns) for url in (target.url, *target.more_urls)]
    client = clients[0]
    try:
        found = await discover(client, target.model, max_context)
        for other in clients[1:]:
            await _same(other, found, max_context)
        filler = Filler(await _words(target, client, found))
        note(f"{found.model} at {client.endpoint.url()}, context window {found.max_model_len or 'unknown'}")
        extras, counted = await _told_while_waiting(
            _probe(target, client, found, filler), f"{client.url} has not answered a call of one token", note
        )
        if cache_block is not None:
            found.cache_block, found.cache_block_source = cache_block, "--cache-block"
        elif found.cache_block is None:
            found.cache_block, found.cache_block_source = block_size, "assumed: the corpus's blocks"
        known = counted is not None and filler.table.exact
        prompts = PromptBuilder(
            filler,
            model=found.model,
            endpoint=target.endpoint,
            block_size=block_size,
            extras=extras,
            overhead_tokens=max(0, counted - PROBE_TOKENS) if known and counted is not None else 0,
        )
    except BaseException as error:
        for opened in clients:
            opened.close()
        if isinstance(error, AgentxError):  # a server may echo what it was sent
            error.message = Redactor(target.secrets())(error.message)
        raise
    return Ready(target, clients, found, prompts, found.cache_block, extras, found.warnings)


async def _same(client: HttpClient, found: Deployment, max_context: int | None) -> None:
    """Check that another deployment serves the same model; the shorter context window counts."""
    other = await discover(client, found.model, max_context)
    windows = [length for length in (found.max_model_len, other.max_model_len) if length is not None]
    if len(windows) == 2 and windows[0] != windows[1]:
        found.warnings.append(
            f"{client.url} serves a context window of {windows[1]} tokens, the first URL {windows[0]}: the shorter "
            "one counts"
        )
    found.max_model_len = min(windows, default=None)


async def _words(target: LiveTarget, client: HttpClient, found: Deployment) -> tokens.WordTable:
    if target.prompt == "token-ids":
        return tokens.token_ids(found.vocab_size)
    if target.tokenizer is not None:
        return tokens.words_from_tokenizer(target.tokenizer)
    if found.tokenize is not None:
        try:
            return await tokens.words_from_server(lambda text: tokenize(client, found, text))
        except AgentxError as error:
            found.warnings.append(f"the server's /tokenize is of no use: {error}")
    return tokens.common_words()


async def _probe(
    target: LiveTarget, client: HttpClient, found: Deployment, filler: Filler
) -> tuple[Extras, int | None]:
    """(what the server takes, prompt tokens it counted) of a call of one token.

    Everything is asked for; where the server refuses, less is asked for.
    """
    first: dict[str, Any] = {}
    for extras in ATTEMPTS:
        prompts = PromptBuilder(
            filler, model=found.model, endpoint=target.endpoint, block_size=PROBE_TOKENS, extras=extras
        )
        seen = await _short_call(client, prompts)
        first = first or seen
        if seen["http_status"] not in (400, 422):
            break
    if _failure(seen) is not None:
        where = client.endpoint.url(prompts.path)
        raise DeploymentError(
            f"{where}: a call of one token failed: {_failure(first)}", "check --model and the server's log"
        )
    left_out = [name for name in ("min_tokens", "ignore_eos") if not getattr(extras, name)]
    left_out += [] if extras.usage else ["stream_options.include_usage"]
    if left_out:
        found.warnings.append(f"the server refuses {', '.join(left_out)}: output lengths may differ from the plan")
    if seen["prompt_tokens"] is None:
        found.warnings.append("the server reports no usage in streams: tokens and cache hits stay unknown")
    return extras, seen["prompt_tokens"]


async def _short_call(client: HttpClient, prompts: PromptBuilder) -> dict[str, Any]:
    """The observed columns of a call of one token, with a prompt that no earlier run used."""
    keys = np.array([secrets.randbits(64)], dtype=np.uint64)
    return await probe(client, prompts.path, prompts.request(keys, PROBE_TOKENS, 1))


async def sing(ready: Ready, note: Callable[[str], None]) -> None:
    """Send one short call, then several at once, to every URL: the canary of a run.

    Raises DeploymentError where one fails, and where one passes but several do not (the seed's
    operational note: a fabric that lost a wave of transfers still serves single requests).
    """
    for client in ready.clients:
        await _told_while_waiting(_sing_to(client, ready), f"{client.url} has not answered the canary calls", note)


async def canary_after(ready: Ready, note: Callable[[str], None]) -> str:
    """What the canary says after a run that was aborted: `passes`, or how it fails."""
    note("trying the canary calls again")
    try:
        await asyncio.wait_for(sing(ready, note), AFTER_S)
    except TimeoutError:
        return f"no answer within {AFTER_S:g} s"
    except DeploymentError as error:
        return Redactor(ready.target.secrets())(error.message)
    finally:
        for client in ready.clients:
            client.close()
    return "passes"


async def _sing_to(client: HttpClient, ready: Ready) -> None:
    alone = _failure(await _short_call(client, ready.prompts))
    if alone is not None:
        raise DeploymentError(f"{client.url}: the canary call failed: {alone}", "look at the server's log")
    together = await asyncio.gather(*(_short_call(client, ready.prompts) for _ in range(CANARIES)))
    failed = [what for call in together if (what := _failure(call)) is not None]
    if failed:
        raise DeploymentError(
            f"{client.url}: one call passes, {len(failed)} of {CANARIES} at once fail ({failed[0]}): concurrent "
            "transfers broken",
            "relaunch the serve: a wave that was killed may leave it like this",
        )


async def _told_while_waiting(work: Coroutine[Any, Any, Result], text: str, note: Callable[[str], None]) -> Result:
    """The result of some work; while it lasts, the user is told now and then that it does."""
    task = asyncio.ensure_future(work)
    started = time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=PATIENCE_S))[0]:
            note(f"{text} for {time.monotonic() - started:.0f} s, still waiting")
        return task.result()
    finally:
        task.cancel()


def _failure(seen: dict[str, Any]) -> str | None:
    """Why a short call failed; None where it did not."""
    if seen["status"] in ("ok", "empty"):
        return None
    told = str(seen["error_message"] or seen["error_kind"] or seen["status"])
    return told if seen["http_status"] in (None, 200) else f"HTTP {seen['http_status']}: {told}"
