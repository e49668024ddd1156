"""Whatever the network, the disk or the server does: the run is readable and every planned turn stands once."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from agentx.corpus import Corpus
from agentx.echo import running_echo
from agentx.generate import as_corpus, generate
from agentx.profile import load_profile
from agentx.replay import ReplayOptions
from agentx.replay_live import replay_live
from agentx.report import make_report
from agentx.runs import Run, load_run
from agentx.target import LiveTarget
from tests.test_replay import agentx
from tests.test_target import answer_to
from tests.wire import Script, Step, serving

S = 10**9
ROOT = Path(__file__).resolve().parent.parent
EXPORT = "generate --profile conformance_512k --format weka -o r"


def small_corpus(sessions: int) -> Corpus:
    return as_corpus(*generate(load_profile("small").model_copy(update={"sessions": sessions})))


def replayed(folder: Path, corpus: Corpus, answer: Callable[[int, bytes], Script], options: ReplayOptions) -> Run:
    async def go() -> Run:
        async with serving(answer) as wire:
            return await asyncio.to_thread(replay_live, corpus, LiveTarget(wire.url), options, folder)

    return asyncio.run(asyncio.wait_for(go(), 90))


def every_turn_once(run: Run, corpus: Corpus) -> None:
    """Each planned turn of a corpus that is played once has one row, in the memory of the run and on the disk."""
    key = ["session_id", "turn", "play"]
    assert run.calls.height == corpus.n_turns
    assert run.calls.select(key).is_unique().all()
    assert load_run(run.folder).calls.select(key).equals(run.calls.select(key))


@pytest.mark.parametrize("bytes_before", [0, 120])
def test_a_tenth_of_the_calls_reset_costs_those_calls_only(tmp_path: Path, bytes_before: int) -> None:
    corpus = small_corpus(40)
    posts = 0

    def answer(number: int, request: bytes) -> Script:
        nonlocal posts
        good = answer_to(request)
        if not request.startswith(b"POST"):
            return good
        posts += 1
        if posts % 10 == 0:
            return Script([Step(0, good.steps[0].data[:bytes_before])], "reset")
        return good

    options = ReplayOptions(8, 60 * S, 1, plays=1, think_cap_ns=0, ramp_ns=0, self_check=False, canary=False)
    run = replayed(tmp_path / "r", corpus, answer, options)
    every_turn_once(run, corpus)
    failed, resent = run.calls.filter(pl.col("status") == "error"), run.calls.filter(pl.col("attempts") == 2)
    assert set(run.calls["status"]) == {"ok", "error"}
    assert set(failed["error_kind"]) == {"reset"}
    report = make_report(run)
    assert report.outcomes.error_rate == pytest.approx(failed.height / corpus.n_turns)
    if bytes_before:
        assert (failed.height, resent.height) == (pytest.approx(corpus.n_turns / 10, abs=1), 0)
        assert "errors" in [doubt.kind for doubt in report.doubts]
    else:  # a kept-alive connection that goes before any byte is tried once more, as if it had been idle too long
        assert failed.height + resent.height == pytest.approx(corpus.n_turns / 9, abs=2)
        assert "ok" in set(resent["status"])
        assert resent["connection_reused"].not_().all()


def test_a_server_that_stops_answering_is_cut_and_counted(tmp_path: Path) -> None:
    corpus = small_corpus(12)
    posts = 0

    def answer(number: int, request: bytes) -> Script:
        nonlocal posts
        posts += request.startswith(b"POST")
        return answer_to(request) if posts < 12 else Script([Step(60, b"")])

    options = ReplayOptions(
        4, 2 * S, 1, plays=1, grace_ns=S // 2, think_cap_ns=0, ramp_ns=0, self_check=False, canary=False
    )
    run = replayed(tmp_path / "r", corpus, answer, options)
    assert run.calls.select("session_id", "turn").is_unique().all()
    assert run.calls.filter(pl.col("status") == "cancelled")["lane"].sort().to_list() == [0, 1, 2, 3]
    assert {"ok", "cancelled", "skipped"} >= set(run.calls["status"])


@pytest.mark.parametrize("comes_back", [True, False])
def test_silence_is_told_with_what_was_in_flight_and_what_the_canary_says(tmp_path: Path, comes_back: bool) -> None:
    corpus = small_corpus(12)
    posts = 0

    def answer(number: int, request: bytes) -> Script:
        nonlocal posts
        posts += request.startswith(b"POST")
        if comes_back and b'"max_tokens":1,' in request:
            return answer_to(request)
        return answer_to(request) if posts < 20 else Script([Step(60, b"")])

    def canary(number: int, request: bytes) -> Script:
        return (
            Script([], "reset")
            if not comes_back and posts >= 24 and request.startswith(b"POST")
            else answer(0, request)
        )

    options = ReplayOptions(4, 60 * S, 1, stall_ns=S, think_cap_ns=0, ramp_ns=0, self_check=False)
    run = replayed(tmp_path / "r", corpus, canary, options)
    assert run.manifest["ended"]["reason"] == "stalled"
    (stalled, *_) = make_report(run).doubts
    assert stalled.kind == "stalled"
    assert "for 1.00 s no byte came on any of 4 calls in flight" in stalled.text
    assert ("The canary after it: passes." in stalled.text) is comes_back
    assert run.calls.select("session_id", "turn", "play").is_unique().all()


def test_a_server_that_accepts_and_never_answers_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        started = time.monotonic()
        got = agentx("replay", "--profile", "small", "--url", url, "-o", "r", cwd=tmp_path)
    assert time.monotonic() - started < 20
    assert got.returncode == 3
    assert f"error: {url}/v1/models: no answer within 10 s\nhint: check --url" in got.stderr
    assert not (tmp_path / "r").exists()


def test_interrupted_while_the_servers_counters_are_read_is_saved(tmp_path: Path) -> None:
    looks = 0

    def answer(number: int, request: bytes) -> Script:
        nonlocal looks
        looks += request.startswith(b"GET /metrics")
        return Script([Step(60, b"")]) if looks == 2 and b"/metrics" in request[:20] else answer_to(request)

    async def go() -> tuple[int, str]:
        async with serving(answer) as wire:
            words = ["replay", "--profile", "small", "--url", wire.url, "-o", "r", "--no-self-check", "--no-canary"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agentx", *words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            while looks < 2:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
            assert process.returncode is not None
            return process.returncode, errors.decode()

    code, errors = asyncio.run(asyncio.wait_for(go(), 60))
    assert (code, "Traceback" in errors) == (130, False)
    run = load_run(tmp_path / "r")
    assert run.complete
    assert run.manifest["ended"]["reason"] == "interrupted"
    assert run.calls.filter(pl.col("sent_ns").is_not_null()).height == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("words", "delay_s"), [("replay --profile small --url DEAF -o r", 2.5), (EXPORT, 2.0)])
def test_ended_before_anything_was_measured_leaves_nothing(
    tmp_path: Path, words: str, delay_s: float, number: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        command = [sys.executable, "-m", "agentx", *words.replace("DEAF", url).split()]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(delay_s)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert {path.name for path in tmp_path.iterdir()} <= {"corpora"}


def test_lanes_live_on_when_the_server_was_away(tmp_path: Path) -> None:
    corpus = small_corpus(40)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stop = threading.Event()

    def serve() -> None:
        """A server that is up, away for a second, and up again."""
        for up_s, away_s in ((2.5, 1.0), (20.0, 0.0)):
            process = subprocess.Popen(
                [sys.executable, "-m", "agentx.echo", str(port)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            stop.wait(up_s)
            process.kill()
            process.communicate()
            stop.wait(away_s)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        time.sleep(1.0)
        options = ReplayOptions(6, 8 * S, 1, think_cap_ns=0, ramp_ns=0, self_check=False, canary=False)
        run = replay_live(corpus, LiveTarget(f"http://127.0.0.1:{port}/echo/20000/100"), options, tmp_path / "r")
    finally:
        stop.set()
        thread.join()
    failed = run.calls.filter(pl.col("status") == "error")
    assert set(failed["error_kind"]) <= {"refused", "reset", "closed"}
    assert "refused" in set(failed["error_kind"])
    latest = failed["end_ns"].max()
    alive = run.calls.filter((pl.col("status") == "ok") & (pl.col("sent_ns") > latest))
    assert alive["lane"].n_unique() == 6
    assert run.calls.select("lane", "play", "session_id", "turn").is_unique().all()
    assert make_report(run).error_kinds["refused"] == failed.filter(pl.col("error_kind") == "refused").height


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_and_what_was_saved_is_read(tmp_path: Path) -> None:
    with running_echo() as url:
        script = (
            "import resource, signal, sys\n"
            "from agentx.cli import run\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))\n"
            "sys.exit(run(sys.argv[1:]))\n"
        )
        words = [
            "replay",
            "--profile",
            "small",
            "--url",
            f"{url}/echo/1000/100",
            "--concurrency",
            "16",
            "--start",
            "none",
        ]
        words += ["--think-cap", "1ms", "--duration", "60s", "--no-self-check", "--no-canary", "-o", "r"]
        got = subprocess.run(
            [sys.executable, "-c", script, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert got.returncode == 2, got.stderr
    assert "error: r: the run can no longer be written: [Errno 27] File too large" in got.stderr
    assert "Traceback" not in got.stderr
    run = load_run(tmp_path / "r")
    assert not run.complete
    assert run.calls.filter(pl.col("status") == "ok").height > 10
    assert agentx("report", "r", cwd=tmp_path).returncode == 0


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("/proc/nowhere/r", "file/r"):
        got = agentx("replay", "--profile", "small", "--sim", "mi325x", "-o", place, cwd=tmp_path)
        assert got.returncode == 2
        assert f"error: {place}: cannot be used" in got.stderr
    assert (tmp_path / "file").read_text() == "mine"


WALL_CLOCK = {
    *(("time", name) for name in ("time", "time_ns", "strftime", "gmtime", "localtime")),
    *(("datetime", name) for name in ("now", "utcnow", "today")),
}


def test_no_time_is_taken_from_the_wall_clock() -> None:
    """A step of the wall clock cannot move a figure: it is read for the name and the date of a run only."""
    found = set()
    for path in sorted((ROOT / "agentx").rglob("*.py")):
        name = path.relative_to(ROOT / "agentx").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if named and (node.value.id, node.attr) in WALL_CLOCK:  # type: ignore[attr-defined]
                found.add((name, node.attr))  # type: ignore[attr-defined]
    assert found == {
        ("cli/replay.py", "strftime"),  # the name of a run folder
        ("replay.py", "gmtime"),  # when a run started
        ("replay.py", "strftime"),
        ("sim/server.py", "time"),  # `created` of an answer
    }
