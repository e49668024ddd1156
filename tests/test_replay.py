"""Whole replays: simulated ones are exact and repeatable, live ones survive what deployments do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from agentx import cli
from agentx.corpus import Corpus, load_corpus
from agentx.deployment import load_deployment
from agentx.errors import DeploymentError, InputError
from agentx.generate import as_corpus, generate
from agentx.profile import load_profile
from agentx.replay import ReplayOptions, replay_sim
from agentx.replay_live import replay_live
from agentx.report import make_report
from agentx.runs import CALLS, Run, load_run
from agentx.target import LiveTarget

S = 10**9
ROOT = Path(__file__).resolve().parent.parent


def corpus_of(name: str) -> Corpus:
    return as_corpus(*generate(load_profile(name)))


def options(**changes: object) -> ReplayOptions:
    values: dict[str, object] = {"concurrency": 16, "duration_ns": 900 * S, "seed": 42, "start_window": (0.9, 0.98)}
    return ReplayOptions(**{**values, **changes})  # type: ignore[arg-type]


def test_fifteen_minutes_of_small_take_seconds_and_are_the_same_twice(tmp_path: Path) -> None:
    corpus, deployment = corpus_of("small"), load_deployment("mi325x")
    started = time.monotonic()
    for name in ("one", "two"):
        replay_sim(corpus, deployment, options(), tmp_path / name)
    assert time.monotonic() - started < 2 * 10
    assert (tmp_path / "one" / CALLS).read_bytes() == (tmp_path / "two" / CALLS).read_bytes()
    run = load_run(tmp_path / "one")
    ok = run.calls.filter(pl.col("status") == "ok")
    assert ok.height > 1000
    assert (ok["cached_tokens"] == ok["ceiling_cached_tokens"]).all()
    assert (ok["sent_ns"] == ok["due_ns"]).all()
    start, end = run.manifest["window"]["start_ns"], run.manifest["window"]["end_ns"]
    assert end - start == 900 * S
    measured = ok.filter(pl.col("phase") == "measure")
    assert measured["end_ns"].max() <= end  # type: ignore[operator]
    assert measured["sent_ns"].min() >= start  # type: ignore[operator]


def test_the_context_gate_drops_counts_or_refuses(tmp_path: Path) -> None:
    corpus, deployment = corpus_of("conformance_512k"), load_deployment("mi325x")
    run = replay_sim(corpus, deployment, options(max_context=524_288, duration_ns=10 * S), tmp_path / "r")
    dropped = run.calls.filter(pl.col("error_kind") == "context_gate")
    assert dropped["root_session_id"].n_unique() == 300 - 298
    assert dropped.height == 6_917 - 6_663
    assert set(dropped["lane"]) == {-1}
    assert any("2 sessions (254 turns) do not fit" in doubt for doubt in (d.text for d in make_report(run).doubts))
    with pytest.raises(InputError, match="2 of 300 sessions need more than the context window of 524288"):
        replay_sim(corpus, deployment, options(max_context=524_288, strict_context=True), tmp_path / "s")
    with pytest.raises(InputError, match="300 of 300"):
        replay_sim(corpus, deployment, options(max_context=1000), tmp_path / "t")
    assert not (tmp_path / "s").exists()


def test_recorded_subagents_replay_in_order(shared: Path, tmp_path: Path) -> None:
    corpus = load_corpus(shared / "traces" / "kv-cache-tester" / "subagents")
    everything = options(concurrency=3, duration_ns=400_000 * S, start_window=None, plays=1)
    joins = in_order(corpus, replay_sim(corpus, load_deployment("mi325x"), everything, tmp_path / "r"))
    assert joins >= 5


def in_order(corpus: Corpus, run: Run) -> int:
    """Number of joins; every turn was sent once, spawns follow their parent's turn, joins wait for what they join."""
    sent = run.calls.filter(pl.col("sent_ns").is_not_null())
    assert sent.height == run.calls.height == corpus.n_turns
    assert set(sent["status"]) == {"ok"}
    times = {(row["session_id"], row["turn"]): row for row in sent.iter_rows(named=True)}
    joins = 0
    for tree in corpus.sessions:
        for stream in tree.streams[1:]:
            parent = tree.streams[stream.parent].session_id
            first, last = times[(stream.session_id, 0)], times[(stream.session_id, stream.n_turns - 1)]
            spawned = times[(parent, stream.spawn_turn)]
            pause = int(stream.think_ns[0])
            cap = run.manifest["settings"]["think_cap_ns"]
            assert first["due_ns"] == spawned["end_ns"] + (pause if cap is None else min(pause, cap))
            following = times.get((parent, stream.join_turn))
            if following is not None:
                assert first["sent_ns"] < following["sent_ns"]
                assert last["end_ns"] <= following["sent_ns"]
                joins += 1
    return joins


