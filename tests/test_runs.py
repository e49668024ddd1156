"""The run folder: nothing lost, nothing half-written, read after a kill."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from agentx import runs
from agentx.errors import InputError
from agentx.report import make_report
from agentx.runs import CALLS, IN_FLIGHT, JOURNAL, MANIFEST, RunWriter, _read_journal, load_run
from agentx.store import atomic_write_table
from agentx.turns import CALLS_SCHEMA, CallRow, calls_batch


def row(turn: int, status: str = "ok", session: str = "s", **columns: object) -> CallRow:
    return CallRow(session, turn, 0, 0, None, session, "measure", status, **columns)  # type: ignore[arg-type]


def test_rows_come_back_in_one_order_whatever_the_order_of_events(tmp_path: Path) -> None:
    rows = [row(turn, session=session, chunk_ns=[1, 2], sent_ns=turn) for session in ("b", "a") for turn in (1, 0)]
    for name, order in (("one", rows), ("two", rows[::-1])):
        writer = RunWriter(tmp_path / name, {"seed": 1})
        for entry in order:
            writer.add(entry)
        writer.finish({"reason": "window"})
    run = load_run(tmp_path / "one")
    assert run.complete
    assert run.calls.select("session_id", "turn").rows() == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert run.calls.columns == CALLS_SCHEMA.names
    assert (tmp_path / "one" / CALLS).read_bytes() == (tmp_path / "two" / CALLS).read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [CALLS, MANIFEST]
    assert run.manifest["ended"] == {"reason": "window"}


def test_an_empty_run_loads(tmp_path: Path) -> None:
    RunWriter(tmp_path / "r", {}).finish({"reason": "interrupted"})
    run = load_run(tmp_path / "r")
    assert (run.calls.height, run.complete) == (0, True)


@pytest.mark.slow
def test_sigkill_loses_at_most_two_seconds(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from agentx.runs import RunWriter
        from tests.test_runs import row
        flying = [row(10**6, "cancelled", error_kind="killed")]
        writer = RunWriter(Path({str(tmp_path / "r")!r}), {{}}, in_flight=lambda: flying)
        n = 0
        while True:
            writer.add(row(n, sent_ns=time.monotonic_ns()))
            n += 1
            time.sleep(0.01)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent.parent)
    time.sleep(4.5)  # start, and two or three flushes
    process.send_signal(signal.SIGKILL)
    killed_ns = time.monotonic_ns()
    process.wait()
    run = load_run(tmp_path / "r")
    assert not run.complete
    assert run.manifest["ended"] == {"reason": "killed"}
    done = run.calls.filter(pl.col("status") == "ok")
    assert done["turn"].to_list() == list(range(done.height))
    assert done.height > 50
    assert killed_ns - done["sent_ns"].max() < 2e9  # type: ignore[operator]
    assert run.calls.filter(pl.col("error_kind") == "killed").height == 1


def test_a_torn_journal_loses_only_its_last_batch(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    writer = RunWriter(folder, {})
    sizes = []
    for turn in range(3):
        writer.add(row(turn, chunk_ns=list(range(turn))))
        writer._flush()
        sizes.append((folder / JOURNAL).stat().st_size)
    writer.close()
    whole = (folder / JOURNAL).read_bytes()
    (folder / IN_FLIGHT).unlink()
    cuts = (*range(sizes[0]), *range(sizes[1], len(whole) + 1))
    for cut in cuts if len(whole) < 20_000 else cuts[::7]:
        (folder / JOURNAL).write_bytes(whole[:cut])
        assert _read_journal(folder / JOURNAL).num_rows == sum(size <= cut for size in sizes)
    for cut in range(sizes[1], sizes[2], 11):
        (folder / JOURNAL).write_bytes(whole[:cut] + b"\xff" * 40)
        assert load_run(folder).calls.height >= 2
    (folder / IN_FLIGHT).write_bytes(b"ARROW1 nonsense")
    assert load_run(folder).calls.height >= 2


def test_rows_added_while_the_thread_writes_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FLUSH_S", 0.0005)
    writer = RunWriter(tmp_path / "r", {})
    for turn in range(20_000):
        writer.add(row(turn))
    assert writer.finish({}).calls["turn"].to_list() == list(range(20_000))


def test_calls_that_ended_after_the_snapshot_stand_once(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    writer = RunWriter(folder, {}, in_flight=lambda: [row(7, "cancelled", error_kind="killed")])
    writer._flush()
    writer.add(row(7, "ok"))
    writer.in_flight = tuple
    shutil.copy(folder / IN_FLIGHT, tmp_path / "old")
    writer._flush()
    writer.close()
    shutil.copy(tmp_path / "old", folder / IN_FLIGHT)
    assert load_run(folder).calls["status"].to_list() == ["ok"]


def test_foreign_folders_and_old_runs_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="no run of agentx"):
        RunWriter(tmp_path / "mine", {})
    RunWriter(tmp_path / "r", {}).finish({})
    with pytest.raises(InputError, match="already holds a run"):
        RunWriter(tmp_path / "r", {})
    RunWriter(tmp_path / "r", {"seed": 9}, overwrite=True).finish({})
    assert load_run(tmp_path / "r").manifest["seed"] == 9
    (tmp_path / "r" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"holds a run and notes\.txt"):
        RunWriter(tmp_path / "r", {}, overwrite=True)
    assert load_run(tmp_path / "r").manifest["seed"] == 9
    with pytest.raises(InputError, match="cannot be used"):
        RunWriter(tmp_path / "mine" / "notes.txt" / "r", {})
    with pytest.raises(InputError, match="no run of agentx in it"):
        load_run(tmp_path / "mine")
    with pytest.raises(InputError, match="no such folder"):
        load_run(tmp_path / "nowhere")


def test_damaged_and_newer_runs_are_told_plainly(tmp_path: Path) -> None:
    RunWriter(tmp_path / "r", {}).finish({})
    good = shutil.copy(tmp_path / "r" / CALLS, tmp_path / "good.parquet")
    (tmp_path / "r" / CALLS).write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        load_run(tmp_path / "r")
    atomic_write_table(tmp_path / "r" / CALLS, pa.table({"a": [1]}))
    with pytest.raises(InputError, match="lacks the columns session_id"):
        load_run(tmp_path / "r")
    wrong = pl.read_parquet(good).with_columns(pl.col("turn").cast(pl.Int64)).to_arrow()
    atomic_write_table(tmp_path / "r" / CALLS, wrong)
    with pytest.raises(InputError, match="turn is Int64, not Int32"):
        load_run(tmp_path / "r")
    (tmp_path / "r" / MANIFEST).write_text("[]")
    with pytest.raises(InputError, match="schema version None"):
        load_run(tmp_path / "r")
    (tmp_path / "r" / MANIFEST).write_text('{"schema_version": 99}')
    with pytest.raises(InputError, match="schema version 99"):
        load_run(tmp_path / "r")
    for wrong in ({"settings": 5}, {"window": {"a": 1}}, {"window": []}, {"server": "x"}, {"ended": True}):
        (tmp_path / "r" / MANIFEST).write_text(json.dumps({"schema_version": 1, **wrong}))
        with pytest.raises(InputError, match=f"{next(iter(wrong))} is "):
            load_run(tmp_path / "r")
    (tmp_path / "r" / MANIFEST).write_text('{"schema_version": 1, "settings": null, "deployment": null}')
    (tmp_path / "r" / CALLS).unlink()
    assert make_report(load_run(tmp_path / "r")).throughput is None


def full_disk(writer: RunWriter, more_bytes: int) -> None:
    """One flush of the writer while no file may grow beyond its journal's size and a little more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((writer.folder / JOURNAL).stat().st_size + more_bytes, hard))
    try:
        writer._flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def stopped_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunWriter:
    """A writer with one saved row, whose thread will not come round during the test."""
    monkeypatch.setattr(runs, "FLUSH_S", 60)
    writer = RunWriter(folder, {})
    writer.add(row(0, chunk_ns=list(range(5000))))
    writer._flush()
    assert writer.fault is None
    return writer


