"""A live replay: look at the deployment, check the client, replay, look again, save.

The lanes play in this process, or are dealt out to workers (`agentx.crew`); all else is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from agentx.corpus import Corpus, Sessions
from agentx.crew import Crew, running_crew, usual_workers
from agentx.descriptors import connections_per_lane, make_room
from agentx.errors import InputError
from agentx.lanes import Lanes
from agentx.live import TICK_S, LiveDriver, LiveSettings
from agentx.prefix import BlockRule, CeilingTracker, LanePlays
from agentx.redact import Redactor
from agentx.replay import (
    LanesView,
    Nobody,
    Observer,
    ReplayOptions,
    block_rule,
    context_gate,
    finish,
    in_main_thread,
    manifest_of,
    recorder,
    window_facts,
)
from agentx.runs import Run, RunWriter, unwritable
from agentx.scrape import ServerWatch
from agentx.selfcheck import check_client
from agentx.target import LiveTarget, Ready, canary_after, connect, sing
from agentx.turns import CallRow
from agentx.worker import Share

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
    workers = workers_of(options)
    origin = time.monotonic_ns()
    ready = await connect(
        target,
        lambda: time.monotonic_ns() - origin,
        observer.note,
        block_size=corpus.block_size,
        max_context=options.max_context,
        cache_block=options.cache_block,
    )
    async with contextlib.AsyncExitStack() as stack:
        for client in ready.clients:
            stack.callback(client.close)
        sessions, dropped = context_gate(corpus, options, ready.found.max_model_len, observer)
        crew = None
        if workers > 1:
            crew = await stack.enter_async_context(running_crew(workers))
        else:
            make_room(options.concurrency * connections_per_lane(sessions))
        budget = await _check_client(corpus, options, crew, observer)
        if options.canary:
            await sing(ready, observer.note)
        nonce = secrets.token_hex(8) if options.cache_bust else SHARED_NONCE
        redact = Redactor(target.secrets())
        manifest = manifest_of(corpus, options, ready.facts(), redact.command(command), nonce)
        manifest |= {"warnings": ready.warnings, "client_budget": budget}
        writer = RunWriter(out, manifest, overwrite=overwrite)
        record = recorder(writer, observer, dropped)
        live = _Live(ready, sessions, options, block_rule(corpus, options, nonce), redact, writer, record, observer)
        return await (live.alone() if crew is None else live.together(crew, origin))


def workers_of(options: ReplayOptions) -> int:
    """Processes to play the lanes in; raises InputError where there cannot be so many."""
    workers = options.workers
    if options.idle_cap_ns is not None:  # it is about the whole system: no part of it can tell
        if workers not in (None, 1):
            raise InputError(f"--workers {workers} cannot go with --idle-cap", "leave one of them out")
        return 1
    return min(usual_workers(options.concurrency) if workers is None else workers, options.concurrency)


async def _check_client(
    corpus: Corpus, options: ReplayOptions, crew: Crew | None, observer: Observer
) -> dict[str, Any] | None:
    """The client's budget with this run's lanes and prompts; None where it is not measured."""
    if not options.self_check:
        return None
    observer.note("measuring the client's own error")
    input_tokens = int(np.median(corpus.table["input_tokens"].to_numpy()))
    check = check_client if crew is None else crew.check_client
    budget = await check(options.concurrency, input_tokens)
    return None if budget is None else budget.to_json()


class Replayer(Protocol):
    """What plays the lanes: `LiveDriver` in this process, or a `Crew` of workers."""

    ended_because: str

    @property
    def lanes(self) -> LanesView:
        """The state of the lanes."""
        ...

    async def run(self) -> None:
        """Replay until nothing is in flight and nothing will start."""
        ...

    def interrupt(self) -> None:
        """Start nothing more; the second time cut what is in flight too."""
        ...

    def stop(self, reason: str) -> None:
        """End now for `reason`."""
        ...

    def facts(self) -> dict[str, Any]:
        """How the client did."""
        ...


@dataclass(slots=True)
class _Live:
    """A replay that is about to start."""

    ready: Ready
    sessions: Sessions
    options: ReplayOptions
    blocks: BlockRule
    redact: Redactor
    writer: RunWriter
    record: Callable[[CallRow], None]
    observer: Observer

    async def alone(self) -> Run:
        """Replay in this process."""
        lanes = Lanes(self.sessions, self.options.lane_settings(), self.record)
        driver = LiveDriver(
            lanes,
            self.ready.clients,
            self.ready.prompts,
            self.blocks,
            self._ceilings(),
            self.record,
            self._settings(),
            redact=self.redact,
            extra_headers=self.ready.target.affinity_headers(self.blocks.nonce),
        )
        self.writer.in_flight = driver.in_flight_rows
        at_ns = await self._play(driver, lambda: self.writer.fault)
        return finish(self.writer, lanes, driver.ended_because, at_ns)

    async def together(self, crew: Crew, origin_ns: int) -> Run:
        """Replay in the workers; what every call could have had cached is worked out from all rows at the end."""
        live = replace(self._settings(), stall_ns=None)  # silence is of all workers
        crew.prepare(
            [
                Share(
                    number,
                    lanes,
                    self.sessions,
                    self.options.lane_settings(),
                    live,
                    self.ready.target,
                    [client.url for client in self.ready.clients],
                    self.ready.prompts,
                    self.blocks,
                    self.writer.folder,
                    origin_ns,
                )
                for number, lanes in enumerate(crew.deal(self.options.concurrency))
            ],
            self.ready.clients[0].now_ns,
            stall_ns=self.options.stall_ns,
            observe=self.observer.observe,
        )
        at_ns = await self._play(crew, lambda: self.writer.fault or crew.fault)
        if crew.fault is not None:
            self.writer.close()
            raise unwritable(self.writer.folder, crew.fault)
        return finish(self.writer, crew, crew.ended_because, at_ns, self._with_ceilings)

    def _settings(self) -> LiveSettings:
        options = self.options
        return LiveSettings(options.grace_ns, options.drain, self.ready.target.retry, options.stall_ns)

    def _ceilings(self) -> CeilingTracker:
        ready = self.ready
        return CeilingTracker(self.blocks.block_size, ready.cache_block, ready.prompts.filler.common_tokens)

    async def _play(self, replayer: Replayer, fault: Callable[[], object]) -> int:
        """Replay and tell when it ended; the servers' counters are looked at on the way.

        `fault` is why rows cannot be saved any more, None while they can.
        """
        clients, writer = self.ready.clients, self.writer
        servers = ServerWatch(
            [self.ready.target.client(client.url, client.now_ns) for client in clients], self.ready.found.model
        )
        looking: set[asyncio.Task[None]] = set()

        def tick() -> None:
            self.observer.tick(clients[0].now_ns(), replayer.lanes)
            if replayer.lanes.window is not None and "window" not in writer.manifest:
                writer.update(window=window_facts(replayer.lanes.window))
                looking.add(asyncio.get_running_loop().create_task(servers.open_window()))
            if fault() is not None:
                replayer.stop("the run can no longer be written")

        _take_signals(replayer, self.observer)
        await servers.begin()
        ticking = asyncio.get_running_loop().create_task(_every_tick(tick))
        try:
            await replayer.run()
        except BaseException:
            writer.close()
            raise
        finally:
            ticking.cancel()
        ended_ns = clients[0].now_ns()
        if replayer.ended_because == "stalled" and self.options.canary:
            writer.update(canary_after=await canary_after(self.ready, self.observer.note))
        await asyncio.gather(*looking, return_exceptions=True)
        writer.update(client=replayer.facts(), server=await servers.finish())
        return ended_ns

    def _with_ceilings(self, table: pa.Table) -> pa.Table:
        """The rows with the ceiling of every call that was sent, given what all workers sent before it."""
        ceilings = self._ceilings()
        plays = LanePlays(self.blocks, ceilings)
        trees = {tree.session_id: tree for tree in self.sessions}
        names = {name: {s.session_id: n for n, s in enumerate(tree.streams)} for name, tree in trees.items()}
        rows = table.select(["sent_ns", "lane", "play", "root_session_id", "session_id", "turn"]).to_pylist()
        found: list[int | None] = [None] * len(rows)
        sent = [place for place, row in enumerate(rows) if row["sent_ns"] is not None]
        for place in sorted(sent, key=lambda place: rows[place]["sent_ns"]):
            row = rows[place]
            root = row["root_session_id"]
            blocks = plays.of(row["lane"], trees[root], row["play"])
            keys, last_tokens = blocks.turn(names[root][row["session_id"]], row["turn"])
            found[place] = ceilings.observe(blocks.salt, keys, last_tokens)
        column = table.schema.get_field_index("ceiling_cached_tokens")
        return table.set_column(column, table.schema.field(column), pa.array(found, type=pa.int32()))


async def _every_tick(tick: Callable[[], None]) -> None:
    while True:
        tick()
        await asyncio.sleep(TICK_S)


def _take_signals(replayer: Replayer, observer: Observer) -> None:
    """SIGINT and SIGTERM go to the replayer for as long as the loop lives: saving is not cut either."""

    def on_signal() -> None:
        first = replayer.ended_because == "window"
        replayer.interrupt()
        observer.note(
            "interrupted: waiting for calls in flight, once more cuts them" if first else "cutting calls in flight"
        )

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
