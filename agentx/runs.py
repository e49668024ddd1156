"""The run folder: rows on disk within seconds of happening, whatever becomes of the process.

While a run lasts, a background thread appends the rows that have gathered to `calls.arrow` (an Arrow
IPC stream) about once a second, and rewrites `in_flight.arrow`, a row for each call on its way. Worker
processes have journals of their own beside it (`calls.0.arrow`, `in_flight.0.arrow`, ...). At the end
all journals become `calls.parquet`. A run whose process was killed is read from its journals: a torn
last batch is dropped, and the calls that were on their way stand as `cancelled`, error kind `killed`.

Rows leave memory only when they are whole on the disk, and a part that a full disk left is overwritten
by the next attempt. So nothing that was saved is lost, and nothing at all where there is room again
before the end.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from agentx import store
from agentx.errors import InputError
from agentx.turns import CALLS_SCHEMA, CallRow, calls_batch

if TYPE_CHECKING:
    import polars as pl  # imported where a run is read: it takes as long as all else before the first request

SCHEMA_VERSION = 1
FLUSH_S = 1.0
"""Period of the journal; a kill loses at most the rows of this time and of one write."""

PIECE = 128
"""Rows turned into columns at a stretch: the thread must not keep the interpreter from the event loop, which
stamps times."""

MANIFEST = "run.json"
CALLS = "calls.parquet"
JOURNAL = "calls.arrow"
IN_FLIGHT = "in_flight.arrow"

SECTIONS = ("corpus", "profile", "settings", "deployment", "host", "clock", "window", "ended", "client", "server")
"""Sections of the manifest."""

OURS = (MANIFEST, CALLS, JOURNAL, IN_FLIGHT, "report.json", "report.html", "server_metrics.parquet")
"""Files of a run folder: what `overwrite` may remove, with the journals of workers."""
_PART = re.compile(r"(calls|in_flight)\.\d+\.arrow")

ORDER = ["root_session_id", "play", "lane", "session_id", "turn"]
"""Sort keys of `calls.parquet`: a session's turns stand together, in an order that no timing changes."""
_KEY = ["lane", "play", "session_id", "turn"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it is on disk."""

    folder: Path
    manifest: dict[str, Any]
    calls: pl.DataFrame
    """In CALLS_SCHEMA, sorted by ORDER."""
    complete: bool
    """False where it was read from the journal of a run that never finished."""


class Journal:
    """Keeps the rows of one process in a run folder; `add` is cheap and never waits for the disk."""

    def __init__(
        self,
        folder: Path,
        *,
        part: int | None = None,
        in_flight: Callable[[], Sequence[CallRow]] = tuple,
    ) -> None:
        """`part` is the number of a worker process. Raises InputError where the folder cannot be written."""
        self.folder = folder
        self.in_flight = in_flight
        self._path = folder / _part_name(JOURNAL, part)
        self._flying_path = folder / _part_name(IN_FLIGHT, part)
        self._rows: deque[CallRow] = deque()
        self._fault: Exception | None = None
        self._stop = threading.Event()
        self._saved_bytes = 0
        try:
            self._file = self._path.open("wb", buffering=0)
            self._append(CALLS_SCHEMA.serialize().to_pybytes())
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror}", "check the folder") from error
        self._thread = threading.Thread(target=self._journal, name="journal", daemon=True)
        self._thread.start()

    def add(self, row: CallRow) -> None:
        """Keep a row; it never fails: look at `fault` now and then."""
        self._rows.append(row)

    @property
    def fault(self) -> Exception | None:
        """Why the journal cannot be written any more; None while it can.

        The thread has stopped then, and rows stay in memory. `close` tries once more.
        """
        return self._fault

    def close(self) -> None:
        """Save what has gathered, the last time; look at `fault` afterwards."""
        self._stop.set()
        self._thread.join()
        self._flush()
        self._file.close()

    def _journal(self) -> None:
        while self._fault is None and not self._stop.wait(FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        """Save the rows that have gathered, then the calls on their way, then what else there is."""
        try:
            flying = self.in_flight()  # before the rows: a call that ends in between is in both, not in neither
            self._save_rows()
            table = pa.Table.from_batches([calls_batch(flying)], schema=CALLS_SCHEMA)
            store.atomic_write_table(self._flying_path, table)
            self._save_more()
            self._fault = None
        except (OSError, pa.ArrowException, InputError) as error:
            self._fault = error

    def _save_more(self) -> None:
        """What else is saved with each flush."""

    def _save_rows(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        try:
            messages = []
            for start in range(0, len(rows), PIECE):
                messages.append(calls_batch(rows[start : start + PIECE]).serialize())
                time.sleep(0)  # lets the event loop have the interpreter
            self._append(b"".join(messages))
        except BaseException:
            self._rows.extendleft(reversed(rows))
            raise

    def _append(self, data: bytes) -> None:
        """Put whole IPC messages at the journal's end, on the disk, over a part that a failed attempt left."""
        self._file.truncate(self._saved_bytes)
        self._file.seek(self._saved_bytes)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())
        self._saved_bytes += len(data)


