"""The instrument measures itself: the echo tells the truth, and the client's budget is small and plain."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from agentx import watch as watch_module
from agentx.crew import checked
from agentx.descriptors import RESERVE, make_room
from agentx.echo import running_echo
from agentx.endpoint import Endpoint
from agentx.errors import InputError
from agentx.http import HttpClient
from agentx.selfcheck import TOKENS, check_client
from agentx.watch import LoopWatch
from tests.test_replay import agentx

ROOT = Path(__file__).resolve().parent.parent
MS = 1_000_000


def test_the_echo_says_when_it_sent(tmp_path: Path) -> None:
    async def go(url: str) -> list[int]:
        client = HttpClient(Endpoint.parse(f"{url}/echo/30000/5000"), time.monotonic_ns)
        exchange = await client.fetch("/v1/chat/completions", b'{"max_tokens":4,"messages":[]}', 10)
        client.close()
        assert exchange.status == 200
        sent = [int(stamp) for stamp in re.findall(rb'"sent_ns":"(\d+)"', exchange.content())]
        assert exchange.sent_ns is not None
        assert exchange.end_ns is not None
        assert exchange.sent_ns + 30 * MS <= sent[0] <= sent[-1] <= exchange.end_ns
        early = [at for k, at in enumerate(sent) if at < exchange.sent_ns + (30 + 5 * k) * MS]
        assert early == []  # a busy machine may send late, never before it is due
        return sent

    with running_echo() as url:
        sent = uvloop.run(go(url))
    assert len(sent) == 4
    assert sent == sorted(sent)


def test_the_budget_is_measured_and_never_better_than_the_truth() -> None:
    budget = uvloop.run(check_client(8, 1000, check_ns=1_000 * MS))
    assert budget is not None
    assert budget.n >= 8
    assert (budget.lanes, budget.input_tokens) == (8, 1000)
    assert 0 < budget.ttft_bias_ns < 50 * MS
    assert abs(budget.ttft_bias_ns) <= budget.ttft_p99_ns
    assert abs(budget.itl_bias_ns) <= budget.itl_p99_ns
    assert TOKENS >= 2


def test_doctor_says_pass_or_fail(tmp_path: Path) -> None:
    got = agentx("doctor", "--concurrency", "4", "--json", cwd=tmp_path)
    found = json.loads(got.stdout)
    assert got.returncode == (0 if found["good"] else 1)
    assert found["client_budget"]["n"] > 4


def test_doctor_checks_workers_together(tmp_path: Path) -> None:
    budget = uvloop.run(checked(2, 5, 100))
    assert budget is not None
    assert (budget.lanes, budget.input_tokens) == (5, 100)
    assert budget.n >= 15


def test_stalls_and_collections_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "COLLECT_S", 0.1)

    async def go() -> dict:
        watch = LoopWatch()
        watch.start()
        await asyncio.sleep(0.6)
        time.sleep(0.2)
        await asyncio.sleep(0.1)
        watch.stop()
        return watch.facts()

    facts = uvloop.run(go())
    assert facts["loop_stall_ns"]["n"] > 10
    assert facts["loop_stall_ns"]["max"] > 100 * MS
    assert facts["gc_pause_ns"]["n"] >= 1


def test_descriptors_are_raised_or_refused_with_both_numbers() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        make_room(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300 + RESERVE
        too_many = before[1] + 1
        with pytest.raises(InputError, match=f"{too_many} connections need {too_many + RESERVE} file descriptors"):
            make_room(too_many)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_transport_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "transport.py"), "--quick"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert len(done.stdout.splitlines()) == 9
    assert "no call completed" not in done.stdout
