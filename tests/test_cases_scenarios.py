"""The public bug reports that are schedules and scenarios, and their siblings."""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import uvloop

from agentx import metrics, stats
from agentx.call import Call
from agentx.capacity import fit_decode
from agentx.corpus import load_corpus
from agentx.descriptors import RESERVE, make_room
from agentx.endpoint import Endpoint
from agentx.errors import InputError
from agentx.generate import as_corpus, generate
from agentx.http import HttpClient
from agentx.lanes import Lanes, LaneSettings
from agentx.live import LiveSettings
from agentx.profile import load_profile
from agentx.replay import ReplayOptions
from agentx.replay_live import replay_live
from agentx.report import make_report
from agentx.target import LiveTarget
from agentx.turns import CallRow, SessionTree, calls_batch
from agentx.units import NS_PER_S as S
from tests.cases import expected, inputs
from tests.conftest import ROOT as CHECKOUT
from tests.test_http import one
from tests.test_live import replay, stream
from tests.test_replay import agentx
from tests.test_target import answer_to
from tests.wire import Script, Step, delta, head, serving, sse


def plan(
    sessions: list[SessionTree], lanes: int, service: Callable[[Call], int], settings: LaneSettings | None = None
) -> list[tuple[Call, int]]:
    """(call, start) of every call under a virtual clock, each session played once."""
    machine = Lanes(sessions, settings or LaneSettings(lanes, 10_000 * S, 0, plays=1), lambda row: None)
    machine.begin(0)
    now, found = 0, []
    running: list[tuple[int, int, Call]] = []
    while not machine.finished:
        while call := machine.take(now):
            found.append((call, now))
            heapq.heappush(running, (now + service(call), len(found), call))
        due = machine.next_due_ns()
        now = min(([running[0][0]] if running else []) + ([due] if due is not None else []))
        while running and running[0][0] <= now:
            machine.ended(heapq.heappop(running)[2], now, "ok")
    return found


# G: think time and schedule


def test_g01_think_time_is_a_pause_not_a_start_to_start_gap(shared: Path) -> None:
    right = expected(shared, "G01")
    corpus = load_corpus(shared / "cases" / "inputs" / "G01.trace.json")
    service = round(inputs(shared, "G01.scenario.json")["live_service_s"] * S)
    (tree,) = corpus.sessions
    assert [None, *(think / S for think in tree.streams[0].think_ns[1:])] == right["think_s"]
    starts = [start / S for _, start in plan([tree], 1, lambda call: service)]
    assert starts == right["starts_s"]
    assert starts != right["must_not_be"]["starts_s"]


@pytest.mark.parametrize("service_s", [0.0, 0.5, 60.0])
def test_g01_siblings_the_pause_is_the_recorded_one_however_long_the_calls_take(shared: Path, service_s: float) -> None:
    corpus = load_corpus(shared / "cases" / "inputs" / "G01.trace.json")
    starts = [start / S for _, start in plan(list(corpus.sessions), 1, lambda call: round(service_s * S))]
    assert np.diff(starts).tolist() == [2.0 + service_s, 3.0 + service_s]


def test_g04_lateness_and_response_count_from_the_intended_start(shared: Path) -> None:
    scene, right = inputs(shared, "G04.schedule.json"), expected(shared, "G04")
    rows = [
        replace(row_at(number), due_ns=round(due * S), sent_ns=round(sent * S), end_ns=round((sent + service) * S))
        for number, (due, sent, service) in enumerate(
            zip(scene["intended_start_s"], right["actual_start_s"], scene["service_s"], strict=True)
        )
    ]
    good = metrics.measured(pl.from_arrow(calls_batch(rows)))  # type: ignore[arg-type]
    assert (good["lag_ns"] / S).round(6).to_list() == right["lag_s"]
    assert (good["response_ns"] / S).round(6).to_list() == right["response_s"]
    assert stats.percentile(metrics.column(good, "response_ns"), 0.5) == right["response_p50_s"] * S
    assert stats.percentile(metrics.column(good, "e2e_ns"), 0.5) == right["service_p50_s"] * S
    assert (good["lag_ns"] > 0).sum() == right["n_late"]


