"""A corpus: the table of planned turns, and session trees built from it one at a time.

The table is the corpus; everything else is a view of it. A stream begins at every row with turn 0,
a session at every such row without a parent. Block ids are either listed or follow from a rule and
their place, so that a corpus of ten million blocks is a small file and a few arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from agentx import reference
from agentx.errors import InputError
from agentx.turns import CORPUS_SCHEMA, ROOT, BlockIds, SessionTree, Stream

Rows = npt.NDArray[np.int64]

ID_RULE = "blake2b-63"
"""The one id rule: `reference.new_block_ids` of the rule's seed, the session's index and the turn."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sessions of planned turns with what identifies them."""

    sessions: Sessions
    block_size: int
    """Tokens one block id stands for."""
    hash_id_scope: str
    """`local`: ids mean the same block only inside one session; `global`: in all of them."""
    digest: str
    """SHA-256 of the content: every column and the rule of the ids."""
    name: str
    source: str
    """The path it was read from, or the profile's name."""
    table: pa.Table
    """Every turn, in CORPUS_SCHEMA."""
    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What a reader of results should know of how it was read."""

    @property
    def n_turns(self) -> int:
        """Turns of all sessions."""
        return int(self.table.num_rows)


def make_corpus(
    table: pa.Table,
    *,
    block_size: int,
    scope: str,
    name: str,
    source: str,
    manifest: dict[str, Any],
    notes: Sequence[str] = (),
) -> Corpus:
    """The corpus of a table that is known to be sound; the id rule is the manifest's `id_rule`."""
    rule = manifest.get("id_rule")
    table = table.combine_chunks()
    return Corpus(
        sessions=Sessions(TurnTable(table, rule)),
        block_size=block_size,
        hash_id_scope=scope,
        digest=content_digest(table, block_size, scope, rule),
        name=name,
        source=source,
        table=table,
        manifest=manifest,
        notes=tuple(notes),
    )


def content_digest(table: pa.Table, block_size: int, scope: str, rule: dict[str, Any] | None) -> str:
    """SHA-256 of the corpus's content, the same however the table is chunked, encoded or stored."""
    facts = {"block_size": block_size, "hash_id_scope": scope, "id_rule": rule}
    digest = hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS))
    for field in CORPUS_SCHEMA:
        column = table[field.name].combine_chunks()
        digest.update(f"\n{field.name}:{len(column)}\n".encode())
        if pa.types.is_string(field.type):
            coded = column.dictionary_encode()
            digest.update(orjson.dumps(coded.dictionary.to_pylist()))
            column = coded.indices.fill_null(-1)
        elif pa.types.is_list(field.type):
            digest.update(_little_endian(pc.list_value_length(column).fill_null(-1).to_numpy()))
            column = column.flatten()
        digest.update(_little_endian(column.to_numpy()))
    return digest.hexdigest()


