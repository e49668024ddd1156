"""The report: its golden text, its doubts, and what it does with a run that did not end well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from agentx.cli import run as command_line
from agentx.cli.report import print_report
from agentx.report import Report, make_report, write_report
from agentx.runs import Run, RunWriter
from agentx.turns import CallRow, calls_batch

S = 1_000_000_000
MS = 1_000_000
GOLDEN = Path(__file__).parent / "golden" / "report.txt"

MANIFEST: dict[str, Any] = {
    "schema_version": 1,
    "agentx_version": "0.1.0",
    "seed": 7,
    "corpus": {"digest": "0123456789abcdef", "name": "handmade", "sessions": 4, "turns": 40, "block_size": 64},
    "profile": {"name": "handmade", "digest": "fedcba"},
    "settings": {
        "concurrency": 4,
        "duration_ns": 20 * S,
        "grace_ns": 5 * S,
        "drain": False,
        "ramp_ns": S,
        "start_window": [0.5, 0.75],
        "think_cap_ns": 10 * S,
        "idle_cap_ns": None,
        "cache_bust": True,
        "max_context": None,
    },
    "deployment": {
        "kind": "live",
        "name": "127.0.0.1:8000",
        "urls": ["http://127.0.0.1:8000"],
        "model": "m",
        "max_model_len": 32768,
        "max_model_len_source": "/v1/models",
        "cache_block": 16,
        "cache_block_source": "/metrics",
        "endpoint": "/v1/chat/completions",
        "prompt": "text",
        "prompt_exact": False,
    },
    "window": {"start_ns": 2 * S, "end_ns": 22 * S},
    "host": {"system": "Linux", "machine": "x86_64", "python": "3.12.0", "cpus": 2},
    "clock": {"name": "monotonic", "resolution_ns": 1},
    "started_at": "2026-01-02T03:04:05Z",
    "warnings": ["the server refuses min_tokens: left out"],
    "ended": {"reason": "window", "at_ns": 27 * S},
}


def ok(turn: int, **columns: Any) -> CallRow:
    """A call that is as planned: 1,000 tokens in, 11 out, 400 cached of 500, TTFT 100 ms and more, ITL 20 ms."""
    sent = 2 * S + turn * S
    first = sent + 100 * MS + turn * 10 * MS
    chunks = [first + 20 * MS * place for place in range(11)]
    given = {
        "session_id": f"s{turn % 4}",
        "turn": turn,
        "play": 0,
        "lane": turn % 4,
        "parent_session_id": None,
        "root_session_id": f"s{turn % 4}",
        "phase": "measure",
        "status": "ok",
        "http_status": 200,
        "planned_input_tokens": 1000,
        "planned_output_tokens": 11,
        "due_ns": sent - MS,
        "sent_ns": sent,
        "first_token_ns": first,
        "first_content_ns": first,
        "last_token_ns": chunks[-1],
        "end_ns": chunks[-1] + MS,
        "chunk_ns": chunks,
        "prompt_tokens": 1000,
        "cached_tokens": 400,
        "completion_tokens": 11,
        "finish_reason": "length",
        "response_model": "m",
        "ceiling_cached_tokens": 500,
        "attempts": 1,
    }
    return CallRow(**{**given, **columns})


def run_of(rows: Sequence[CallRow], *, complete: bool = True, **manifest: Any) -> Run:
    frame = pl.from_arrow(calls_batch(rows))
    assert isinstance(frame, pl.DataFrame)
    return Run(Path("nowhere"), {**MANIFEST, **manifest}, frame, complete)


def clean_run(n: int = 120, **manifest: Any) -> Run:
    """A run without any reason to doubt it."""
    deployment = {**MANIFEST["deployment"], "prompt_exact": True}
    rows = [replace(ok(turn % 15), root_session_id=f"s{turn}") for turn in range(n)]
    return run_of(rows, **{"warnings": [], "deployment": deployment, **manifest})


def kinds(report: Report) -> list[str]:
    return [doubt.kind for doubt in report.doubts]


def mixed_rows() -> list[CallRow]:
    """A little of everything."""
    none = {"prompt_tokens": None, "cached_tokens": None, "completion_tokens": None}
    failed: dict[str, Any] = {"first_token_ns": None, "first_content_ns": None, "last_token_ns": None, "chunk_ns": []}
    skipped: dict[str, Any] = dict.fromkeys(("sent_ns", "end_ns", "due_ns", "ceiling_cached_tokens"))
    return [
        ok(0, phase="warmup", sent_ns=S, end_ns=2 * S),
        *(ok(turn) for turn in range(14)),
        ok(14, **none),
        ok(15, cached_tokens=1500),
        ok(16, completion_tokens=5, finish_reason="stop"),
        ok(17, status="error", error_kind="http_500", http_status=500, **none, **failed),
        ok(18, status="truncated", error_kind="truncated", **none),
        ok(19, phase="drain", end_ns=26 * S),
        ok(20, phase="drain", status="cancelled", error_kind="cancelled", end_ns=27 * S, **none),
        ok(21, status="skipped", error_kind="window_end", **skipped, **none, **failed),
    ]


def test_the_report_reads_as_it_did(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    print_report(make_report(run_of(mixed_rows())))
    got = capsys.readouterr()
    assert got.err == ""
    assert got.out == GOLDEN.read_text(encoding="utf-8")


def test_a_clean_run_has_no_doubts() -> None:
    report = make_report(clean_run())
    assert report.doubts == ()
    assert report.headline == report.summary
    assert report.summary.startswith(
        "120 turns completed in 20.0 s on 4 lanes: TTFT P50 170 ms (n 120), ITL P50 20.0 ms"
    )
    assert report.row == {
        "platform": "127.0.0.1:8000",
        "profile": "handmade",
        "con": 4,
        "requests": 120,
        "input_tokens_p99": 1000,
        "input_tokens_max": 1000,
        "ttft_ns_p50": 170 * MS,
        "itl_ns_p50": 20 * MS,
        "active_total_tok_s": report.throughput.active_total_tok_s if report.throughput else 0,
        "cache_hit": 0.4,
    }
    assert report.cache.efficiency == 0.8


def test_a_simulated_run_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    report = make_report(clean_run(deployment={"kind": "sim", "name": "mi325x"}))
    print_report(report)
    first = "Simulated deployment mi325x, virtual time: no hardware was measured."
    assert capsys.readouterr().out.splitlines()[0] == first
    assert report.headline == f"{first} {report.summary}"


def test_each_doubt_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [replace(ok(turn % 15), root_session_id=f"s{turn}") for turn in range(120)]
    live = {**MANIFEST["deployment"], "prompt_exact": True}

    def told(changed: Sequence[CallRow], **manifest: Any) -> list[str]:
        return kinds(make_report(run_of(changed, **{"warnings": [], "deployment": live, **manifest})))

    def with_first(n: int, **columns: Any) -> list[CallRow]:
        return [replace(row, **columns) if place < n else row for place, row in enumerate(rows)]

    assert told(rows) == []
    assert told(rows[:30]) == ["few_samples"]
    assert told([replace(row, root_session_id="s") for row in rows]) == ["few_sessions"]
    assert told(with_first(1, status="error")) == []
    assert told(with_first(2, status="error")) == ["errors"]
    assert told(with_first(2, status="truncated")) == ["errors"]
    assert told(with_first(1, status="overflow")) == ["overflow"]
    assert told(with_first(1, status="cancelled")) == []
    assert told(with_first(2, status="cancelled")) == ["cut_off"]
    assert told(with_first(1, first_token_ns=None)) == ["no_first_token"]
    assert told(with_first(1, completion_tokens=None)) == ["usage_missing"]
    assert told(with_first(120, cached_tokens=None)) == ["cache_unknown"]
    assert told(with_first(60, cached_tokens=None)) == ["cache_coverage"]
    assert told(with_first(1, cached_tokens=1001)) == ["cache_invalid"]
    assert told(with_first(120, cached_tokens=600)) == ["over_ceiling"]
    assert told(with_first(120, prompt_tokens=1008)) == []
    assert told(with_first(2, prompt_tokens=1009)) == ["input_length"]
    assert told(with_first(120, prompt_tokens=1011)) == ["input_length"]
    assert told(with_first(20, completion_tokens=2)) == ["output_length", "more_chunks", "length_early"]
    assert told(with_first(20, completion_tokens=2, finish_reason="stop", chunk_ns=[])) == ["output_length"]
    assert told(with_first(120, due_ns=0)) == ["lag"]
    assert told(with_first(1, response_model="other")) == ["model"]
    assert told(with_first(0), deployment={**live, "prompt_exact": False}) == ["prompt_inexact"]
    assert told(with_first(0), deployment={**live, "tls_insecure": True}) == ["tls_insecure"]
    assert told(with_first(0), warnings=["a", "b"]) == ["warning", "warning"]
    assert told(with_first(0), ended={"reason": "stalled", "at_ns": 22 * S}) == ["stalled"]
    assert told(with_first(0), ended={"reason": "a worker process died", "at_ns": 22 * S}) == ["ended_early"]
    assert told(with_first(0), ended={"reason": "interrupted", "at_ns": 22 * S}) == ["interrupted"]
    early = {"start_ns": 2 * S, "end_ns": 2 * S + 1}
    assert "short_window" in told(with_first(0), window=early)
    dropped = ok(0, status="skipped", error_kind="context_gate", sent_ns=None, lane=-1)
    assert told([*rows, dropped]) == ["context_gate"]


def test_a_client_that_is_too_slow_is_told_first() -> None:
    def notice(ttft_p99_ms: float, itl_p99_ms: float, stall_ms: float | None = None, **manifest: Any) -> str | None:
        budget = {"n": 40, "ttft_p99_ns": ttft_p99_ms * MS, "itl_p99_ns": itl_p99_ms * MS}
        stall = {"n": 1000, "p50": 0.0, "p99": stall_ms and stall_ms * MS, "max": 900 * MS}
        return make_report(
            clean_run(**{"client_budget": budget, "client": {"loop_stall_ns": stall}, **manifest})
        ).notice

    assert notice(1.9, 0.1) is None
    assert notice(2.1, 0.1) == "The client itself is off too far, TTFT by up to 2.10 ms (median 170 ms)"
    assert notice(0.1, 2.5) == "The client itself is off too far, ITL by up to 2.50 ms (median 20.0 ms)"
    assert notice(0.1, 0.1, 9.0) is None
    assert notice(0.1, 0.1, 12.0) == "The client itself stalled for 12.0 ms (P99; TTFT median 170 ms)"
    checked = {"settings": {**MANIFEST["settings"], "self_check": True}}
    assert "no call of its self-check completed" in (notice(0, 0, client_budget=None, **checked) or "")
    assert notice(0, 0, client_budget=None) is None


def test_a_doubt_names_what_is_needed() -> None:
    report = make_report(clean_run(12))
    assert [doubt.text for doubt in report.doubts] == [
        "Too few samples for some percentiles: TTFT has n 12 (P95 needs 20, P99 needs 100); "
        "ITL has n 12 (P95 needs 20, P99 needs 100)."
    ]
    cut = run_of([*(ok(turn % 15) for turn in range(89)), *[ok(1, status="cancelled")] * 11])
    text = next(doubt.text for doubt in make_report(cut).doubts if doubt.kind == "cut_off")
    assert "so P90, P95 and P99 may read too low" in text


def test_nothing_completed_gives_nulls_not_zeros(capsys: pytest.CaptureFixture[str]) -> None:
    report = make_report(run_of([ok(turn, status="error", error_kind="reset") for turn in range(3)]))
    assert "no_calls" in kinds(report)
    data = report.to_json()
    assert data["outcomes"]["error_rate"] == 1.0
    assert data["distributions"]["ttft_ns"] == {"n": 0, **dict.fromkeys(("p50", "p90", "p95", "p99", "mean", "max"))}
    assert data["throughput"]["active_total_tok_s"] is None
    assert (data["cache"]["hit"], data["row"]["cache_hit"]) == (None, None)
    print_report(report)
    assert "3 failed (3 reset)" in capsys.readouterr().out


def test_an_empty_run_reports(capsys: pytest.CaptureFixture[str]) -> None:
    report = make_report(Run(Path("nowhere"), {"schema_version": 1}, run_of([]).calls, complete=True))
    assert report.throughput is None
    assert kinds(report) == ["no_window", "no_calls"]
    print_report(report)
    print_report(report, as_json=True)
    assert '"throughput": null' in capsys.readouterr().out


def test_a_killed_run_is_over_the_time_that_it_lived() -> None:
    rows = [ok(0, phase="warmup", sent_ns=0, end_ns=2 * S), *(ok(turn, due_ns=(2 + turn) * S) for turn in range(5))]
    flying = ok(5, status="cancelled", error_kind="killed", end_ns=None, first_token_ns=None, chunk_ns=None)
    told = make_report(run_of([*rows, flying], complete=False, ended={"reason": "killed"}))
    silent = make_report(run_of([*rows, flying], complete=False, ended={"reason": "killed"}, window=None))
    cold = make_report(run_of([*rows[1:], flying], complete=False, ended={"reason": "killed"}, window=None))
    for report in (told, silent, cold):
        assert "killed" in kinds(report)
        assert report.throughput is not None
        assert report.throughput.window_s == pytest.approx(5.0)  # to 7 s, when the last call was sent
        assert report.throughput.completed == 5
    warm = make_report(run_of(rows[:1], complete=False, ended={"reason": "killed"}, window=None))
    assert kinds(warm)[:2] == ["killed", "no_window"]


def test_an_unfinished_run_with_its_end_is_told() -> None:
    assert "not_closed" in kinds(make_report(run_of([ok(0)], complete=False)))


def test_report_json_is_written_whole_and_says_what_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    writer = RunWriter(folder, {**MANIFEST, "ended": None})
    for row in mixed_rows():
        writer.add(row)
    writer.finish(MANIFEST["ended"])
    report = write_report(folder)
    written = json.loads((folder / "report.json").read_text())
    assert command_line(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written
    assert written["headline"] == report.headline
    assert written["distributions"]["ttft_ns"]["n"] == 18
    assert written["facts"]["corpus_digest"] == "0123456789abcdef"
    assert command_line(["report", str(folder)]) == 0
    assert capsys.readouterr().out == GOLDEN.read_text(encoding="utf-8")


def test_a_folder_that_is_no_run_is_told_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, what in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no run of agentx in it")):
        assert command_line(["report", str(folder)]) == 2
        got = capsys.readouterr()
        assert got.out == ""
        assert got.err == f"error: {folder}: {what}\nhint: give the folder that agentx replay wrote (-o)\n"
