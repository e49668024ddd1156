"""A whole replay: corpus and settings in, a run folder out; here what every run has, and the simulated one.

The same lanes run simulated and live (`agentx.replay_live`). Everything that shapes the schedule is in
`ReplayOptions`, everything about a live deployment in `agentx.target`; both go into the run's manifest.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from agentx import __version__
from agentx.call import planned_row
from agentx.corpus import Corpus, Sessions, fits
from agentx.deployment import Deployment
from agentx.errors import InputError
from agentx.lanes import Lanes, LaneSettings
from agentx.prefix import BlockRule
from agentx.runs import Run, RunWriter
from agentx.sim.driver import SimDriver
from agentx.sim.model import SimModel
from agentx.turns import CallRow, SessionTree
from agentx.units import NS_PER_S

RAMP_SHARE = 0.05
LONGEST_RAMP_NS = 5 * NS_PER_S
SIM_TICK_STEPS = 64
"""Steps of a simulation between two looks of the observer."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What shapes the schedule and the prompts' sharing; the same options and corpus are the same plan."""

    concurrency: int
    duration_ns: int
    seed: int
    grace_ns: int = 30 * NS_PER_S
    drain: bool = False
    ramp_ns: int | None = None
    """None: 5 % of the duration, at most 5 s."""
    think_cap_ns: int | None = None
    idle_cap_ns: int | None = None
    start_window: tuple[float, float] | None = None
    plays: int | None = None
    """Times each session is played at most; the window then ends with the last call."""
    cache_bust: bool = True
    max_context: int | None = None
    strict_context: bool = False
    cache_block: int | None = None
    """The engine's cache unit in tokens where it does not tell it."""
    stall_ns: int | None = 3600 * NS_PER_S
    """Live: silence on every call in flight after which the run is ended. Long prompts are silent for long by
    nature: the seed saw 33 minutes to the first token."""
    self_check: bool = True
    """Live: measure the client's own error first."""
    canary: bool = True
    """Live: one short call, then several at once, must pass first."""
    workers: int | None = 1
    """Live: processes that the lanes are dealt out to; None: as many as so many lanes usually need."""

    def lane_settings(self) -> LaneSettings:
        """The part that the lanes need."""
        ramp = self.ramp_ns
        if ramp is None:
            ramp = min(int(self.duration_ns * RAMP_SHARE), LONGEST_RAMP_NS)
        return LaneSettings(
            self.concurrency,
            self.duration_ns,
            self.seed,
            ramp,
            self.think_cap_ns,
            self.idle_cap_ns,
            self.start_window,
            self.plays,
        )


class LanesView(Protocol):
    """The state of a run's lanes, wherever they are."""

    @property
    def size(self) -> int:
        """Number of lanes."""
        ...

    @property
    def busy(self) -> int:
        """Lanes with at least one call in flight."""
        ...

    @property
    def in_flight(self) -> int:
        """Calls in flight."""
        ...

    @property
    def window(self) -> tuple[int, int] | None:
        """(start, end) of the measured window; None while warm-up calls are out."""
        ...


class Observer(Protocol):
    """Who watches a run: the live display, or nobody."""

    def observe(self, row: CallRow) -> None:
        """A turn has become a row."""
        ...

    def tick(self, now_ns: int, lanes: LanesView) -> None:
        """Time has passed."""
        ...

    def note(self, text: str) -> None:
        """Something to tell the user now."""
        ...


class Nobody:
    """An observer that does not look."""

    def observe(self, row: CallRow) -> None:
        """Nothing."""

    def tick(self, now_ns: int, lanes: LanesView) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


def context_gate(
    corpus: Corpus, options: ReplayOptions, window: int | None, observer: Observer
) -> tuple[Sessions, list[CallRow]]:
    """(sessions that fit the window, rows of the turns of those that do not).

    Raises InputError where nothing fits, or where something does not and the options are strict.
    """
    if window is None:
        return corpus.sessions, []
    kept, dropped = fits(corpus, window)
    if not dropped:
        return corpus.sessions, []
    worst_id, worst = max(dropped, key=lambda entry: entry[1])
    text = f"{len(dropped)} of {len(corpus.sessions)} sessions need more than the context window of {window} tokens"
    if options.strict_context or not kept:
        hint = "serve a longer window, or leave out --strict-context" if kept else "serve a longer window"
        raise InputError(f"{text} (session {worst_id}: {worst} tokens)", hint)
    observer.note(f"{text} and are dropped")
    gone = sorted(set(range(len(corpus.sessions))) - set(kept))
    return corpus.sessions.select(kept), [row for index in gone for row in _dropped_rows(corpus.sessions[index])]


