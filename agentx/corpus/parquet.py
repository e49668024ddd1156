"""Corpora as agentx keeps them: a folder of `sessions.parquet` and `manifest.json`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentx import store
from agentx.corpus.fields import MAX_FAULTS
from agentx.corpus.sessions import Corpus, TurnTable, make_corpus, require_rule
from agentx.errors import FaultsError, InputError
from agentx.turns import CORPUS_SCHEMA

TABLE = "sessions.parquet"
MANIFEST = "manifest.json"
FORMAT = "agentx-corpus"
FORMAT_VERSION = 1

CHANGED = "the content differs from the digest in its manifest: it was changed after it was made"
"""Note on a corpus that was edited by hand or damaged: it still is what is on disk."""


def write_parquet(folder: Path, table: pa.Table, manifest: dict[str, Any]) -> None:
    """Write the two files of a corpus into an existing folder."""
    strings = [field.name for field in CORPUS_SCHEMA if pa.types.is_string(field.type)]
    deltas = {field.name: "DELTA_BINARY_PACKED" for field in CORPUS_SCHEMA if pa.types.is_integer(field.type)}
    store.atomic_write_table(folder / TABLE, table, use_dictionary=strings, column_encoding=deltas)
    store.atomic_write_json(folder / MANIFEST, manifest)


def is_parquet_corpus(folder: Path) -> bool:
    """True where the folder's manifest says that agentx wrote a corpus there."""
    try:
        manifest = store.read_json(folder / MANIFEST)
    except InputError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def read_parquet(path: Path) -> Corpus:
    """The corpus of a folder, or of its `sessions.parquet`; raises FaultsError with all that is wrong in it."""
    folder = path if path.is_dir() else path.parent
    table_path = path / TABLE if path.is_dir() else path
    manifest = _read_manifest(folder / MANIFEST)
    table = _read_table(table_path)
    rule = manifest.get("id_rule")
    if faults := table_faults(table, rule):
        raise FaultsError(str(table_path), [(fault, "") for fault in faults[:MAX_FAULTS]])
    corpus = make_corpus(
        table,
        block_size=manifest["block_size"],
        scope=manifest["hash_id_scope"],
        name=manifest.get("name", folder.name),
        source=str(path),
        manifest=manifest,
    )
    return corpus if corpus.digest == manifest.get("digest") else replace(corpus, notes=(CHANGED,))


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise InputError(f"{path}: missing beside the table", "a corpus is a folder of both files: make it again")
    manifest = store.read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path}: not the manifest of an agentx corpus", "make the corpus again")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {manifest.get('format_version')!r}, this agentx reads {FORMAT_VERSION}",
            "make the corpus again",
        )
    faults = []
    if type(manifest.get("block_size")) is not int or manifest["block_size"] < 1:
        faults.append((f"block_size is {manifest.get('block_size')!r}, at least 1 is needed", ""))
    if manifest.get("hash_id_scope") not in ("local", "global"):
        faults.append((f"hash_id_scope is {manifest.get('hash_id_scope')!r}, not local or global", ""))
    if faults:
        raise FaultsError(str(path), faults)
    require_rule(manifest.get("id_rule"), str(path))
    return manifest


def _read_table(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}", "make the corpus again") from error
    if not table.schema.equals(CORPUS_SCHEMA):
        missing = [field.name for field in CORPUS_SCHEMA if field.name not in table.schema.names]
        what = f"lacks the columns {', '.join(missing)}" if missing else "has other column types"
        raise InputError(f"{path}: {what}, so it is no corpus table", "make the corpus again")
    return table.combine_chunks()


def table_faults(table: pa.Table, rule: dict[str, Any] | None) -> list[str]:
    """Every kind of fault in a corpus table, each with the first row that has it."""
    if table.num_rows == 0:
        return ["no sessions"]
    faults = [
        f"column {field.name} has {table[field.name].null_count} empty cells"
        for field in CORPUS_SCHEMA
        if not field.nullable and table[field.name].null_count
    ]
    return faults or [*_order_faults(table), *_value_faults(table, rule)] or _tree_faults(table)


def _order_faults(table: pa.Table) -> list[str]:
    turn = table["turn"].to_numpy()
    follows = turn[1:] == turn[:-1] + 1
    names = table["session_id"]
    same = pc.equal(names[1:], names[:-1]).to_numpy()
    bad = np.flatnonzero((turn[1:] != 0) & ~(follows & same)) + 1
    if turn[0] != 0:
        bad = np.append(0, bad)
    if len(bad) == 0:
        return []
    row = int(bad[0])
    return [f"row {row}: turn {turn[row]} of session {names[row].as_py()!r} does not follow the row before it"]


def _value_faults(table: pa.Table, rule: dict[str, Any] | None) -> list[str]:
    faults = []
    lowest = {"input_tokens": 1, "output_tokens": 0, "think_ns": 0, "api_ns": 0, "keep_blocks": 0, "new_blocks": 0}
    for name, low in lowest.items():
        column = table[name].to_numpy()
        bad = np.flatnonzero(column < low)
        if len(bad):
            faults.append(f"row {bad[0]}: {name} is {column[bad[0]]}, at least {low} is needed")
    turn, keep, new = (table[name].to_numpy() for name in ("turn", "keep_blocks", "new_blocks"))
    before = np.where(turn == 0, 0, np.append(0, (keep + new)[:-1]))
    bad = np.flatnonzero(keep > before)
    if len(bad):
        faults.append(f"row {bad[0]}: keeps {keep[bad[0]]} blocks of a turn that has {before[bad[0]]}")
    ids = table["new_ids"]
    if rule is None and ids.null_count:
        faults.append("block ids are neither listed nor given by a rule in the manifest")
    if rule is not None and ids.null_count < len(ids):
        faults.append("block ids are both listed and given by a rule in the manifest")
    if rule is None and not ids.null_count:
        lengths = pc.list_value_length(ids).to_numpy()
        bad = np.flatnonzero(lengths != new)
        if len(bad):
            faults.append(f"row {bad[0]}: new_blocks is {new[bad[0]]}, new_ids has {lengths[bad[0]]}")
    return faults


def _tree_faults(table: pa.Table) -> list[str]:
    """Faults in how streams hang together: sessions are whole, parents come first, joins come after spawns."""
    turns = TurnTable(table, None)
    starts = turns.stream_rows[:-1]
    columns = ("root_session_id", "session_id", "parent_session_id", "spawn_turn", "join_turn")
    streams = table.select(columns).take(pa.array(starts)).to_pylist()
    faults: list[str] = []
    sessions: set[str] = set()
    lengths: dict[str, int] = {}
    for stream, row, end in zip(streams, starts.tolist(), turns.stream_rows[1:].tolist(), strict=True):
        own, root, parent = stream["session_id"], stream["root_session_id"], stream["parent_session_id"]
        where = f"row {row}: session {own!r}"
        if parent is None:
            lengths = {}
            if own != root or root in sessions:
                faults.append(f"{where} is " + ("here twice" if own == root else f"a root, but its root is {root!r}"))
            sessions.add(root)
        elif parent not in lengths or own in lengths or root not in lengths:
            faults.append(f"{where} has the parent {parent!r} and root {root!r}, which are not above it")
        else:
            spawn, join, n = stream["spawn_turn"], stream["join_turn"], lengths[parent]
            if not (-1 <= spawn < n and (join == -1 or spawn < join < n)):
                faults.append(f"{where} is spawned by turn {spawn} and joined by turn {join} of {n}")
        lengths[own] = end - row
    return faults
