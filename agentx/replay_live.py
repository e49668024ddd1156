"""A live replay: look at the deployment, check the client, replay, look again, save."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentx.corpus import Corpus
from agentx.descriptors import make_room
from agentx.lanes import Lanes
from agentx.live import LiveDriver, LiveSettings
from agentx.prefix import CeilingTracker
from agentx.redact import Redactor
from agentx.replay import (
    Nobody,
    Observer,
    ReplayOptions,
    block_maker,
    context_gate,
    finish,
    in_main_thread,
    manifest_of,
    recorder,
    window_facts,
)
from agentx.runs import Run, RunWriter
from agentx.scrape import ServerWatch
from agentx.selfcheck import check_client
from agentx.target import LiveTarget, connect, sing

SHARED_NONCE = "shared"
"""What stands for the run's own nonce where plays and runs are to share a cache."""


def replay_live(
    corpus: Corpus,
    target: LiveTarget,
    options: ReplayOptions,
    out: Path,
    *,
    command: Sequence[str] = (),
    observer: Observer | None = None,
    overwrite: bool = False,
) -> Run:
    """Replay against a live deployment; the run is in `out`.

    Raises DeploymentError where the deployment does not answer as it must, InputError where the
    corpus or the options do not fit it. SIGINT or SIGTERM drains and saves, a second one cuts and saves.
    """
    import uvloop

    return uvloop.run(_replay_live(corpus, target, options, out, list(command), observer or Nobody(), overwrite))


async def _replay_live(
    corpus: Corpus,
    target: LiveTarget,
    options: ReplayOptions,
    out: Path,
    command: list[str],
    observer: Observer,
    overwrite: bool,
) -> Run:
    origin = time.monotonic_ns()
    ready = await connect(
        target,
        lambda: time.monotonic_ns() - origin,
        observer.note,
        block_size=corpus.block_size,
        max_context=options.max_context,
        cache_block=options.cache_block,
    )
    try:
        sessions, dropped = context_gate(corpus, options, ready.found.max_model_len, observer)
        make_room(2 * options.concurrency)  # a lane's subagents have connections of their own
        budget = await _check_client(corpus, options, observer)
        if options.canary:
            await sing(ready)
        nonce = secrets.token_hex(8) if options.cache_bust else SHARED_NONCE
        redact = Redactor(target.secrets())
        manifest = manifest_of(corpus, options, ready.facts(), redact.command(command), nonce)
        writer = RunWriter(out, {**manifest, "warnings": ready.warnings, "client_budget": budget}, overwrite=overwrite)
    except BaseException:
        for client in ready.clients:
            client.close()
        raise
    record = recorder(writer, observer, dropped)
    lanes = Lanes(sessions, options.lane_settings(), record)
    loop = asyncio.get_running_loop()

    servers = ServerWatch([target.client(client.url, client.now_ns) for client in ready.clients], ready.found.model)
    looking: set[asyncio.Task[None]] = set()

    def tick() -> None:
        observer.tick(ready.clients[0].now_ns(), lanes)
        if lanes.window is not None and "window" not in writer.manifest:
            writer.update(window=window_facts(lanes.window))
            looking.add(loop.create_task(servers.open_window()))
        if writer.fault is not None:
            driver.stop("the run can no longer be written")

    driver = LiveDriver(
        lanes,
        ready.clients,
        ready.prompts,
        block_maker(corpus, options, nonce),
        CeilingTracker(corpus.block_size, ready.cache_block, ready.prompts.filler.common_tokens),
        record,
        LiveSettings(options.grace_ns, options.drain, target.retry, options.stall_ns),
        redact=redact,
        tick=tick,
        extra_headers=target.affinity_headers(nonce),
    )
    writer.in_flight = driver.in_flight_rows
    await servers.begin()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, _on_signal, driver, observer)
    try:
        await driver.run()
    except BaseException:
        writer.abandon()
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    await asyncio.gather(*looking, return_exceptions=True)
    writer.update(client=driver.watch.facts(), server=await servers.finish())
    return finish(writer, lanes, driver.ended_because, ready.clients[0].now_ns())


async def _check_client(corpus: Corpus, options: ReplayOptions, observer: Observer) -> dict[str, Any] | None:
    """The client's budget with this run's lanes and prompts; None where it is not measured."""
    if not options.self_check:
        return None
    observer.note("measuring the client's own error")
    input_tokens = int(np.median(corpus.table["input_tokens"].to_numpy()))
    budget = await check_client(options.concurrency, input_tokens)
    return None if budget is None else budget.to_json()


def _on_signal(driver: LiveDriver, observer: Observer) -> None:
    first = driver.ended_because == "window"
    driver.interrupt()
    observer.note(
        "interrupted: waiting for calls in flight, once more cuts them" if first else "cutting calls in flight"
    )