def _dropped_rows(tree: SessionTree) -> Iterator[CallRow]:
    for number, stream in enumerate(tree.streams):
        for turn in range(stream.n_turns):
            yield planned_row(tree, number, turn, 0, -1, "skipped", phase="measure", error_kind="context_gate")


def manifest_of(
    corpus: Corpus, options: ReplayOptions, deployment: dict[str, Any], command: list[str], nonce: str
) -> dict[str, Any]:
    """The facts of `run.json` that are known before the first call."""
    settings = asdict(options) | {"ramp_ns": options.lane_settings().ramp_ns, "nonce": nonce}
    return {
        "agentx_version": __version__,
        "command": command,
        "seed": options.seed,
        "corpus": {
            "digest": corpus.digest,
            "name": corpus.name,
            "source": corpus.source,
            "sessions": len(corpus.sessions),
            "turns": corpus.n_turns,
            "block_size": corpus.block_size,
            "scope": corpus.hash_id_scope,
        },
        "profile": {name: corpus.manifest.get("profile", {}).get(name) for name in ("name", "digest")},
        "settings": settings,
        "deployment": deployment,
        "host": host_facts(),
        "clock": {"name": "monotonic", "resolution_ns": round(time.get_clock_info("monotonic").resolution * 1e9)},
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "warnings": [],
    }


def host_facts() -> dict[str, Any]:
    """What of this machine bears on the client's timing; no name and no address."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def block_rule(corpus: Corpus, options: ReplayOptions, nonce: str) -> BlockRule:
    """How the blocks of this corpus's plays come about."""
    return BlockRule(corpus.block_size, corpus.hash_id_scope, nonce, options.cache_bust)


def replay_sim(
    corpus: Corpus,
    deployment: Deployment,
    options: ReplayOptions,
    out: Path,
    *,
    command: Sequence[str] = (),
    observer: Observer | None = None,
    overwrite: bool = False,
) -> Run:
    """Replay in virtual time against a simulated deployment; the run is in `out`.

    The same corpus, deployment and options give the same run table. Raises InputError where nothing
    can be replayed or the folder cannot be written.
    """
    watching = observer or Nobody()
    limits = [limit for limit in (deployment.max_model_len, options.max_context) if limit is not None]
    window = min(limits)
    sessions, dropped = context_gate(corpus, options, window, watching)
    facts = {
        "kind": "sim",
        "name": deployment.name,
        "model": deployment.model,
        "max_model_len": window,
        "max_model_len_source": "deployment file" if window == deployment.max_model_len else "--max-context",
        "cache_block": corpus.block_size,
        "cache_block_source": "the corpus's blocks",
        "parameters": deployment.model_dump(mode="json"),
    }
    writer = RunWriter(out, manifest_of(corpus, options, facts, list(command), "sim"), overwrite=overwrite)
    record = recorder(writer, watching, dropped)
    lanes = Lanes(sessions, options.lane_settings(), record)
    steps = 0

    def tick(now_ns: int) -> None:
        nonlocal steps
        steps += 1
        if steps % SIM_TICK_STEPS == 0:
            watching.tick(now_ns, lanes)

    driver = SimDriver(
        lanes,
        SimModel(deployment, corpus.block_size),
        block_rule(corpus, options, "sim"),
        record,
        grace_ns=options.grace_ns,
        drain=options.drain,
        tick=tick,
    )

    def interrupt(number: int, frame: object) -> None:
        driver.interrupted = True

    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread() else ()
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        driver.run()
    except BaseException:
        writer.close()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return finish(writer, lanes, "interrupted" if driver.interrupted else "window", driver.now_ns)


def recorder(writer: RunWriter, observer: Observer, dropped: Sequence[CallRow]) -> Callable[[CallRow], None]:
    """Where rows go: the run folder and the observer; what was dropped before the run goes first."""

    def record(row: CallRow) -> None:
        writer.add(row)
        observer.observe(row)

    for row in dropped:
        writer.add(row)
    return record


def finish(
    writer: RunWriter,
    lanes: LanesView,
    reason: str,
    at_ns: int,
    amend: Callable[[pa.Table], pa.Table] = lambda table: table,
) -> Run:
    """The finished run, with its window and why it ended; `amend` may complete the rows."""
    if lanes.window is not None:
        writer.update(window=window_facts(lanes.window))
    return writer.finish({"reason": reason, "at_ns": at_ns}, amend)


def window_facts(window: tuple[int, int]) -> dict[str, int]:
    """The window as the manifest has it."""
    return {"start_ns": window[0], "end_ns": window[1]}


def in_main_thread() -> bool:
    """Signals can be handled: in other threads they cannot, and interrupting is up to the caller."""
    return threading.current_thread() is threading.main_thread()