def test_plays_share_the_cache_only_when_asked_to(tmp_path: Path) -> None:
    profile = load_profile("small").model_copy(update={"sessions": 4})
    corpus, deployment = as_corpus(*generate(profile)), load_deployment("mi325x")
    hits = {}
    for bust in (True, False):
        run = replay_sim(
            corpus, deployment, options(concurrency=1, start_window=None, cache_bust=bust), tmp_path / str(bust)
        )
        again = run.calls.filter((pl.col("play") >= 1) & (pl.col("turn") == 0) & (pl.col("status") == "ok"))
        assert again.height >= 2
        assert (again["cached_tokens"] == again["ceiling_cached_tokens"]).all()
        hits[bust] = again["cached_tokens"].to_list()
    assert set(hits[True]) == {0}
    assert min(hits[False]) > 0


def agentx(*words: str, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentx", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **more.pop("env", {})},  # type: ignore[arg-type,dict-item]
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay"], "replay against what?"),
        (["replay", "--sim", "mi325x"], "replay what?"),
        (["replay", "--sim", "mi325", "--profile", "small"], "did you mean 'mi325x'?"),
        (["replay", "--sim", "mi325x", "--profile", "smal"], "did you mean 'small'?"),
        (
            ["replay", "--sim", "mi325x", "--profile", "small", "--duration", "soon"],
            "--duration: 'soon' is not a duration",
        ),
        (["replay", "--sim", "mi325x", "--profile", "small", "--start", "2,3"], "--start '2,3' is no window"),
        (["replay", "--sim", "mi325x", "--corpus", "nowhere"], "nowhere: no such file or folder"),
        (["replay", "--url", "x", "--profile", "small", "--cache-bust", "no"], "--cache-bust 'no' is not known"),
        (["replay", "--nonsense"], "No such option"),
        (
            ["replay", "--sim", "mi325x", "--profile", "small", "--retry", "429", "--prompt", "x"],
            "cannot go with --sim",
        ),
        (["replay", "--sim", "mi325x", "--profile", "small", "--concurrency", "0"], "greater than or equal to 1"),
        (["replay", "--sim", "mi325x", "--profile", "small", "--duration", "9999999999999999s"], "is over 36500 days"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["serve"], "serve what?"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_2(words: list[str], said: str, tmp_path: Path) -> None:
    got = agentx(*words, cwd=tmp_path)
    assert got.returncode == 2
    assert "Traceback" not in got.stderr
    assert said in got.stderr
    assert "hint: " in got.stderr


def test_a_deployment_that_is_not_there_is_exit_3(tmp_path: Path) -> None:
    got = agentx("replay", "--profile", "small", "--url", "http://127.0.0.1:9", "-o", "r", cwd=tmp_path)
    assert got.returncode == 3
    assert "error: http://127.0.0.1:9/v1/models: http://127.0.0.1:9 refuses connections" in got.stderr
    assert not (tmp_path / "r").exists()


def test_a_simulated_run_from_the_command_line_as_json(tmp_path: Path) -> None:
    got = agentx(
        "replay", "--profile", "small", "--sim", "mi325x", "--duration", "60s", "-o", "r", "--json", cwd=tmp_path
    )
    assert got.returncode == 0, got.stderr
    report = json.loads(got.stdout)
    assert report["headline"].startswith("Simulated deployment mi325x, virtual time")
    assert report == json.loads((tmp_path / "r" / "report.json").read_text())
    again = agentx("report", "r", "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == report


def quick_deployment(folder: Path) -> Path:
    """The shipped deployment, some hundred times faster."""
    quick = folder / "quick.yaml"
    text = (ROOT / "profiles" / "deployments" / "mi325x.yaml").read_text()
    for old, new in (("c0_s: 0.97 ", "c0_s: 0.05 "), ("k_s: 0.074", "k_s: 0.001"), ("tok_s: 4420", "tok_s: 442000")):
        assert old in text
        text = text.replace(old, new)
    quick.write_text(text)
    return quick


@contextlib.contextmanager
def served(deployment: Path | str, **environment: str) -> Iterator[str]:
    """The base URL of a simulated deployment in a process of its own."""
    server = subprocess.Popen(
        [sys.executable, "-m", "agentx", "serve", "--sim", str(deployment), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split(" on ")[1].strip()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        server.stdout.close()


def test_recorded_subagents_on_the_wire(shared: Path, tmp_path: Path) -> None:
    corpus = load_corpus(shared / "traces" / "kv-cache-tester" / "subagents" / "trace_0277.json")
    everything = options(
        concurrency=1, duration_ns=600 * S, start_window=None, plays=1, think_cap_ns=5_000_000, ramp_ns=0
    )
    with served(quick_deployment(tmp_path)) as url:
        run = replay_live(corpus, LiveTarget(url), everything, tmp_path / "r")
    assert in_order(corpus, run) >= 2
    assert (run.calls["cached_tokens"] == run.calls["ceiling_cached_tokens"]).all()


def test_the_served_simulation_is_replayed_live(tmp_path: Path) -> None:
    key = {"OPENAI_API_KEY": "sk-TESTONLY-0123456789"}
    words = ["--profile", "small", "--duration", "6s", "--think-cap", "100ms", "--concurrency", "8", "-o", "r"]
    with served(quick_deployment(tmp_path)) as url:
        got = agentx("replay", "--url", url, *words, cwd=tmp_path, env=key)
    assert got.returncode == 0, got.stderr
    run = load_run(tmp_path / "r")
    ok = run.calls.filter(pl.col("status") == "ok")
    assert ok.height > 30
    assert (ok["prompt_tokens"] == ok["planned_input_tokens"]).all()
    assert (ok["completion_tokens"] == ok["planned_output_tokens"]).all()
    assert (ok["cached_tokens"] == ok["ceiling_cached_tokens"]).all()
    facts = run.manifest["deployment"]
    assert (facts["model"], facts["max_model_len"], facts["cache_block"]) == ("moonshotai/Kimi-K3", 1_000_000, 64)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "r").iterdir()) + (got.stdout + got.stderr).encode()
    assert b"TESTONLY" not in stored


def start_replay(url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    words = [
        "replay",
        "--profile",
        "small",
        "--url",
        url,
        "--start",
        "none",
        "--no-self-check",
        "--no-canary",
        "-o",
        "r",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "agentx", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_killed_run_can_be_reported(tmp_path: Path) -> None:
    with served("mi325x") as url:
        process = start_replay(url, tmp_path, "--duration", "600s", "--concurrency", "32")
        time.sleep(16)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    got = agentx("report", "r", cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    assert "killed" in got.stdout
    run = load_run(tmp_path / "r")
    assert not run.complete
    assert run.calls.filter(pl.col("status") == "ok").height > 0
    assert run.calls.filter(pl.col("error_kind") == "killed").height > 0
    assert run.calls.filter(pl.col("sent_ns").is_not_null())["lane"].n_unique() == 32


def test_interrupting_a_live_run_saves_it(tmp_path: Path) -> None:
    with served("mi325x") as url:
        process = start_replay(url, tmp_path, "--concurrency", "4")
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted" in out
    assert "waiting for calls in flight" in err
    run = load_run(tmp_path / "r")
    assert run.manifest["ended"]["reason"] == "interrupted"
    assert run.calls.filter(pl.col("status") == "cancelled").height > 0


def test_usage_errors_do_not_escape() -> None:
    assert cli.run(["generate"]) == 2
    assert cli.run(["--version"]) == 0


def test_a_server_without_anything_special_still_works(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError):
        replay_live(corpus_of("small"), LiveTarget("http://127.0.0.1:9"), options(), tmp_path / "r")
