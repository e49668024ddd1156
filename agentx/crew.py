"""Worker processes and what the main one does for them: start them, open the window, watch, and end them.

What a lane plays depends on the seed and the lane's number alone, so lanes can be dealt out to any number
of processes: lane l goes to worker l modulo their number. All read one clock. The window opens for all at one
time, told here when the last warm-up call of the last worker has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from agentx.descriptors import make_room
from agentx.echo import running_echo
from agentx.errors import AgentxError
from agentx.live import TICK_S
from agentx.selfcheck import ClientBudget, Compared, check_client, check_load
from agentx.turns import CallRow
from agentx.units import NS_PER_MS
from agentx.worker import Part, Share, State, framed, received, rows_of

LANES_PER_WORKER = 512
"""Lanes that one process is known to keep in time (`benchmarks/RESULTS.md`)."""
OPENING_NS = 20 * NS_PER_MS
"""From the word to open the window until it opens: every worker has heard it by then."""
END_S = 30.0
"""How long a worker that was told to cut everything may take to save and end."""
CHECK_S = 60.0


def usual_workers(lanes: int) -> int:
    """Worker processes for so many lanes: one up to LANES_PER_WORKER, at most one for two processors."""
    return max(1, min(math.ceil(lanes / LANES_PER_WORKER), (os.cpu_count() or 1) // 2))


class WorkerError(AgentxError):
    """A worker process died or failed."""


class _Member:
    """One worker process as the main one sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.state = State()
        self.warm = False
        self.part: Part | None = None

    def send(self, *message: Any) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(framed(message))

    async def receive(self) -> tuple[Any, ...]:
        """Its next message; raises WorkerError where it has died or failed."""
        assert self.process.stdout is not None
        message = await received(self.process.stdout)
        if message is None:
            code = await self.process.wait()
            raise WorkerError(f"a worker process died (exit status {code})", "run with --workers 1")
        if message[0] == "failed":
            raise WorkerError(f"a worker process failed: {message[1]}", "run with --workers 1")
        return message


