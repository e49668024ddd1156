"""Session records in files: a folder of them, JSON lines, a JSON list or one object, plain or packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentx import store
from agentx.corpus.fields import Faults
from agentx.errors import InputError

_TRACES = (".json", ".jsonl", ".ndjson")
_PACKED = (".gz", ".zst", ".zstd")


def trace_files(folder: Path) -> list[Path]:
    """The folder's trace files in name order; those of the folders below where it holds none itself."""
    files = [file for file in folder.iterdir() if _is_trace(file)] or [
        file for file in folder.rglob("*") if _is_trace(file)
    ]
    if not files:
        raise InputError(
            f"{folder}: no traces: no .json or .jsonl file in it", "give the folder that holds the sessions"
        )
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _is_trace(file: Path) -> bool:
    suffixes = file.suffixes
    plain = suffixes[:-1] if suffixes and suffixes[-1] in _PACKED else suffixes
    return bool(plain) and plain[-1] in _TRACES and not file.name.startswith(".") and file.is_file()


def records(path: Path, files: Sequence[Path], faults: Faults) -> Iterator[tuple[str, Any]]:
    """(label, JSON value) of every session in the files; a label is empty where the file is `path` and one session.

    What is no JSON, and files without content, become faults.
    """
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        read = _lines if _is_lines(file) else _document
        yield from read(file, name, faults)


def _lines(file: Path, name: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    number = 0
    for number, line in store.read_lines(file):
        label = f"{name} line {number}".strip()
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            faults.add(f"{label}: not JSON: {error}")
        else:
            yield label, record
    if number == 0:
        faults.add(_at(name, "the file is empty"))


def _document(file: Path, name: str, faults: Faults) -> Iterator[tuple[str, Any]]:
    data = store.read_bytes(file)
    if not data.strip():
        faults.add(_at(name, "the file is empty"))
        return
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        faults.add(_at(name, f"not JSON: {error}"))
        return
    del data
    if not isinstance(value, list):
        yield name, value
        return
    for number, record in enumerate(value):
        yield f"{name}[{number}]", record


def _at(name: str, message: str) -> str:
    return f"{name}: {message}" if name else message


def _is_lines(file: Path) -> bool:
    return any(suffix in (".jsonl", ".ndjson") for suffix in file.suffixes[-2:])


def corpus_name(path: Path) -> str:
    """The name of a file or folder without what its format and packing add."""
    name = path.resolve().name
    for suffix in (".gz", ".zst", ".zstd", ".json", ".jsonl", ".ndjson"):
        name = name.removesuffix(suffix)
    return name
