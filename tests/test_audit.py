"""The counters of a run against each other: planted disagreements are told, each with the counter believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from agentx import metrics
from agentx.audit import Audit, audit, disagreements
from agentx.turns import CallRow, calls_batch
from tests.test_report import MS, S, ok

URL = "http://127.0.0.1:8000"
WINDOW = (2 * S, 60 * S)


def audited(rows: list[CallRow], servers: dict[str, Any] | None = None, window: tuple[int, int] = WINDOW) -> Audit:
    calls = pl.DataFrame(pl.from_arrow(calls_batch([replace(row, endpoint=URL) for row in rows])))
    return audit(calls, metrics.measured(calls), window, servers)


def kinds(found: Audit, ignore_eos: bool = True) -> list[str]:
    return [kind for kind, _ in disagreements(found, ignore_eos)]


def counted(prompt: float | None, output: float | None) -> dict[str, Any]:
    return {URL: {"whole_run": {"prompt_tokens": prompt, "generation_tokens": output}}}


ROWS = [ok(turn, finish_reason="length") for turn in range(10)]


def test_counters_that_agree_are_silent() -> None:
    found = audited(ROWS, counted(10000.0, 110.0))
    assert (found.asked, found.reported, found.chunks, found.completed_share) == (110, 110, 110, 1.0)
    assert found.finish_reasons == {"length": 10}
    assert found.server["output"].agrees
    assert kinds(found) == []


def test_a_completed_counter_that_reads_low_is_not_believed() -> None:
    """The seed's lesson: few calls count as completed although nearly all tokens arrived."""
    whole = ok(0)
    early = whole.sent_ns + 250 * MS  # type: ignore[operator]
    running = [replace(whole, turn=turn, end_ns=early + S) for turn in range(1, 10)]
    found = audited([whole, *running], window=(2 * S, whole.end_ns or 0))
    assert found.completed_share == pytest.approx(0.1)
    (kind, text), *rest = disagreements(found, True)
    assert kind == "completed_counter"
    assert "hold only 10.0 %" in text
    assert not rest


def test_failed_calls_that_brought_everything_are_told() -> None:
    cut = [replace(row, status="truncated", error_kind="truncated", finish_reason=None) for row in ROWS[:6]]
    assert kinds(audited([*ROWS[6:], *cut])) == ["completed_counter", "failed_but_full"]
    empty = [replace(row, chunk_ns=[], completion_tokens=None) for row in cut]
    assert kinds(audited([*ROWS[6:], *empty])) == []


def test_more_chunks_than_tokens_means_a_wrong_report() -> None:
    assert kinds(audited([replace(row, completion_tokens=5) for row in ROWS])) == ["more_chunks", "length_early"]
    fewer = [replace(row, chunk_ns=row.chunk_ns[:3]) for row in ROWS]  # type: ignore[index]
    assert kinds(audited(fewer)) == []


def test_finish_reasons_are_held_against_the_lengths() -> None:
    early = {"completion_tokens": 11, "planned_output_tokens": 20}
    assert kinds(audited([replace(row, **early) for row in ROWS])) == ["length_early"]
    stopped = [replace(row, finish_reason="stop", **early) for row in ROWS]
    assert kinds(audited(stopped)) == ["stop_early"]
    assert kinds(audited(stopped), ignore_eos=False) == []
    assert kinds(audited([replace(row, finish_reason="tired") for row in ROWS])) == ["finish_reason"]
    assert kinds(audited([replace(row, finish_reason=None) for row in ROWS])) == []


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        (counted(10000.0, 110.0), []),
        (counted(10400.0, 114.0), []),
        (counted(18000.0, 110.0), ["server_prompt"]),
        (counted(10000.0, 55.0), ["server_output"]),
        (counted(None, 110.0), []),
        (counted(None, None), []),
        ({URL: {}}, []),
        ({}, []),
        (None, []),
    ],
)
def test_the_servers_own_count_is_put_beside_ours(servers: dict[str, Any] | None, told: list[str]) -> None:
    assert kinds(audited(ROWS, servers)) == told


def test_what_a_cut_call_may_have_cost_the_server_is_no_disagreement() -> None:
    cut = replace(ok(10), status="cancelled", planned_output_tokens=500, completion_tokens=None, chunk_ns=[])
    assert kinds(audited([*ROWS, cut], counted(10000.0, 110.0 + 300))) == []
    assert kinds(audited([*ROWS, cut], counted(10000.0, 110.0 + 900))) == ["server_output"]


def test_counts_of_one_of_two_servers_are_not_held_against_both() -> None:
    rows = [replace(row, endpoint=URL if turn % 2 else "http://127.0.0.1:9000") for turn, row in enumerate(ROWS)]
    calls = pl.DataFrame(pl.from_arrow(calls_batch(rows)))
    assert audit(calls, metrics.measured(calls), WINDOW, counted(5000.0, 55.0)).server == {}