@pytest.mark.xfail(reason="arrivals: starts of a fixed schedule", strict=True, raises=TypeError)
def test_g04_a_fixed_schedule_keeps_its_intended_starts(shared: Path) -> None:
    scene, right = inputs(shared, "G04.schedule.json"), expected(shared, "G04")
    tree = SessionTree("s", 0, (stream("s", [0] * 5),))
    due = [round(start * S) for start in scene["intended_start_s"]]
    settings = LaneSettings(scene["lanes"], 100 * S, 0, plays=1, starts_ns=due)  # type: ignore[call-arg]
    calls = plan([tree], 1, lambda call: round(scene["service_s"][call.turn] * S), settings)
    assert [start / S for _, start in calls] == right["actual_start_s"]
    assert [(start - call.due_ns) / S for call, start in calls] == right["lag_s"]


def row_at(turn: int) -> CallRow:
    return CallRow(
        session_id="s", turn=turn, play=0, lane=0, parent_session_id=None, root_session_id="s", status="ok",
        planned_input_tokens=10, planned_output_tokens=1, think_ns=0, phase="measure", sent_ns=0, end_ns=1,
    )  # fmt: skip


# J: retries


def test_j01_a_refused_call_counts_from_its_first_attempt(shared: Path) -> None:
    attempts, right = inputs(shared, "J01.attempts.json"), expected(shared, "J01")

    def answer(number: int, request: bytes) -> Script:
        attempt = attempts[number]
        if attempt["status"] == 429:
            wait = attempt["retry_after_s"]
            return Script([Step(0, head("429 Too Many Requests", f"Retry-After: {wait}", "Content-Length: 0"))])
        return sse(delta("a"), delta("b", "stop"), "[DONE]", at_s=attempt["first_token_at_s"] - attempt["at_s"])

    live = LiveSettings(20 * S, retry=frozenset({429}))
    tree = SessionTree("s", 0, (stream("s", [0]),))
    (row,), wire, _ = replay([tree], answer, LaneSettings(1, 15 * S, 0, plays=1), live)
    assert (row.attempts, len(wire.requests), row.http_status) == (right["attempts"], 3, right["status_codes"][-1])
    assert row.first_token_ns is not None
    assert row.sent_ns is not None
    assert row.last_sent_ns is not None
    near = {"abs": 50}
    assert (row.first_token_ns - row.last_sent_ns) / 1e6 == pytest.approx(right["ttft_last_attempt_ms"], **near)
    assert (row.first_token_ns - row.sent_ns) / 1e6 == pytest.approx(right["ttft_from_first_attempt_ms"], **near)
    assert (row.last_sent_ns - row.sent_ns) / 1e6 == pytest.approx(right["retry_wait_ms"], **near)


# N: network and client


@pytest.mark.parametrize("think_parts", [None, (0.5, 0.5), (0.499, 0.501)])
def test_n01_a_server_that_closes_idle_connections_is_no_error(
    shared: Path, think_parts: tuple[float, float] | None
) -> None:
    scene, right = inputs(shared, "N01.scenario.json"), expected(shared, "N01")
    idle_close_s = scene["server_idle_close_s"] / 10
    thinks = think_parts or [think / 10 for think in scene["lane_think_s"]]

    async def go() -> tuple[list[dict[str, Any]], int, int]:
        async with serving(lambda n, r: sse(delta("a", "stop"), "[DONE]"), idle_close_s=idle_close_s) as wire:
            client = HttpClient(Endpoint.parse(wire.url), time.monotonic_ns)
            rows = [await one(client)]
            for think in thinks:
                await asyncio.sleep(think)
                rows.append(await one(client))
            client.close()
            return rows, len(wire.requests), wire.connections

    rows, requests, connections = uvloop.run(asyncio.wait_for(go(), 20))
    assert (requests, sum(row["status"] != "ok" for row in rows)) == (right["requests"], right["errors"])
    assert sum(row["attempts"] - 1 for row in rows) <= len(thinks) * right["stale_socket_resends_max"]
    if think_parts is None:
        assert connections in right["connections_opened"]
        assert sum(row["attempts"] - 1 for row in rows) <= right["stale_socket_resends_max"]


