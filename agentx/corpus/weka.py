"""Reading the weka_trace format: recorded or generated sessions with nested subagents.

A session's `requests` mix its own calls and subagents, each with requests of its own. Every list of
requests becomes a *stream*. In time order, the call before a subagent spawns it and the call after
waits for it.

The times inside a subagent come in three bases, one per corpus, because a guess per request would mix
them. *absolute*: counted from the session's start. *relative*: counted from the subagent's own `t`,
its start; known by any inner time that lies before its subagent's. *relative_end*: the same, but the
subagent's `t` is the moment its result came back, as raw kv-cache-tester recordings write it: its
start is `t` less its duration. That is told from *relative* by contradiction: taken as a start, some
subagent would end after the call that waited for it had begun; taken as an end, none begins before
the call that spawned it has ended.

Only what replay needs is required; unknown and empty optional fields are taken. What is malformed is
told with file, place, field and value, up to 20 faults at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from agentx.corpus.fields import LONGEST_S, NO_IDS, Faults, Fields
from agentx.corpus.records import corpus_name, records
from agentx.corpus.sessions import Corpus, length_conflicts, make_corpus
from agentx.errors import InputError
from agentx.turns import CORPUS_SCHEMA, ROOT, BlockIds
from agentx.units import NS_PER_MS, NS_PER_S

BASES = ("auto", "absolute", "relative", "relative_end")

ROUNDING_NS = NS_PER_S
"""Recorded times are often whole seconds: two of them may disagree by this much and still fit."""

_SESSION_KEYS = frozenset(
    ("id", "models", "block_size", "hash_id_scope", "tool_tokens", "system_tokens", "requests", "totals")
)
_REQUEST_KEYS = frozenset(
    (
        *("t", "type", "model", "in", "out", "hash_ids", "api_time", "think_time"),
        *("ttft", "stop", "input_types", "output_types"),
    )
)


def read_weka(path: Path, files: Sequence[Path], subagent_times: str = "auto") -> Corpus:
    """The corpus of these files (in name order); `path` names it. Raises FaultsError with what is malformed.

    `subagent_times` is one of BASES: how times inside subagents are counted.
    """
    reader = _Reader(Faults(str(path)))
    for label, record in records(path, files, reader.faults):
        reader.session(label, record)
    reader.faults.check()
    if not reader.sessions:
        raise InputError(f"{path}: no traces", "give a file or folder with at least one session")
    corpus = reader.corpus(path, subagent_times)
    for conflict in length_conflicts(corpus):
        lengths = " and ".join(f"{n} tokens" for n in conflict.tokens)
        reader.faults.add(
            f"session {conflict.session_id!r}: hash id {conflict.block_id} stands for blocks of {lengths}",
            "an id means one block of one length: record short last blocks under ids of their own",
        )
    reader.faults.check()
    return corpus


@dataclass(frozen=True, slots=True)
class _Base:
    """The zero of a list of requests: a subagent's `t` in its enclosing base."""

    parent: int
    marker_ns: int
    duration_ns: int


@dataclass(slots=True)
class _StreamTimes:
    """What fixes when a stream starts, in its own base and its parent's; rows are its turns."""

    base: int
    parent: int
    spawn_turn: int
    join_turn: int
    row: int
    n_turns: int


