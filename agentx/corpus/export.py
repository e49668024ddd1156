"""Writing a corpus as weka_trace files, byte for byte as the reference does.

A prompt repeats most of the prompt before it, so the text of its ids begins with a part of the text
before: that part is copied, not made again. The ids themselves are hashed by several processes where
there are many, and files are written and hashed by one thread while the next sessions are made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from agentx import hashing, store
from agentx.corpus.parquet import MANIFEST, TABLE, is_parquet_corpus
from agentx.corpus.sessions import Corpus, Sessions
from agentx.errors import InputError
from agentx.turns import BlockIds, SessionTree
from agentx.units import NS_PER_S

MARKER = ".agentx"
"""File in an exported folder that says agentx made it; without a suffix, so that no reader takes it for a session."""

_SESSION_FILE = re.compile(r"session_[0-9]{5,}\.json")
_WAITING = 4
"""Sessions made but not yet written: bounds the memory."""
_POWERS_OF_TEN = 10 ** np.arange(1, 20, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Export:
    """What was written."""

    folder: Path
    files: int
    size: int
    sha256: str
    """Of all files joined in name order."""


def export_weka(corpus: Corpus, folder: Path) -> Export:
    """Write `session_00000.json` ... into `folder`, which appears whole or not at all.

    Raises InputError where the folder holds something that agentx did not make, or the corpus has
    subagents (their recorded files are the form to hand on).
    """
    _refuse_subagents(corpus)
    with store.atomic_folder(folder, is_corpus_folder) as temporary:
        export = write_weka(corpus, temporary)
    return Export(folder, export.files, export.size, export.sha256)


def write_weka(corpus: Corpus, folder: Path) -> Export:
    """Write the files and the marker into an existing empty folder."""
    _refuse_subagents(corpus)
    digest = hashlib.sha256()
    size = 0
    waiting: deque[Future[int]] = deque()
    times = tuple(corpus.sessions.turns.ints(name) for name in ("t_ns", "api_ns"))
    rows = corpus.sessions.turns.session_rows
    with ThreadPoolExecutor(1) as writer:
        for index, (tree, new_ids) in enumerate(_trees_with_ids(corpus.sessions)):
            t_ns, api_ns = (column[rows[tree.index] : rows[tree.index + 1]] for column in times)
            parts = _session_text(tree, new_ids, t_ns, api_ns, corpus)
            waiting.append(writer.submit(_write, folder / f"session_{index:05d}.json", parts, digest))
            if len(waiting) > _WAITING:
                size += waiting.popleft().result()
        size += sum(future.result() for future in waiting)
    export = Export(folder, len(corpus.sessions), size, digest.hexdigest())
    origin = {key: value for key, value in corpus.manifest.items() if key not in ("digest", "id_rule")}
    store.atomic_write_json(folder / MARKER, {**origin, "form": "weka", "files_sha256": export.sha256})
    return export


def is_corpus_folder(folder: Path) -> bool:
    """True where agentx wrote this folder, in either form, and nobody added to it: it may be replaced."""
    names = {entry.name for entry in folder.iterdir()}
    if MARKER in names:
        return all(name == MARKER or _SESSION_FILE.fullmatch(name) for name in names)
    return names == {TABLE, MANIFEST} or (names == {MANIFEST} and is_parquet_corpus(folder))


def joined_sha256(folder: Path) -> str:
    """SHA-256 of the folder's session files joined in name order."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("session_*.json")):
        digest.update(store.read_bytes(file))
    return digest.hexdigest()


def _refuse_subagents(corpus: Corpus) -> None:
    turns = corpus.sessions.turns
    if len(turns.stream_rows) > len(turns.session_rows):
        raise InputError(f"{corpus.source}: sessions with subagents are not exported", "hand on the recorded files")


def _write(file: Path, parts: list[bytes], digest: Any) -> int:
    with file.open("wb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())
    for part in parts:
        digest.update(part)
    return sum(map(len, parts))


def _trees_with_ids(sessions: Sessions) -> Iterator[tuple[SessionTree, Sequence[BlockIds]]]:
    """Every session with the new ids of its turns."""
    rule = sessions.turns.rule
    if rule is None:
        for tree in sessions:
            yield tree, tree.streams[0].new_ids
        return
    new_blocks, rows = sessions.turns.ints("new_blocks"), sessions.turns.session_rows
    counts = [(index, new_blocks[rows[index] : rows[index + 1]].tolist()) for index in sessions.indexes]
    yield from zip(sessions, hashing.new_ids(rule["seed"], counts), strict=True)


def _session_text(
    tree: SessionTree, new_ids: Sequence[BlockIds], t_ns: Any, api_ns: Any, corpus: Corpus
) -> list[bytes]:
    """The pieces of the session's JSON, in the reference's key order and the default style of json.dumps."""
    stream = tree.streams[0]
    head = {
        "id": tree.session_id,
        "models": list(dict.fromkeys(stream.models)),
        "block_size": corpus.block_size,
        "hash_id_scope": corpus.hash_id_scope,
    }
    parts = [json.dumps(head)[:-1].encode(), b', "requests": [']
    for turn, ids in enumerate(_id_texts(stream.keep_blocks, new_ids)):
        request = {"t": t_ns[turn] / NS_PER_S, "type": "n", "model": stream.models[turn]}
        lengths = {"in": stream.input_tokens[turn], "out": stream.output_tokens[turn]}
        rest = {"api_time": api_ns[turn] / NS_PER_S, "think_time": stream.think_ns[turn] / NS_PER_S, "stop": "stop"}
        head_text = json.dumps({**request, **lengths})[:-1]
        parts += [f'{head_text}, "hash_ids": ['.encode(), ids, f"], {json.dumps(rest)[1:]}".encode(), b", "]
    parts[-1] = b"]}"
    return parts


def _id_texts(keep_blocks: Sequence[int], new_ids: Sequence[BlockIds]) -> Iterator[bytes]:
    """The text of each turn's ids, without brackets."""
    text = b""
    ends: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    for keep, new in zip(keep_blocks, new_ids, strict=True):
        kept = text[: ends[keep - 1]] if keep else b""
        made = orjson.dumps(new, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].replace(b",", b", ")
        text = b", ".join(part for part in (kept, made) if part)
        start = len(text) - len(made)
        ends = np.concatenate((ends[:keep], start + _ends(new)))
        yield text


def _ends(ids: BlockIds) -> npt.NDArray[np.int64]:
    """Where each id ends in the text of these ids joined by two characters."""
    digits = np.searchsorted(_POWERS_OF_TEN, ids, side="right") + 1
    ends: npt.NDArray[np.int64] = np.cumsum(digits + 2) - 2
    return ends