class Crew:
    """The workers of one run; as far as the run goes, it is a driver like `LiveDriver`."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = members
        self._shares: Sequence[Share] = ()
        self._observe: Callable[[CallRow], None] = lambda row: None
        self._stall_ns: int | None = None
        self._now_ns: Callable[[], int] = time.monotonic_ns
        self._cut_at: float | None = None
        self.ended_because = "window"

    def __len__(self) -> int:
        return len(self._members)

    def deal(self, lanes: int) -> list[range]:
        """The lanes of each worker."""
        return [range(number, lanes, len(self)) for number in range(len(self))]

    async def check_client(self, lanes: int, input_tokens: int) -> ClientBudget | None:
        """The budget of all workers together, as `selfcheck.check_client` finds it for one process."""
        load = check_load(lanes, input_tokens)
        with running_echo() as url:
            for member, part in zip(self._members, self.deal(lanes), strict=True):
                member.send("check", url, replace(load, lanes=len(part)))
            try:
                async with asyncio.timeout(CHECK_S):
                    found = [(await member.receive())[1] for member in self._members]
            except TimeoutError as error:
                raise WorkerError(f"a worker process said nothing for {CHECK_S:g} s", "run with --workers 1") from error
        return Compared.joined(found).budget(load)

    def prepare(
        self,
        shares: Iterable[Share],
        now_ns: Callable[[], int],
        *,
        stall_ns: int | None,
        observe: Callable[[CallRow], None],
    ) -> None:
        """What is to be replayed: a share for each worker. Rows come without the times of their chunks."""
        self._shares = list(shares)
        self._now_ns = now_ns
        self._stall_ns = stall_ns
        self._observe = observe

    @property
    def lanes(self) -> Crew:
        """What a display asks for: it sums over the workers."""
        return self

    @property
    def size(self) -> int:
        """Number of lanes."""
        return sum(len(share.lanes) for share in self._shares)

    @property
    def busy(self) -> int:
        """Lanes with at least one call in flight."""
        return sum(member.state.busy for member in self._members)

    @property
    def in_flight(self) -> int:
        """Calls in flight."""
        return sum(member.state.in_flight for member in self._members)

    @property
    def window(self) -> tuple[int, int] | None:
        """The measured window; it ends with the last worker's."""
        known = [member.state.window for member in self._members if member.state.window is not None]
        return (min(start for start, _ in known), max(end for _, end in known)) if known else None

    @property
    def fault(self) -> str | None:
        """Why a worker's journal cannot be written; None where all can."""
        return next((member.state.fault for member in self._members if member.state.fault), None)

    async def run(self) -> None:
        """Replay until every worker has ended; one that dies ends the run."""
        if self.ended_because == "interrupted":
            return
        for member, share in zip(self._members, self._shares, strict=True):
            member.send("replay", share)
        ticking = asyncio.get_running_loop().create_task(self._ticking())
        try:
            await asyncio.gather(*(self._follow(member) for member in self._members))
        finally:
            ticking.cancel()

    def interrupt(self) -> None:
        """First call: start nothing more and wait for what is in flight. Second call: cut that too."""
        if self.ended_because == "interrupted":
            self._cut_at = time.monotonic()
        else:
            self.ended_because = "interrupted"
        self._tell("interrupt")

    def stop(self, reason: str) -> None:
        """End now for `reason`: start nothing more and cut what is in flight."""
        if self._cut_at is None:
            self._cut_at = time.monotonic()
            self.ended_because = reason
            self._tell("stop", reason)

    def facts(self) -> dict[str, Any]:
        """How the event loops did: of each figure the worst worker's."""
        parts = [member.part.facts for member in self._members if member.part is not None]
        found: dict[str, Any] = {"workers": len(self)}
        for name in parts[0] if parts else ():
            worst = max(parts, key=lambda facts: facts[name]["p99"] or facts[name]["max"] or 0)[name]
            found[name] = {**worst, "max": max(facts[name]["max"] or 0 for facts in parts)}
        return found

    def _tell(self, *message: Any) -> None:
        for member in self._members:
            if member.part is None:
                member.send(*message)

    async def _follow(self, member: _Member) -> None:
        try:
            while member.part is None:
                kind, *what = await member.receive()
                if kind == "state":
                    member.state = what[0]
                    for row in rows_of(member.state):
                        self._observe(row)
                elif kind == "warm":
                    member.warm = True
                    if all(other.warm for other in self._members):
                        self._tell("open", self._now_ns() + OPENING_NS)
                elif kind == "ended":
                    member.part = what[0]
        except WorkerError as error:
            member.part = Part("died", {})
            member.state = State(window=member.state.window)
            self.stop(error.message)

    async def _ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            flying = [member.state.silent_ns for member in self._members if member.state.silent_ns is not None]
            if flying and self._stall_ns is not None and min(flying) >= self._stall_ns:
                self.stop("stalled")
            if self._cut_at is not None and time.monotonic() - self._cut_at > END_S:
                for member in self._members:
                    if member.part is None:
                        member.process.kill()


@contextlib.asynccontextmanager
async def running_crew(workers: int) -> AsyncIterator[Crew]:
    """So many worker processes, ended with the block."""
    members: list[_Member] = []
    try:
        for _ in range(workers):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",  # not -m: what a worker sends must come from a module of the same name here
                "from agentx.worker import main; main()",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to the main process alone, which tells them
                limit=2**20,
            )
            members.append(_Member(process))
        yield Crew(members)
    finally:
        for member in members:
            assert member.process.stdin is not None
            member.process.stdin.close()
        for member in members:
            await _ended(member.process)


async def checked(workers: int, lanes: int, input_tokens: int) -> ClientBudget | None:
    """The client's budget with so many lanes in so many processes; one is this one."""
    if workers > 1:
        async with running_crew(workers) as crew:
            return await crew.check_client(lanes, input_tokens)
    make_room(lanes)
    return await check_client(lanes, input_tokens)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for a process whose standard input is closed; kill it where that takes too long."""
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