class RunWriter(Journal):
    """Writes one run folder: its manifest, its own journal, and at the end every journal as one table."""

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        *,
        in_flight: Callable[[], Sequence[CallRow]] = tuple,
        overwrite: bool = False,
    ) -> None:
        """Raises InputError where the folder holds something else, or a run and `overwrite` is not set."""
        self.manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **manifest, "ended": None}
        self._manifest_changed = False
        _prepare(folder, overwrite)
        store.atomic_write_json(folder / MANIFEST, self.manifest)
        super().__init__(folder, in_flight=in_flight)

    def update(self, **facts: Any) -> None:
        """Merge facts into `run.json`; it is written with the next flush."""
        self.manifest.update(facts)
        self._manifest_changed = True

    def finish(self, ended: Mapping[str, Any], amend: Callable[[pa.Table], pa.Table] = lambda table: table) -> Run:
        """The finished run: `calls.parquet` written with what `amend` makes of the rows, the journals removed.

        Raises InputError where the disk refuses; what was saved until then stays readable.
        """
        self.close()
        if self.fault is not None:
            raise unwritable(self.folder, self.fault)
        self.manifest["ended"] = dict(ended)
        store.atomic_write_json(self.folder / MANIFEST, self.manifest)
        table = _sorted(amend(_salvage(self.folder)))  # a worker that died left calls on their way
        store.atomic_write_table(self.folder / CALLS, table, row_group_size=65536)
        for path in (*_parts(self.folder, JOURNAL), *_parts(self.folder, IN_FLIGHT)):
            path.unlink()
        return Run(self.folder, self.manifest, _frame(table), complete=True)

    def _save_more(self) -> None:
        if self._manifest_changed:
            self._manifest_changed = False
            store.atomic_write_json(self.folder / MANIFEST, self.manifest)


def unwritable(folder: Path, fault: object) -> InputError:
    """The error of a run that the disk refuses."""
    return InputError(
        f"{folder}: the run can no longer be written: {fault}",
        "free some space; what was written until then can be read with agentx report",
    )


def _part_name(name: str, part: int | None) -> str:
    """`calls.arrow`, or `calls.3.arrow` of worker 3."""
    stem, suffix = name.split(".")
    return name if part is None else f"{stem}.{part}.{suffix}"


def _parts(folder: Path, name: str) -> list[Path]:
    """The files of this name in a run folder: the main process's and the workers'."""
    stem = name.split(".")[0]
    return sorted(
        path
        for path in folder.iterdir()
        if path.name == name or (_PART.fullmatch(path.name) and path.name.startswith(f"{stem}."))
    )