def _little_endian(values: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data


class TurnTable:
    """The table's columns as arrays, and where its streams and sessions begin."""

    def __init__(self, table: pa.Table, rule: dict[str, Any] | None) -> None:
        self.table = table
        self.rule = rule

    def ints(self, name: str) -> Rows:
        """A column of whole numbers, one element per turn."""
        column: Rows = self.table[name].to_numpy()
        return column

    @cached_property
    def stream_rows(self) -> Rows:
        """The first row of each stream, then the number of rows."""
        return np.append(np.flatnonzero(self.ints("turn") == 0), self.table.num_rows)

    @cached_property
    def session_streams(self) -> Rows:
        """The first stream of each session, then the number of streams."""
        is_root = self.table["parent_session_id"].take(pa.array(self.stream_rows[:-1])).is_null().to_numpy()
        return np.append(np.flatnonzero(is_root), len(self.stream_rows) - 1)

    @cached_property
    def session_rows(self) -> Rows:
        """The first row of each session, then the number of rows."""
        rows: Rows = self.stream_rows[self.session_streams]
        return rows

    @cached_property
    def session_ids(self) -> list[str]:
        """The id of each session."""
        ids: list[str] = self.table["root_session_id"].take(pa.array(self.session_rows[:-1])).to_pylist()
        return ids

    @cached_property
    def _lists(self) -> tuple[Rows, BlockIds]:
        """(offsets, values) of the listed ids."""
        column = self.table["new_ids"].combine_chunks()
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        return np.append(0, np.cumsum(lengths, dtype=np.int64)), column.flatten().to_numpy()

    def tree(self, index: int) -> SessionTree:
        """Session `index`; its block ids stay views of the table, or are made when asked for."""
        first, end = self.session_streams[index : index + 2]
        names: dict[str, int] = {}
        streams = tuple(self._stream(index, int(number), names) for number in range(first, end))
        return SessionTree(session_id=streams[0].session_id, index=index, streams=streams)

    def _stream(self, index: int, number: int, names: dict[str, int]) -> Stream:
        first, end = (int(row) for row in self.stream_rows[number : number + 2])
        columns = self.table.slice(first, end - first)
        session_id = columns["session_id"][0].as_py()
        names[session_id] = len(names)
        parent = columns["parent_session_id"][0].as_py()
        return Stream(
            session_id=session_id,
            parent=ROOT if parent is None else names[parent],
            spawn_turn=columns["spawn_turn"][0].as_py(),
            join_turn=columns["join_turn"][0].as_py(),
            think_ns=columns["think_ns"].to_pylist(),
            input_tokens=columns["input_tokens"].to_pylist(),
            output_tokens=columns["output_tokens"].to_pylist(),
            models=columns["model"].fill_null("").to_pylist(),
            keep_blocks=columns["keep_blocks"].to_pylist(),
            new_ids=self._new_ids(index, first, columns),
        )

    def _new_ids(self, index: int, first: int, columns: pa.Table) -> Sequence[BlockIds]:
        if self.rule is not None:
            return RuleIds(self.rule["seed"], index, columns["new_blocks"].to_pylist())
        offsets, values = self._lists
        bounds = offsets[first : first + columns.num_rows + 1].tolist()
        return [values[start:end] for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class RuleIds(Sequence[BlockIds]):
    """The new ids of each turn of a generated session, made when asked for."""

    seed: int
    session: int
    counts: Sequence[int]

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, turn: int) -> BlockIds: ...
    @overload
    def __getitem__(self, turn: slice) -> Sequence[BlockIds]: ...
    def __getitem__(self, turn: int | slice) -> BlockIds | Sequence[BlockIds]:
        if isinstance(turn, slice):
            return [self[number] for number in range(*turn.indices(len(self)))]
        place = range(len(self.counts))[turn]
        return reference.new_block_ids(self.seed, self.session, place, self.counts[place])


class Sessions(Sequence[SessionTree]):
    """The session trees of a corpus, or some of them; each is built when asked for."""

    def __init__(self, turns: TurnTable, chosen: Sequence[int] | None = None) -> None:
        self.turns = turns
        self._chosen = range(len(turns.session_streams) - 1) if chosen is None else chosen

    @property
    def indexes(self) -> Sequence[int]:
        """The place of each session in the corpus."""
        return self._chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> SessionTree: ...
    @overload
    def __getitem__(self, index: slice) -> Sessions: ...
    def __getitem__(self, index: int | slice) -> SessionTree | Sessions:
        if isinstance(index, slice):
            return Sessions(self.turns, self._chosen[index])
        return self.turns.tree(self._chosen[index])

    def select(self, indexes: Iterable[int]) -> Sessions:
        """The sessions at these positions, in this order; each tree keeps its `index` in the corpus."""
        return Sessions(self.turns, [self._chosen[index] for index in indexes])


def peak_tokens(corpus: Corpus) -> Rows:
    """Per session: the largest input + max(output, 1) of any turn, subagents included."""
    turns = corpus.sessions.turns
    needs = turns.ints("input_tokens").astype(np.int64) + np.maximum(turns.ints("output_tokens"), 1)
    return np.maximum.reduceat(needs, turns.session_rows[:-1])


def fits(corpus: Corpus, max_context: int) -> tuple[list[int], list[tuple[str, int]]]:
    """(indexes of the sessions a window of `max_context` tokens holds, (id, peak tokens) of the others).

    A session is out when any of its turns, a subagent's too, needs more than the window.
    """
    peaks = peak_tokens(corpus)
    ids = corpus.sessions.turns.session_ids
    dropped = [(ids[index], int(peaks[index])) for index in np.flatnonzero(peaks > max_context)]
    return np.flatnonzero(peaks <= max_context).tolist(), dropped


@dataclass(frozen=True, slots=True)
class LengthConflict:
    """A block id that stands for blocks of different lengths."""

    session_id: str
    block_id: int
    tokens: tuple[int, ...]


def length_conflicts(corpus: Corpus) -> list[LengthConflict]:
    """Every block id that has two lengths where it must mean one block; none in a sound corpus.

    Only the last block of a prompt may be short. An id that is short in one prompt and full, or short
    by another count, in another prompt of its scope cannot stand for one text.
    """
    turns, block = corpus.sessions.turns, corpus.block_size
    tokens, blocks = turns.ints("input_tokens"), turns.ints("keep_blocks") + turns.ints("new_blocks")
    short = np.flatnonzero((tokens % block != 0) & (blocks > tokens // block))
    if len(short) == 0 or turns.rule is not None:
        return []
    if corpus.hash_id_scope == "global":
        return _conflicts(corpus.sessions, block)
    touched = np.unique(np.searchsorted(turns.session_rows, short, side="right") - 1)
    return [conflict for index in touched for conflict in _conflicts([corpus.sessions[int(index)]], block)]


def _conflicts(trees: Iterable[SessionTree], block: int) -> list[LengthConflict]:
    short: dict[int, set[int]] = {}
    owner: dict[int, str] = {}
    full: list[BlockIds] = []
    for tree in trees:
        seen = [np.empty(0, dtype=np.uint64)]
        for stream in tree.streams:
            for ids, tokens in zip(stream.block_ids(), stream.input_tokens, strict=True):
                whole, rest = divmod(tokens, block)
                seen.append(ids[:whole])
                if rest and len(ids) > whole:
                    short.setdefault(int(ids[whole]), set()).add(rest)
                    owner.setdefault(int(ids[whole]), tree.session_id)
        full.append(np.unique(np.concatenate(seen)))
    candidates = np.array(list(short), dtype=np.uint64)
    for block_id in candidates[np.isin(candidates, np.concatenate(full))].tolist():
        short[block_id].add(block)
    return [
        LengthConflict(owner[block_id], block_id, tuple(sorted(lengths)))
        for block_id, lengths in short.items()
        if len(lengths) > 1
    ]


def require_rule(rule: Any, where: str) -> None:
    """Raise InputError where a manifest's id rule is none that this version knows."""
    known = isinstance(rule, dict) and rule.get("rule") == ID_RULE and type(rule.get("seed")) is int
    if rule is not None and not known:
        raise InputError(f"{where}: id rule {rule!r} is not known", f"this version knows the rule {ID_RULE!r}")