class _Reader:
    """Columns of the turns read so far; times inside subagents stay raw until the basis is known."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.sessions: dict[str, str] = {}
        self._facts: dict[str, Any] = {}
        self._strings: dict[str, list[str | None]] = {
            name: [] for name in ("root_session_id", "session_id", "parent_session_id", "model")
        }
        self._ints = {
            name: array("q")
            for name in (
                *("turn", "spawn_turn", "join_turn", "t_ns", "api_ns", "think_ns"),
                *("input_tokens", "output_tokens", "keep_blocks", "new_blocks"),
            )
        }
        self._new_ids: list[BlockIds] = []
        self._streams: list[_StreamTimes] = []
        self._bases: list[_Base] = []
        self._inner_before_marker = 0
        self._no_think = 0
        self._unknown: set[str] = set()

    # One session.

    def session(self, label: str, record: Any) -> None:
        """Add one session, or the faults that keep it out."""
        check = Fields(self.faults, label)
        if not isinstance(record, dict):
            check.fault("", record, "a JSON object is needed")
            return
        session_id = check.text(record, "id")
        block_size = check.whole(record, "block_size", 1)
        scope = check.one_of(record, "hash_id_scope", ("local", "global"), "local")
        for name, value in (("block_size", block_size), ("hash_id_scope", scope)):
            if value is not None and self._facts.setdefault(name, value) != value:
                check.fault(name, value, f"the sessions before have {self._facts[name]!r}")
        if session_id in self.sessions:
            check.fault("id", session_id, f"the same as in {self.sessions[session_id] or 'an earlier session'}")
        self._unknown |= record.keys() - _SESSION_KEYS
        requests = check.items(record, "requests")
        if requests is None or session_id is None:
            return
        self.sessions[session_id] = label
        if not requests:
            check.fault("requests", [], "no requests: a session needs at least one")
        elif all(isinstance(item, dict) and _is_subagent(item) for item in requests):
            check.fault("requests", f"{len(requests)} subagents", "a session needs a request of its own")
        else:
            self._walk(check, session_id, requests, _first_model(record))

    def _walk(self, check: Fields, root_id: str, requests: list[Any], model: str) -> None:
        """Add the root stream and, below it, every subagent's, parents first."""
        names: set[str] = set()
        self._bases.append(_Base(ROOT, 0, 0))
        top = _Pending(requests, "requests", root_id, model, ROOT, ROOT, ROOT, len(self._bases) - 1, None)
        waiting = [top]
        while waiting:
            pending = waiting.pop()
            children = self._stream(check, root_id, names, pending)
            waiting.extend(reversed(children))

    def _stream(self, check: Fields, root_id: str, names: set[str], pending: _Pending) -> list[_Pending]:
        """Add one list of requests as a stream; its subagents are returned."""
        items = self._in_time_order(check, pending)
        calls = [item for item in items if not item.is_subagent]
        parent, spawn, join = pending.parent, pending.spawn_turn, pending.join_turn
        if calls:
            session_id = _unique(pending.session_id, names)
            parent_id = None if parent == ROOT else self._strings["session_id"][self._streams[parent].row]
            row = len(self._new_ids)
            self._streams.append(_StreamTimes(pending.base, parent, spawn, join, row, len(calls)))
            self._turns(check, calls, pending.model)
            for name, value in (
                *(("root_session_id", root_id), ("session_id", session_id), ("parent_session_id", parent_id)),
            ):
                self._strings[name].extend([value] * len(calls))
            self._ints["turn"].extend(range(len(calls)))
            self._ints["spawn_turn"].extend([spawn] * len(calls))
            self._ints["join_turn"].extend([join] * len(calls))
            parent = len(self._streams) - 1
        children = []
        before = 0
        for item in items:
            if not item.is_subagent:
                before += 1
                continue
            if calls:
                spawn, join = before - 1, before if before < len(calls) else ROOT
            children.append(self._subagent(check, root_id, item, pending, (parent, spawn, join)))
        return [child for child in children if child is not None]

    def _subagent(
        self, check: Fields, root_id: str, item: _Item, enclosing: _Pending, place: tuple[int, int, int]
    ) -> _Pending | None:
        record = item.record
        requests = check.items(record, "requests", item.path)
        if requests is None:
            return None
        duration_ms = record.get("duration_ms")
        known = isinstance(duration_ms, (int, float)) and 0 <= duration_ms < LONGEST_S * 1000
        duration_ns = round(duration_ms * NS_PER_MS) if known and duration_ms else 0
        self._bases.append(_Base(enclosing.base, item.t_ns, duration_ns))
        agent = record.get("agent_id")
        name = f"{root_id}/{agent if isinstance(agent, str) and agent else 'agent'}"
        path = f"{item.path}.requests"
        model = _first_model(record) or enclosing.model
        return _Pending(requests, path, name, model, *place, len(self._bases) - 1, item.t_ns)

    def _in_time_order(self, check: Fields, pending: _Pending) -> list[_Item]:
        """The calls and subagents of a list by `t`, those of one time in file order; malformed ones are faults."""
        items = []
        for number, record in enumerate(pending.requests):
            path = f"{pending.path}[{number}]"
            if not isinstance(record, dict):
                check.fault(path, record, "a JSON object is needed")
                continue
            subagent = _is_subagent(record)
            kind = record.get("type")
            if not subagent and kind not in ("n", "s", None):
                check.fault(f"{path}.type", kind, "n, s or subagent is needed")
            t_ns = check.nanoseconds(record, "t", path, needed=True)
            if t_ns is None:
                continue
            if pending.marker_ns is not None and t_ns < pending.marker_ns:
                self._inner_before_marker += 1
            items.append(_Item(t_ns, subagent, record, path))
        return sorted(items, key=lambda item: item.t_ns)

    def _turns(self, check: Fields, calls: list[_Item], default_model: str) -> None:
        ints = self._ints
        previous = NO_IDS
        ended_ns = 0
        for number, call in enumerate(calls):
            record = call.record
            api_ns = check.nanoseconds(record, "api_time", call.path) or 0
            think_ns = check.nanoseconds(record, "think_time", call.path)
            if number and think_ns is None:
                self._no_think += 1
                think_ns = max(0, call.t_ns - ended_ns)
            ended_ns = call.t_ns + api_ns
            ids = check.block_ids(record, call.path)
            keep = _common_run(previous, ids)
            ints["t_ns"].append(call.t_ns)
            ints["api_ns"].append(api_ns)
            ints["think_ns"].append(think_ns or 0 if number else 0)
            ints["input_tokens"].append(check.whole(record, "in", 1, call.path) or 1)
            ints["output_tokens"].append(check.whole(record, "out", 0, call.path) or 0)
            ints["keep_blocks"].append(keep)
            ints["new_blocks"].append(len(ids) - keep)
            self._new_ids.append(ids[keep:].copy())
            model = record.get("model")
            self._strings["model"].append(model if isinstance(model, str) and model else default_model)
            self._unknown |= record.keys() - _REQUEST_KEYS
            previous = ids

    # All sessions.

    def corpus(self, path: Path, subagent_times: str) -> Corpus:
        """Everything read, with the times of subagents on one basis."""
        ints = {name: np.frombuffer(column, dtype=np.int64).copy() for name, column in self._ints.items()}
        basis = self._choose_basis(ints) if subagent_times == "auto" else subagent_times
        self._settle_times(ints, basis)
        has_subagents = any(stream.parent != ROOT for stream in self._streams)
        manifest = {
            "format": "weka_trace",
            "name": corpus_name(path),
            "block_size": self._facts["block_size"],
            "hash_id_scope": self._facts["hash_id_scope"],
            "subagent_times": basis if has_subagents else None,
        }
        return make_corpus(
            self._table(ints),
            block_size=self._facts["block_size"],
            scope=self._facts["hash_id_scope"],
            name=corpus_name(path),
            source=str(path),
            manifest=manifest,
            notes=self._notes(ints, basis if has_subagents else ""),
        )

    def _choose_basis(self, ints: dict[str, npt.NDArray[np.int64]]) -> str:
        if not self._inner_before_marker:
            return "absolute"
        overrun = False
        for stream in self._streams:
            if stream.parent == ROOT:
                continue
            parent, base = self._streams[stream.parent], self._bases[stream.base]
            rows = slice(stream.row, stream.row + stream.n_turns)
            length = base.duration_ns or int(np.max(ints["t_ns"][rows] + ints["api_ns"][rows]))
            if parent.base != base.parent or stream.spawn_turn == ROOT:
                continue
            spawned = parent.row + stream.spawn_turn
            ended = ints["t_ns"][spawned] + ints["api_ns"][spawned]
            if base.marker_ns - length < ended - ROUNDING_NS:
                return "relative"
            if stream.join_turn != ROOT:
                joined = ints["t_ns"][parent.row + stream.join_turn]
                overrun |= bool(base.marker_ns + length > joined + ROUNDING_NS)
        return "relative_end" if overrun else "relative"

    def _settle_times(self, ints: dict[str, npt.NDArray[np.int64]], basis: str) -> None:
        """Count every time from the session's start, and give each subagent its pause after its spawn."""
        zero = [0] * len(self._bases)
        if basis != "absolute":
            for number, base in enumerate(self._bases):
                if base.parent != ROOT:
                    back = base.duration_ns if basis == "relative_end" else 0
                    zero[number] = zero[base.parent] + max(0, base.marker_ns - back)
        for stream in self._streams:
            ints["t_ns"][stream.row : stream.row + stream.n_turns] += zero[stream.base]
        starts = [int(ints["t_ns"][stream.row]) for stream in self._streams]
        for number in range(len(self._streams) - 1, -1, -1):
            stream = self._streams[number]
            if stream.parent != ROOT and stream.spawn_turn == ROOT:
                starts[stream.parent] = min(starts[stream.parent], starts[number])
        for number, stream in enumerate(self._streams):
            if stream.parent == ROOT:
                continue
            spawned = self._streams[stream.parent].row + stream.spawn_turn
            since = starts[stream.parent]
            if stream.spawn_turn != ROOT:
                since = int(ints["t_ns"][spawned] + ints["api_ns"][spawned])
            ints["think_ns"][stream.row] = max(0, starts[number] - since)

    def _table(self, ints: dict[str, npt.NDArray[np.int64]]) -> pa.Table:
        offsets = np.append(0, np.cumsum(ints["new_blocks"])).astype(np.int32)
        values = np.concatenate(self._new_ids) if self._new_ids else NO_IDS
        columns: dict[str, Any] = {
            **{name: pa.array(column, pa.string()) for name, column in self._strings.items()},
            **{name: pa.array(column, CORPUS_SCHEMA.field(name).type) for name, column in ints.items()},
            "new_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
        }
        return pa.table([columns[name] for name in CORPUS_SCHEMA.names], schema=CORPUS_SCHEMA)

    def _notes(self, ints: dict[str, npt.NDArray[np.int64]], basis: str) -> list[str]:
        notes = []
        if basis:
            meaning = {
                "absolute": "count from the session's start",
                "relative": "count from the subagent's start",
                "relative_end": "count from the subagent's start, which is its t less its duration",
            }
            notes.append(f"times inside subagents {meaning[basis]} (basis {basis})")
        zero = int(np.count_nonzero(ints["output_tokens"] == 0))
        if zero:
            notes.append(f"requests with a recorded output of 0 tokens: {zero} (a server is asked for 1)")
        if self._no_think:
            notes.append(f"requests without think_time: {self._no_think} (taken from the recorded times)")
        if self._unknown:
            notes.append(f"fields without meaning here: {', '.join(sorted(self._unknown))}")
        return notes


@dataclass(frozen=True, slots=True)
class _Item:
    """A call or a subagent in a list of requests."""

    t_ns: int
    is_subagent: bool
    record: dict[str, Any]
    path: str


@dataclass(frozen=True, slots=True)
class _Pending:
    """A list of requests that is still to become a stream."""

    requests: list[Any]
    path: str
    session_id: str
    model: str
    parent: int
    spawn_turn: int
    join_turn: int
    base: int
    marker_ns: int | None


def _is_subagent(record: dict[str, Any]) -> bool:
    return record.get("type") == "subagent"


def _first_model(record: dict[str, Any]) -> str:
    models = record.get("models")
    return models[0] if isinstance(models, list) and models and isinstance(models[0], str) else ""


def _unique(name: str, names: set[str]) -> str:
    """`name`, or the first of `name.2`, `name.3` ... that is free; it is taken."""
    unique, number = name, 2
    while unique in names:
        unique, number = f"{name}.{number}", number + 1
    names.add(unique)
    return unique


def _common_run(a: BlockIds, b: BlockIds) -> int:
    """Length of the leading run that two lists of ids share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