def test_n04_lanes_over_the_descriptor_limit_are_made_room_for_or_refused(shared: Path) -> None:
    scene, right = inputs(shared, "N04.scenario.json"), expected(shared, "N04")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (scene["ulimit_n_soft"], before[1]))
        make_room(scene["lanes"])
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= right["needed_min"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    script = (
        "import resource\n"
        "from agentx.descriptors import make_room\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({scene['ulimit_n_soft']}, {scene['ulimit_n_hard']}))\n"
        f"make_room({scene['lanes']})\n"
    )
    refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert f"need {scene['lanes'] + RESERVE} file descriptors, this process may have 256" in refused.stderr


def certificate(folder: Path, names: str) -> ssl.SSLContext:
    """A server's context with a fresh self-signed certificate for these names, left in `folder`."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def replayed(folder: Path, tls: ssl.SSLContext | None, host: str, **target: Any) -> Any:
    """A short live replay of `small` against a scripted server; the run folder is `folder`."""
    corpus = as_corpus(*generate(load_profile("small").model_copy(update={"sessions": 4})))
    options = ReplayOptions(2, 20 * S, 1, plays=1, think_cap_ns=0, ramp_ns=0, self_check=False)

    async def go() -> Any:
        async with serving(lambda n, r: answer_to(r), host=host, tls=tls) as wire:
            return await asyncio.to_thread(replay_live, corpus, LiveTarget(wire.url, **target), options, folder)

    return asyncio.run(asyncio.wait_for(go(), 60))


def test_n06_an_untrusted_certificate_is_told_at_once_and_insecure_is_recorded(shared: Path, tmp_path: Path) -> None:
    right = expected(shared, "N06")
    tls = certificate(tmp_path, "DNS:localhost,IP:127.0.0.1")

    async def refused() -> tuple[dict[str, Any], subprocess.CompletedProcess[str], float]:
        async with serving(lambda n, r: answer_to(r), tls=tls) as wire:
            client = HttpClient(Endpoint.parse(wire.url), time.monotonic_ns)
            row = await one(client)
            client.close()
            started = time.monotonic()
            words = ("replay", "--profile", "small", "--url", wire.url, "-o", "r")
            got = await asyncio.to_thread(agentx, *words, cwd=tmp_path)
            return row, got, time.monotonic() - started

    row, got, took = asyncio.run(asyncio.wait_for(refused(), 60))
    assert row["error_kind"] == right["error_class"]
    assert got.returncode == 3
    assert right["message_mentions"] in got.stderr
    assert "--ca" in got.stderr
    assert took < right["seconds_until_exit_max"]
    run = replayed(tmp_path / "insecure", tls, "127.0.0.1", insecure=True)
    report = make_report(run)
    assert run.manifest["deployment"]["tls_insecure"] is right["insecure_flag"]["recorded_in_results"]
    assert "tls_insecure" in [doubt.kind for doubt in report.doubts]
    assert set(run.calls["status"]) == {"ok"}


def test_n06_siblings_a_trusted_certificate_and_one_of_another_name(tmp_path: Path) -> None:
    tls = certificate(tmp_path, "DNS:localhost,IP:127.0.0.1")
    run = replayed(tmp_path / "trusted", tls, "127.0.0.1", ca=tmp_path / "cert.pem")
    assert set(run.calls["status"]) == {"ok"}
    assert "tls_insecure" not in [doubt.kind for doubt in make_report(run).doubts]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(Exception, match=r"certificate of https://127.0.0.1:[0-9]+ is not trusted: .*mismatch"):
        replayed(other / "r", certificate(other, "DNS:elsewhere.invalid"), "127.0.0.1", ca=other / "cert.pem")
    with pytest.raises(Exception, match=r"no connection .TCP, or its TLS handshake. within 10 s"):
        plain_behind_https(tmp_path / "plain")


def plain_behind_https(folder: Path) -> None:
    corpus = as_corpus(*generate(load_profile("small").model_copy(update={"sessions": 4})))

    async def go() -> None:
        async with serving(lambda n, r: answer_to(r)) as wire:
            url = wire.url.replace("http:", "https:")
            options = ReplayOptions(1, S, 1, self_check=False)
            await asyncio.to_thread(replay_live, corpus, LiveTarget(url), options, folder)

    asyncio.run(asyncio.wait_for(go(), 30))


def test_ipv6_deployments_are_replayed(tmp_path: Path) -> None:
    run = replayed(tmp_path / "r", None, "::1")
    assert set(run.calls["status"]) == {"ok"}
    assert run.manifest["deployment"]["name"].startswith("[::1]:")


# O: the decode law


def test_o01_one_output_length_is_no_fit(shared: Path) -> None:
    lengths, walls = zip(*inputs(shared, "O01.fit.json")["points"], strict=True)
    found, right = fit_decode(lengths, walls), expected(shared, "O01")
    assert (found.c0_ms, found.k_ms, found.reason) == (right["C0_ms"], right["k_ms_per_token"], right["reason"])
    assert found.mean_wall_ms == right["mean_wall_ms"]


def test_o03_the_fit_is_over_produced_tokens(shared: Path) -> None:
    rows, right = inputs(shared, "O03.fit.json")["rows"], expected(shared, "O03")
    found = fit_decode([row["completion_tokens"] for row in rows], [row["wall_ms"] for row in rows])
    assert (found.c0_ms, found.k_ms) == pytest.approx((right["C0_ms"], right["k_ms_per_token"]))
    assert found.n == right["n"]


@pytest.mark.parametrize(
    ("lengths", "walls", "reason", "mean"),
    [([], [], "no_samples", None), ([None], [5.0], "no_samples", None), ([7], [5.0], "osl_constant", 5.0)],
)
def test_o_siblings_nothing_to_fit_is_told(
    lengths: list[int | None], walls: list[float], reason: str, mean: float | None
) -> None:
    found = fit_decode(lengths, walls)
    assert (found.reason, found.k_ms, found.mean_wall_ms) == (reason, None, mean)


@pytest.mark.parametrize(("lengths", "walls"), [([1], []), ([1, 2], [1.0, float("nan")]), ([1, 2], [1.0, -1.0])])
def test_o_siblings_bad_samples_are_refused(lengths: list[int], walls: list[float]) -> None:
    with pytest.raises(InputError):
        fit_decode(lengths, walls)


# P: determinism; the seed across processes is in test_generate


def test_p01_siblings_no_global_generator_is_touched_and_none_matters() -> None:
    profile = load_profile("small")

    def made(seed: int) -> bytes:
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]
        corpus = as_corpus(*generate(profile))
        calls = plan(list(corpus.sessions), 3, lambda call: S)
        after = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]
        assert before == after
        starts = [(call.lane, call.session_id, call.turn, start) for call, start in calls]
        return corpus.digest.encode() + repr(starts).encode()

    assert made(1) == made(2)


# U: tokenizers


def test_u01_a_prompt_that_grows_on_the_server_is_told_with_its_difference(shared: Path) -> None:
    (case,) = inputs(shared, "U01.usage.jsonl")
    right, usage = expected(shared, "U01"), case["usage"]
    row = replace(
        row_at(0), planned_input_tokens=case["planned_in"], planned_output_tokens=case["planned_out"],
        prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"],
    )  # fmt: skip
    good = metrics.measured(pl.from_arrow(calls_batch([row])))  # type: ignore[arg-type]
    assert good["input_error_tokens"].to_list() == [right["diff"]]
    length = metrics.lengths(good)["input"]
    assert (length.planned, length.achieved, length.worst) == (
        right["planned_in"],
        right["server_prompt_tokens"],
        right["diff"],
    )
    assert 100 * (length.achieved - length.planned) / length.planned == right["diff_pct"]
    assert (length.achieved + case["planned_out"] <= case["max_model_len"]) is right["fits"]


# W: platform and robustness


def test_w03_a_full_disk_is_an_error_and_the_old_file_stays(shared: Path, tmp_path: Path) -> None:
    scene, right = inputs(shared, "W03.scenario.json"), expected(shared, "W03")
    target = tmp_path / "report.json"
    target.write_text(scene["existing_file"], encoding="utf-8")
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from agentx import store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "store.atomic_write_json(Path(sys.argv[1]), {'run': 'x' * 684032})\n"
    )
    got = subprocess.run([sys.executable, "-c", script, str(target)], capture_output=True, timeout=30, check=False)
    assert (got.returncode != 0) is right["exit_code_nonzero"]
    assert (target.read_text(encoding="utf-8") == scene["existing_file"]) is right["old_file_intact"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_w03_sibling_output_that_cannot_be_printed_is_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        got = subprocess.run(
            [sys.executable, "-m", "agentx", "generate", "--profile", "small", "-o", "c"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert got.returncode != 0
    assert "Traceback" not in got.stderr
