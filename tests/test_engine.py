"""The truth from a real engine: llama.cpp serves exactly what the ceiling says, and nothing fails on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("xllamacpp", reason="the extra `engine` is not installed")

from agentx.corpus import Corpus, load_corpus
from agentx.engines.tiny import running_tiny
from agentx.generate import as_corpus, generate
from agentx.profile import load_profile
from agentx.replay import ReplayOptions
from agentx.replay_live import replay_live
from agentx.report import make_report
from agentx.runs import Run
from agentx.target import LiveTarget

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.xdist_group("engine")]

S = 10**9
TRACES = ("trace_0026", "trace_0057", "trace_0460")
TURNS = {"trace_0026": 3, "trace_0057": 8, "trace_0460": 12}


@pytest.fixture(scope="module")
def recorded(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("traces")
    for name in TRACES:
        shutil.copy(shared / "traces" / "kv-cache-tester" / "ci" / f"{name}.json", folder)
    return load_corpus(folder)


def one_at_a_time(recorded: Corpus, target: LiveTarget, out: Path) -> pl.DataFrame:
    """The calls of the first play of every trace, sent one after another without think time."""
    options = ReplayOptions(concurrency=1, duration_ns=600 * S, seed=1, think_cap_ns=0, ramp_ns=0, plays=1)
    run = replay_live(recorded, target, options, out)
    first = run.calls.filter(pl.col("status") == "ok")
    assert dict(first.group_by("session_id").len().iter_rows()) == TURNS
    return first


def test_cached_tokens_equal_the_ceiling_to_the_token(recorded: Corpus, tmp_path: Path) -> None:
    with running_tiny(slots=1, context=32768) as url:
        calls = one_at_a_time(recorded, LiveTarget(url, endpoint="completions", prompt="token-ids"), tmp_path / "r")
    assert calls["prompt_tokens"].to_list() == calls["planned_input_tokens"].to_list()
    assert calls["cached_tokens"].to_list() == calls["ceiling_cached_tokens"].to_list()
    assert calls["cached_tokens"].sum() > 0.7 * calls["prompt_tokens"].sum()


def test_chat_reaches_the_ceiling_within_its_template(recorded: Corpus, tmp_path: Path) -> None:
    with running_tiny(slots=1, context=32768) as url:
        calls = one_at_a_time(recorded, LiveTarget(url), tmp_path / "r")
    template = 10  # tokens of the tiny model's ChatML around one message
    assert calls["prompt_tokens"].to_list() == calls["planned_input_tokens"].to_list()
    assert (calls["cached_tokens"] - calls["ceiling_cached_tokens"]).abs().max() <= template  # type: ignore[operator]


def test_sixteen_lanes_complete_without_an_error(tmp_path: Path) -> None:
    corpus = as_corpus(*generate(load_profile("small")))
    options = ReplayOptions(16, 10 * S, 42, start_window=(0.9, 0.98), think_cap_ns=S, drain=True)
    with running_tiny(slots=16, context=8192) as url:
        run: Run = replay_live(corpus, LiveTarget(url), options, tmp_path / "r")
    sent = run.calls.filter(pl.col("sent_ns").is_not_null())
    assert set(sent["status"]) == {"ok"}, sent.filter(pl.col("status") != "ok").select("status", "error_message").rows()
    assert sent["lane"].n_unique() == 16
    assert (sent["prompt_tokens"] == sent["planned_input_tokens"]).all()
    assert (sent["completion_tokens"] == sent["planned_output_tokens"]).all()
    report = make_report(run)
    assert report.cache.n_reporting == report.cache.n
    assert {kind: count.server - count.client for kind, count in report.audit.server.items()} == {
        "prompt": 0,
        "output": 0,
    }
    assert run.manifest["deployment"]["prompt_exact"] is True


def test_a_context_refusal_is_overflow(tmp_path: Path) -> None:
    profile = load_profile("small").model_copy(update={"sessions": 20})
    corpus = as_corpus(*generate(profile))
    options = ReplayOptions(2, 3 * S, 1, max_context=None, cache_bust=True)
    with running_tiny(slots=2, context=2048) as url:
        run = replay_live(corpus, LiveTarget(url), options, tmp_path / "r")
    dropped = run.calls.filter(pl.col("error_kind") == "context_gate")
    assert dropped.height > 0
    assert run.manifest["deployment"]["max_model_len"] == 2048
    assert run.calls.filter(pl.col("status") == "error").height == 0


def test_the_tiny_engine_ends_when_it_is_told_to() -> None:
    command = [sys.executable, "-m", "agentx", "serve", "--tiny", "--port", "0", "--slots", "1", "--context", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving tiny on http://127.0.0.1:")
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()
