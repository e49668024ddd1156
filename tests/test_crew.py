"""Lanes in several processes: the same plan, one clock, one table, whatever becomes of the processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from agentx.corpus import load_corpus
from agentx.crew import LANES_PER_WORKER, usual_workers
from agentx.echo import running_echo
from agentx.errors import InputError
from agentx.replay import ReplayOptions
from agentx.replay_live import replay_live, workers_of
from agentx.runs import Run, load_run
from agentx.target import LiveTarget
from tests.test_replay import corpus_of, options, quick_deployment, served, start_replay

S = 10**9


def planned(run: Run) -> Counter[tuple[object, ...]]:
    return Counter(run.calls.select("lane", "play", "session_id", "turn", "phase", "status").iter_rows())


def test_the_plan_and_the_ceilings_are_the_same_whatever_the_workers(tmp_path: Path) -> None:
    corpus = corpus_of("small")
    once = options(
        concurrency=7, duration_ns=60 * S, start_window=(0.5, 0.9), plays=1, think_cap_ns=0, self_check=False
    )
    runs = {}
    with running_echo() as url:
        for workers in (1, 3):
            chosen = ReplayOptions(**{**_fields(once), "workers": workers})
            runs[workers] = replay_live(corpus, LiveTarget(f"{url}/echo/2000/0"), chosen, tmp_path / str(workers))
    one, three = runs[1], runs[3]
    assert planned(one) == planned(three)
    assert set(planned(one).values()) == {1}
    key = ["lane", "play", "session_id", "turn", "ceiling_cached_tokens"]
    assert one.calls.select(key).equals(three.calls.select(key))
    assert three.manifest["client"]["workers"] == 3
    assert sorted(path.name for path in three.folder.iterdir()) == ["calls.parquet", "run.json"]
    sent = three.calls.filter(pl.col("sent_ns").is_not_null())
    warm = sent.filter(pl.col("phase") == "warmup")
    measured = sent.filter(pl.col("phase") == "measure")
    opened = three.manifest["window"]["start_ns"]
    assert warm["end_ns"].max() <= opened <= measured["sent_ns"].min()  # type: ignore[operator]
    assert warm["lane"].n_unique() == 7


def _fields(given: ReplayOptions) -> dict[str, object]:
    return {name: getattr(given, name) for name in given.__slots__}


def test_shared_blocks_have_their_ceiling_across_workers(shared: Path, tmp_path: Path) -> None:
    corpus = load_corpus(shared / "traces" / "kv-cache-tester" / "subagents" / "trace_0277.json")
    everything = options(
        concurrency=4, duration_ns=600 * S, start_window=None, plays=4, think_cap_ns=5_000_000, ramp_ns=0, workers=2,
        cache_bust=False,
    )  # fmt: skip
    with served(quick_deployment(tmp_path)) as url:
        run = replay_live(corpus, LiveTarget(url), everything, tmp_path / "r")
    assert run.calls["lane"].n_unique() == 4
    assert run.calls.height == 4 * corpus.n_turns
    cached, ceiling = run.calls["cached_tokens"], run.calls["ceiling_cached_tokens"]
    assert (cached <= ceiling).mean() > 0.8  # equal prompts sent within microseconds may arrive in the other order
    assert cached.sum() == pytest.approx(ceiling.sum(), rel=0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_workers(pid: int, folder: Path, n: int) -> list[int]:
    """The worker processes, once all have rows on the disk."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        parts = [folder / f"calls.{number}.arrow" for number in range(n)]
        if all(part.exists() and part.stat().st_size > 8000 for part in parts):
            return [child for child in children(pid) if b"agentx.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
        time.sleep(0.1)
    raise AssertionError("no worker wrote anything")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_an_interrupted_crew_drains_and_saves(tmp_path: Path, number: int, code: int) -> None:
    with running_echo() as url:
        process = start_replay(f"{url}/echo/50000/1000", tmp_path, "--workers", "2", "--duration", "60s")
        workers = wait_for_workers(process.pid, tmp_path / "r", 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert len(workers) == 2
    run = load_run(tmp_path / "r")
    assert run.complete
    assert run.manifest["ended"]["reason"] == "interrupted"
    assert "cancelled" not in set(run.calls["status"])
    assert set(planned(run).values()) == {1}


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_and_the_rest_is_saved(tmp_path: Path) -> None:
    with running_echo() as url:
        process = start_replay(f"{url}/echo/50000/1000", tmp_path, "--workers", "2", "--duration", "60s")
        victim, _ = wait_for_workers(process.pid, tmp_path / "r", 2)
        os.kill(victim, signal.SIGKILL)
        out, errors = process.communicate(timeout=30)
    assert "a worker process died" in out, errors
    assert "Traceback" not in errors
    assert process.returncode == 1
    run = load_run(tmp_path / "r")
    assert run.complete
    assert set(run.calls["lane"] % 2) == {0, 1}
    assert set(run.calls["error_kind"].drop_nulls()) >= {"stopped"}
    assert run.calls.select("lane", "play", "session_id", "turn").is_unique().all()


@pytest.mark.slow
def test_workers_save_when_the_main_process_is_killed(tmp_path: Path) -> None:
    with running_echo() as url:
        process = start_replay(f"{url}/echo/50000/1000", tmp_path, "--workers", "2", "--duration", "60s")
        workers = wait_for_workers(process.pid, tmp_path / "r", 2)
        process.kill()
        process.communicate(timeout=30)
        until = time.monotonic() + 15
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < until:
            time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    run = load_run(tmp_path / "r")
    assert not run.complete
    assert run.calls.filter(pl.col("status") == "ok").height > 10
    assert run.calls.select("lane", "play", "session_id", "turn").is_unique().all()


def test_workers_follow_the_lanes_unless_told() -> None:
    assert usual_workers(1) == usual_workers(LANES_PER_WORKER) == 1
    assert usual_workers(100 * LANES_PER_WORKER) == max(1, (os.cpu_count() or 1) // 2)
    assert workers_of(options(concurrency=2, workers=8)) == 2
    assert workers_of(options(concurrency=2, workers=None, idle_cap_ns=S)) == 1
    with pytest.raises(InputError, match="--workers 2 cannot go with --idle-cap"):
        workers_of(options(concurrency=2, workers=2, idle_cap_ns=S))
