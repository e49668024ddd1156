"""One worker process of a live run: a part of its lanes, with an event loop and a journal of its own.

The main process (`agentx.crew`) starts it and talks to it in messages over its standard input and output.
A message is a pickled tuple, its kind first, after its length in eight bytes: both ends are the same
program, and nobody else holds the pipes.

To a worker: `check` (measure this client against an echo deployment), `replay` (a `Share`), `open`
(the window, at this time), `interrupt`, `stop` (for this reason). From it: `checked`, `warm` (no warm-up
call is out), `state` (a `State`, a few times a second), `ended` (a `Part`), `failed` (an error's text).

Its journal is on the disk whatever becomes of the others; when its standard input closes, it cuts what
is in flight, saves and ends.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import uvloop

from agentx.corpus import Sessions
from agentx.descriptors import connections_per_lane, make_room
from agentx.errors import AgentxError
from agentx.lanes import Lanes, LaneSettings
from agentx.live import LiveDriver, LiveSettings
from agentx.prefix import BlockRule
from agentx.prompts import PromptBuilder
from agentx.redact import Redactor
from agentx.runs import Journal
from agentx.selfcheck import Compared, EchoLoad
from agentx.target import LiveTarget
from agentx.turns import CallRow

_LENGTH = 8
_COLUMNS = tuple(field.name for field in fields(CallRow) if field.name != "chunk_ns")
_values = attrgetter(*_COLUMNS)


@dataclass(frozen=True, slots=True)
class Share:
    """Everything a worker needs to replay its lanes."""

    number: int
    lanes: Sequence[int]
    sessions: Sessions
    lane_settings: LaneSettings
    live: LiveSettings
    target: LiveTarget
    urls: Sequence[str]
    prompts: PromptBuilder
    blocks: BlockRule
    folder: Path
    origin_ns: int
    """The run's time zero on the machine's monotonic clock, which all processes read."""


@dataclass(frozen=True, slots=True)
class State:
    """How a worker stands."""

    busy: int = 0
    in_flight: int = 0
    window: tuple[int, int] | None = None
    silent_ns: int | None = None
    rows: Sequence[tuple[Any, ...]] = ()
    """What `rows_of` turns into rows: those that came since the last state."""
    fault: str | None = None
    """Why its journal cannot be written."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker did."""

    reason: str
    facts: dict[str, Any]


def rows_of(state: State) -> list[CallRow]:
    """The rows of a state, without the times of their chunks."""
    return [CallRow(**dict(zip(_COLUMNS, values, strict=True))) for values in state.rows]


def framed(message: tuple[Any, ...]) -> bytes:
    """A message as it goes through a pipe."""
    data = pickle.dumps(message, protocol=5)
    return len(data).to_bytes(_LENGTH, "big") + data


async def received(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """The next message; None where the other end is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        message: tuple[Any, ...] = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


class Worker:
    """Does what it is told until its standard input closes."""

    def __init__(self, reader: asyncio.StreamReader, send: Callable[[tuple[Any, ...]], None]) -> None:
        self._reader = reader
        self._send = send
        self._driver: LiveDriver | None = None
        self._journal: Journal | None = None
        self._rows: list[tuple[Any, ...]] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Read messages and do them."""
        while (message := await received(self._reader)) is not None:
            kind, *what = message
            if kind in ("check", "replay"):
                self._task = asyncio.get_running_loop().create_task(self._do(kind, *what))
                self._task.add_done_callback(_die_of_faults)
            elif self._driver is None:
                continue
            elif kind == "open":
                self._driver.open_window(*what)
            elif kind == "interrupt":
                self._driver.interrupt()
            elif kind == "stop":
                self._driver.stop(*what)
        if self._driver is not None:
            self._driver.stop("the main process is gone")
        if self._task is not None:
            await self._task

    async def _do(self, kind: str, *what: Any) -> None:
        try:
            await (self._check(*what) if kind == "check" else self._replay(*what))
        except AgentxError as error:
            self._send(("failed", error.message))

    async def _check(self, url: str, load: EchoLoad) -> None:
        compared = Compared(time.monotonic_ns())
        make_room(load.lanes)
        await load.driver(url, lambda row: None, compared).run()
        self._send(("checked", compared))

    async def _replay(self, share: Share) -> None:
        make_room(len(share.lanes) * connections_per_lane(share.sessions))
        self._journal = Journal(share.folder, part=share.number)
        lanes = Lanes(
            share.sessions,
            share.lane_settings,
            self._record,
            part=share.lanes,
            on_warm=lambda: self._send(("warm",)),
        )

        def now_ns() -> int:
            return time.monotonic_ns() - share.origin_ns

        self._driver = LiveDriver(
            lanes,
            [share.target.client(url, now_ns) for url in share.urls],
            share.prompts,
            share.blocks,
            None,
            self._record,
            share.live,
            redact=Redactor(share.target.secrets()),
            tick=self._tick,
            extra_headers=share.target.affinity_headers(share.blocks.nonce),
        )
        self._journal.in_flight = self._driver.in_flight_rows
        try:
            await self._driver.run()
        finally:
            self._journal.close()
            self._tick()
        self._send(("ended", Part(self._driver.ended_because, self._driver.facts())))

    def _record(self, row: CallRow) -> None:
        assert self._journal is not None
        self._journal.add(row)
        self._rows.append(_values(row))

    def _tick(self) -> None:
        assert self._driver is not None
        assert self._journal is not None
        lanes, fault = self._driver.lanes, self._journal.fault
        rows, self._rows = self._rows, []
        silent = self._driver.silent_ns()
        state = State(lanes.busy, lanes.in_flight, lanes.window, silent, rows, None if fault is None else str(fault))
        self._send(("state", state))


def _die_of_faults(task: asyncio.Task[None]) -> None:
    """End at once on a fault of our own: the main process sees that, and saves the run."""
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception())
        os._exit(1)


async def _main(from_main: int, to_main: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_main, "rb"))
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_main, "wb"))
    try:
        await Worker(reader, lambda message: transport.write(framed(message))).run()
    finally:
        transport.close()


def main() -> None:
    """Serve the main process over the standard streams; what is printed goes to standard error."""
    to_main = os.dup(1)
    os.dup2(2, 1)
    uvloop.run(_main(os.dup(0), to_main))
    sys.exit(0)
