"""Corpora: reading what the field has, and the one form everything else works on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agentx import store
from agentx.corpus.export import MARKER, export_weka, joined_sha256
from agentx.corpus.parquet import TABLE, is_parquet_corpus, read_parquet
from agentx.corpus.records import trace_files
from agentx.corpus.sessions import Corpus, LengthConflict, Sessions, fits, length_conflicts, peak_tokens
from agentx.corpus.weka import BASES, read_weka
from agentx.errors import InputError

__all__ = [
    "Corpus",
    "LengthConflict",
    "Sessions",
    "export_weka",
    "fits",
    "length_conflicts",
    "load_corpus",
    "peak_tokens",
]


def load_corpus(path: Path, *, subagent_times: str = "auto") -> Corpus:
    """The corpus at `path`; raises InputError or FaultsError where there is none or it is malformed.

    Read are: a corpus folder of agentx or its `sessions.parquet`; weka_trace sessions as a folder of
    files (in name order, folders below it too where it holds none itself), as JSON lines, as a JSON
    list or as one JSON object; each plain, gzip or zstd. `subagent_times` says how times inside
    subagents count (`auto` finds out and notes it).
    """
    path = Path(path)
    if subagent_times not in BASES:
        raise InputError(f"subagent times {subagent_times!r} are not known", f"choose one of {', '.join(BASES)}")
    if not path.exists():
        raise InputError(f"{path}: no such file or folder", "give a corpus folder or a trace file")
    if path.suffix == ".parquet" or (path / TABLE).is_file() or is_parquet_corpus(path):
        return read_parquet(path)
    if not path.is_dir():
        return read_weka(path, [path], subagent_times)
    corpus = read_weka(path, trace_files(path), subagent_times)
    if not (path / MARKER).is_file():
        return corpus
    return _with_origin(corpus, path)


def _with_origin(corpus: Corpus, path: Path) -> Corpus:
    """An exported corpus with what its marker says of it; files that were edited since are told."""
    origin = store.read_json(path / MARKER)
    if not isinstance(origin, dict) or not isinstance(origin.get("name"), str):
        raise InputError(f"{path / MARKER}: no marker of agentx", "remove it to read the folder as a recording")
    notes = corpus.notes
    if joined_sha256(path) != origin.get("files_sha256"):
        notes = (*notes, "the files were edited since they were made: they are read as they are")
    manifest = {**origin, **corpus.manifest, "name": origin["name"]}
    return replace(corpus, name=origin["name"], manifest=manifest, notes=notes)