def _prepare(folder: Path, overwrite: bool) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            _make_room(folder, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be used: {error.strerror}", "choose another folder with -o") from error


def _make_room(folder: Path, overwrite: bool) -> None:
    """Remove the run in a folder; raises InputError, nothing removed, where it may not be."""
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{folder}: already there and no run of agentx", "choose another folder with -o")
    if not overwrite:
        raise InputError(f"{folder}: already holds a run", "choose another folder with -o, or give --overwrite")
    paths = sorted(folder.iterdir())
    foreign = [path.name for path in paths if not path.is_file() or not _is_ours(path.name)]
    if foreign:
        raise InputError(
            f"{folder}: holds a run and {', '.join(foreign[:3])}, not written by agentx",
            "choose another folder with -o, or move those away",
        )
    for path in paths:
        path.unlink()


def _is_ours(name: str) -> bool:
    return name in OURS or name.endswith(".tmp") or bool(_PART.fullmatch(name))


def load_run(folder: Path) -> Run:
    """The run in a folder, finished or not; raises InputError where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        what = "no run of agentx in it" if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: {what}", "give the folder that agentx replay wrote (-o)")
    manifest = store.read_json(path)
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema version {version!r}, this agentx reads {SCHEMA_VERSION}", "update agentx")
    _check_manifest(manifest, path)
    if (folder / CALLS).is_file():
        return Run(folder, manifest, _read_calls(folder / CALLS), complete=True)
    table = _salvage(folder)
    if manifest.get("ended") is None:
        manifest["ended"] = {"reason": "killed"}
    return Run(folder, manifest, _frame(_sorted(table)), complete=False)


def _check_manifest(manifest: dict[str, Any], path: Path) -> None:
    """Raise InputError where a section is not of its kind: a report must not stumble over it."""
    for name in SECTIONS:
        section = manifest.get(name)
        if section is not None and not isinstance(section, dict):
            raise InputError(f"{path}: {name} is {section!r}, an object is needed", "was it edited? use a copy")
    window = manifest.get("window")
    if window is not None and not all(type(window.get(end)) is int for end in ("start_ns", "end_ns")):
        raise InputError(f"{path}: window is {window!r}, start_ns and end_ns are needed", "was it edited? use a copy")


def _read_calls(path: Path) -> pl.DataFrame:
    import polars as pl

    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path}: cannot be read: {error}", "the file is damaged: use a copy") from error
    expected = _frame(CALLS_SCHEMA.empty_table()).schema
    missing = [name for name in expected if name not in frame.columns]
    if missing:
        raise InputError(f"{path}: lacks the columns {', '.join(missing)}", "was it written by another program?")
    wrong = [
        f"{name} is {frame.schema[name]}, not {kind}" for name, kind in expected.items() if frame.schema[name] != kind
    ]
    if wrong:
        raise InputError(f"{path}: columns of another type: {', '.join(wrong)}", "was it written by another program?")
    return frame


def _salvage(folder: Path) -> pa.Table:
    """What the journals of a run hold, and the calls that were on their way when a process died."""
    journal = _read_journals(folder)
    found = [journal]
    for path in _parts(folder, IN_FLIGHT):
        try:
            with pa.OSFile(str(path)) as file:
                flying = _frame(pa.ipc.open_file(file).read_all())
        except (pa.ArrowException, OSError):
            continue
        new = flying.join(_frame(journal), on=_KEY, how="anti")
        found.append(new.to_arrow().cast(CALLS_SCHEMA))
    return pa.concat_tables(found)


def _read_journals(folder: Path) -> pa.Table:
    """The rows of every journal in a run folder."""
    empty = CALLS_SCHEMA.empty_table()
    return pa.concat_tables([empty, *(_read_journal(path) for path in _parts(folder, JOURNAL))])


def _read_journal(path: Path) -> pa.Table:
    """Every whole batch of an Arrow IPC stream; a torn end is dropped."""
    batches = []
    if path.is_file():
        with pa.OSFile(str(path)) as file:
            try:
                reader = pa.ipc.open_stream(file)
                while True:
                    batch = reader.read_next_batch()
                    batch.validate(full=True)
                    batches.append(batch)
            except (StopIteration, pa.ArrowException, OSError):
                pass
    return pa.Table.from_batches(batches, schema=CALLS_SCHEMA)


def _sorted(table: pa.Table) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in ORDER]).combine_chunks()


def _frame(table: pa.Table) -> pl.DataFrame:
    import polars as pl

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