def test_a_disk_that_was_full_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = stopped_writer(tmp_path / "r", monkeypatch)
    writer.add(row(1, chunk_ns=list(range(5000))))
    full_disk(writer, 10_000)
    assert "File too large" in str(writer.fault)
    assert load_run(tmp_path / "r").calls["turn"].to_list() == [0]
    writer.add(row(2))
    assert writer.finish({}).calls["turn"].to_list() == [0, 1, 2]
    assert load_run(tmp_path / "r").complete


def test_a_disk_that_stays_full_is_one_error_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stopped_writer(tmp_path / "r", monkeypatch)

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_append", full)
    writer.add(row(1))
    with pytest.raises(InputError, match=r"can no longer be written.*No space left"):
        writer.finish({})
    assert load_run(tmp_path / "r").calls["turn"].to_list() == [0]


def test_a_failure_at_the_very_end_leaves_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = stopped_writer(tmp_path / "r", monkeypatch)

    def full(path: Path, *_: object, **__: object) -> None:
        raise InputError(f"{path}: cannot be written: No space left on device")

    writer.update(window={"start_ns": 0, "end_ns": 9})
    writer._flush()
    monkeypatch.setattr(runs.store, "atomic_write_table", full)
    with pytest.raises(InputError, match="No space left"):
        writer.finish({"reason": "window"})
    run = load_run(tmp_path / "r")
    assert (run.calls.height, run.complete) == (1, False)
    assert run.manifest["window"] == {"start_ns": 0, "end_ns": 9}


def test_batches_have_the_declared_schema() -> None:
    assert calls_batch([]).schema == CALLS_SCHEMA
    assert calls_batch([row(0, chunk_ns=[])]).to_pylist()[0]["chunk_ns"] == []
