"""Each metric against a plain loop, its invariances, and the cases of the public bug log."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx import metrics, stats
from agentx.sse import StreamParser
from agentx.turns import FAILED, STATUSES, CallRow, calls_batch
from tests.cases import expected, inputs

S = 1_000_000_000
MS = 1_000_000


def frame(rows: Sequence[CallRow]) -> pl.DataFrame:
    made = pl.from_arrow(calls_batch(rows))
    assert isinstance(made, pl.DataFrame)
    return made


def call(**columns: Any) -> CallRow:
    given = {"phase": "measure", "status": "ok", "lane": 0, **columns}
    return CallRow(session_id="s", turn=0, play=0, parent_session_id=None, root_session_id="s", **given)


def mostly(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.one_of(values, values, values, st.none())


@st.composite
def rows(draw: st.DrawFn) -> CallRow:
    """Any call that could be in a run table, at times of a few hundred ns."""
    sent = draw(mostly(st.integers(0, 200)))
    chunks = [] if sent is None else sorted(sent + gap for gap in draw(st.lists(st.integers(0, 90), max_size=5)))
    end = None if sent is None else max([sent, *chunks]) + draw(st.integers(0, 30))
    prompt = draw(mostly(st.integers(0, 50)))
    return call(
        phase=draw(st.sampled_from(["warmup", "measure", "measure", "drain"])),
        status=draw(st.sampled_from(["ok", "ok", *STATUSES])),
        planned_input_tokens=draw(st.integers(0, 50)),
        planned_output_tokens=draw(st.integers(0, 5)),
        due_ns=None if sent is None else sent - draw(st.integers(0, 9)),
        sent_ns=sent,
        first_token_ns=chunks[0] if chunks else None,
        first_content_ns=chunks[-1] if chunks else None,
        last_token_ns=chunks[-1] if chunks else None,
        end_ns=draw(st.sampled_from([end, end, end, None])),
        chunk_ns=chunks or draw(st.sampled_from([[], None])),
        prompt_tokens=prompt,
        cached_tokens=draw(mostly(st.integers(0, 60))),
        completion_tokens=draw(mostly(st.integers(0, 6))),
        ceiling_cached_tokens=draw(mostly(st.integers(0, 50))),
    )


def about(value: float | None) -> Any:
    """Equal to a value but for its last bits, or None."""
    return None if value is None else pytest.approx(value, rel=1e-9)


tables = st.lists(rows(), max_size=12)
few = settings(max_examples=60, deadline=None)


def is_measured(row: CallRow) -> bool:
    return row.phase != "warmup" and row.status == "ok"


# Distributions


def plain_percentile(values: Sequence[float], q: float) -> float | None:
    if not values or len(values) < 1 / (1 - q) - 1e-9:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@given(st.lists(st.floats(0, 1e12), max_size=230))
@few
def test_a_summary_is_what_a_loop_finds(values: list[float]) -> None:
    found = stats.summarise(np.array(values))
    assert found.n == len(values)
    for name, q in stats.QUANTILES.items():
        assert getattr(found, name) == about(plain_percentile(values, q))
    assert found.mean == about(math.fsum(values) / len(values) if values else None)
    assert found.max == (max(values) if values else None)
    assert found.missing() == [name for name in stats.QUANTILES if getattr(found, name) is None]


def test_a_percentile_needs_its_samples() -> None:
    assert [stats.needed(q) for q in (0.5, 0.9, 0.95, 0.99, 0.999, 0.97)] == [2, 10, 20, 100, 1000, 34]
    for name, n in (("p50", 2), ("p90", 10), ("p95", 20), ("p99", 100)):
        assert getattr(stats.summarise(np.ones(n)), name) == 1.0
        assert getattr(stats.summarise(np.ones(n - 1)), name) is None


def plain_per_call(row: CallRow) -> dict[str, float | None]:
    def minus(a: int | None, b: int | None) -> int | None:
        return None if a is None or b is None else a - b

    span, tokens = minus(row.last_token_ns, row.first_token_ns), row.completion_tokens
    cached, prompt = row.cached_tokens, row.prompt_tokens
    return {
        "ttft_ns": minus(row.first_token_ns, row.sent_ns),
        "ttfc_ns": minus(row.first_content_ns, row.sent_ns),
        "itl_ns": span / (tokens - 1) if span and tokens is not None and tokens >= 2 else None,
        "e2e_ns": minus(row.end_ns, row.sent_ns),
        "response_ns": minus(row.end_ns, row.due_ns),
        "input_tokens": prompt,
        "output_tokens": tokens,
        "cache_hit": cached / prompt if cached is not None and prompt and cached <= prompt else None,
    }


@given(tables)
@few
def test_distributions_are_what_a_loop_finds(table: list[CallRow]) -> None:
    found = metrics.distributions(metrics.measured(frame(table)))
    good = [row for row in table if is_measured(row)]
    for name in plain_per_call(call()):
        values = [value for row in good if (value := plain_per_call(row)[name]) is not None]
        assert found[name].n == len(values)
        assert found[name].mean == about(sum(values) / len(values) if values else None)
        assert found[name].p50 == about(plain_percentile(values, 0.5))
    gaps = [b - a for row in good for times in [row.chunk_ns or []] for a, b in pairwise(times)]
    assert metrics.chunk_gaps(frame(good)).tolist() == gaps
    assert found["icl_ns"].n == len(gaps)


@pytest.mark.parametrize(
    ("tokens", "chunks", "itl"),
    [(3, [10, 30], 10.0), (2, [10, 30], 20.0), (1, [10, 30], None), (0, [10, 30], None), (None, [10, 30], None),
     (5, [10, 10], None), (1, [10], None), (None, [], None)],
)  # fmt: skip
def test_itl_needs_two_tokens_and_two_instants(tokens: int | None, chunks: list[int], itl: float | None) -> None:
    first, last = (chunks[0], chunks[-1]) if chunks else (None, None)
    row = call(sent_ns=0, first_token_ns=first, last_token_ns=last, chunk_ns=chunks, completion_tokens=tokens)
    assert metrics.measured(frame([row]))["itl_ns"].to_list() == [itl]


@given(tables)
@few
def test_lag_is_that_of_every_call_sent_inside(table: list[CallRow]) -> None:
    inside = [row for row in table if row.phase != "warmup" and row.sent_ns is not None]
    found = metrics.lag(frame(table))
    assert found.n == len(inside)
    assert found.max == (max(row.sent_ns - row.due_ns for row in inside) if inside else None)  # type: ignore[operator]


# Throughput


WINDOW = (50, 150)


def plain_throughput(table: list[CallRow], start: int, end: int) -> dict[str, Any]:
    sent = [row for row in table if row.sent_ns is not None]
    spans = [(row.sent_ns, end if row.end_ns is None else row.end_ns) for row in sent]
    ours = [(row, till) for row, (_, till) in zip(sent, spans, strict=True) if row.phase != "warmup"]
    done = [row for row, till in ours if row.status == "ok" and till <= end]
    rest = [row for row, till in ours if row.status == "cancelled" or (row.status == "ok" and till > end)]
    active = sum(any(low <= t < high for low, high in spans) for t in range(start, end)) / S
    load = sum(max(0, min(high, end) - max(low, start)) for low, high in spans) / S
    tokens_in, tokens_out = ([getattr(row, name) for row in done] for name in ("prompt_tokens", "completion_tokens"))
    partial = 0.0
    for row in rest:
        arrived = sum(t <= end for t in row.chunk_ns or [])
        known = row.completion_tokens is not None and row.chunk_ns
        partial += arrived * row.completion_tokens / len(row.chunk_ns) if known else arrived  # type: ignore

    def rate(values: list[int | None], seconds: float, more: float = 0.0) -> float | None:
        known = [value for value in values if value is not None]
        return (sum(known) + more) / seconds if values and len(known) == len(values) and seconds else None

    window_s = (end - start) / S
    with_partial = rate(tokens_out, window_s, partial)
    if not done and partial:
        with_partial = partial / window_s
    return {
        "completed": len(done),
        "active_s": active or None,
        "active_input_tok_s": rate(tokens_in, active),
        "active_output_tok_s": rate(tokens_out, active),
        "active_total_tok_s": None if None in (*tokens_in, *tokens_out) else rate(tokens_in, active, sum(tokens_out)),
        "output_tok_s": rate(tokens_out, window_s),
        "output_with_partial_tok_s": with_partial,
        "requests_s": len(done) / window_s,
        "mean_in_flight": load / window_s,
    }


@given(tables)
@few
def test_throughput_is_what_a_loop_finds(table: list[CallRow]) -> None:
    found = metrics.throughput(frame(table), WINDOW)
    for name, value in plain_throughput(table, *WINDOW).items():
        assert getattr(found, name) == about(value), name


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=15))
@few
def test_covered_time_is_a_union(spans: list[tuple[int, int]]) -> None:
    intervals = np.array([(start, start + length) for start, length in spans], dtype=np.int64).reshape(-1, 2)
    instants = {t for start, length in spans for t in range(start, start + length)}
    assert metrics.covered(intervals) == len(instants)


def test_token_rates_need_the_tokens_of_nearly_every_call() -> None:
    table = [call(sent_ns=0, end_ns=S, prompt_tokens=10, completion_tokens=1) for _ in range(999)]
    silent = call(sent_ns=0, end_ns=S)
    found = metrics.throughput(frame([*table, silent]), (0, S))
    assert (found.active_total_tok_s, found.n_output, found.completed) == (999 * 11, 999, 1000)
    found = metrics.throughput(frame([*table, silent, silent]), (0, S))
    assert (found.active_total_tok_s, found.output_tok_s, found.requests_s) == (None, None, 1001)
    half = metrics.throughput(frame([replace(silent, prompt_tokens=7)]), (0, S))
    assert (half.active_input_tok_s, half.active_output_tok_s, half.active_total_tok_s) == (7, None, None)


def test_sums_do_not_overflow() -> None:
    big = call(sent_ns=0, end_ns=S, prompt_tokens=2**31 - 1, cached_tokens=2**31 - 1, completion_tokens=2**31 - 1)
    calls = frame([big] * 4)
    assert metrics.throughput(calls, (0, S)).active_total_tok_s == 8 * (2**31 - 1)
    assert metrics.cache_use(metrics.measured(calls)).hit == 1.0
    assert metrics.lengths(metrics.measured(calls))["output"].achieved == 4 * (2**31 - 1)


# Cache, lengths, counts


@given(tables)
@few
def test_cache_use_is_what_a_loop_finds(table: list[CallRow]) -> None:
    found = metrics.cache_use(metrics.measured(frame(table)))
    good = [row for row in table if is_measured(row)]
    telling = [row for row in good if row.cached_tokens is not None and row.prompt_tokens]
    valid = [row for row in telling if row.cached_tokens <= row.prompt_tokens]  # type: ignore[operator]
    base = [row for row in valid or good if row.prompt_tokens and row.ceiling_cached_tokens is not None]

    def ratio(of: list[CallRow], above: str, below: str) -> float | None:
        total = sum(getattr(row, below) for row in of)
        return sum(getattr(row, above) for row in of) / total if total else None

    assert (found.n, found.n_reporting, found.n_invalid) == (len(good), len(valid), len(telling) - len(valid))
    assert found.hit == about(ratio(valid, "cached_tokens", "prompt_tokens"))
    assert found.n_ceiling == len(base)
    assert found.ceiling == about(ratio(base, "ceiling_cached_tokens", "prompt_tokens"))
    assert found.efficiency == about(ratio(base, "cached_tokens", "ceiling_cached_tokens") if valid else None)


@given(tables)
@few
def test_lengths_and_outcomes_are_what_a_loop_finds(table: list[CallRow]) -> None:
    good = [row for row in table if is_measured(row)]
    found = metrics.lengths(metrics.measured(frame(table)))
    for name, planned, achieved in (
        ("input", lambda row: row.planned_input_tokens, lambda row: row.prompt_tokens),
        ("output", lambda row: max(row.planned_output_tokens, 1), lambda row: row.completion_tokens),
    ):
        pairs = [(planned(row), achieved(row)) for row in good if achieved(row) is not None]
        off = [abs(b - a) for a, b in pairs if a != b]
        expected = (len(pairs), sum(a for a, _ in pairs), sum(b for _, b in pairs), len(off), max(off, default=0))
        assert found[name] == metrics.Lengths(*expected)
    sent = [row.status for row in table if row.phase != "warmup" and row.sent_ns is not None]
    outcomes = metrics.outcomes(frame(table))
    failed = sum(status in ("error", "truncated", "empty") for status in sent)
    assert outcomes == metrics.Outcomes(
        len(sent), sent.count("ok"), failed, sent.count("overflow"), sent.count("cancelled")
    )
    counts = metrics.counts(frame(table))
    assert sum(n for phase in counts.values() for n in phase.values()) == len(table)
    assert all(counts[row.phase][row.status] >= 1 for row in table)


def test_kinds_count_the_most_frequent_first() -> None:
    table = [call(status="error", error_kind=kind) for kind in ("reset", "http_500", "reset")]
    table += [call(status="empty"), call(status="overflow", error_kind="context"), call()]
    assert list(metrics.kinds(frame(table), [*FAILED, "overflow"]).items()) == [
        ("reset", 2),
        ("context", 1),
        ("empty", 1),
        ("http_500", 1),
    ]


# Invariances


def shifted(row: CallRow, by_ns: int) -> CallRow:
    def move(value: int | None) -> int | None:
        return None if value is None else value + by_ns

    times = {name: move(getattr(row, name)) for name in CallRow.__slots__ if name.endswith("_ns") and name not in
             ("chunk_ns", "think_ns")}  # fmt: skip
    return replace(row, **times, chunk_ns=None if row.chunk_ns is None else [t + by_ns for t in row.chunk_ns])


def everything(table: list[CallRow], window: tuple[int, int]) -> dict[str, Any]:
    calls = frame(table)
    good = metrics.measured(calls)
    return {
        "distributions": {name: summary.to_json() for name, summary in metrics.distributions(good).items()},
        "lag": metrics.lag(calls).to_json(),
        "throughput": metrics.throughput(calls, window),
        "cache": metrics.cache_use(good),
        "lengths": metrics.lengths(good),
        "counts": metrics.counts(calls),
        "outcomes": metrics.outcomes(calls),
        "kinds": metrics.kinds(calls, STATUSES),
    }


def rounded(value: Any) -> Any:
    """The same without the last bits of its floats, which depend on the order of a sum."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: rounded(getattr(value, name)) for name in value.__dataclass_fields__}
    return float(f"{value:.12g}") if isinstance(value, float) else value


@given(tables, st.integers(0, 10**15), st.randoms(use_true_random=False))
@few
def test_neither_a_shift_in_time_nor_another_order_changes_anything(
    table: list[CallRow], by_ns: int, rng: random.Random
) -> None:
    before = rounded(everything(table, WINDOW))
    moved = [shifted(row, by_ns) for row in table]
    assert rounded(everything(moved, (WINDOW[0] + by_ns, WINDOW[1] + by_ns))) == before
    mixed = table[:]
    rng.shuffle(mixed)
    assert rounded(everything(mixed, WINDOW)) == before


@given(tables)
@few
def test_warm_up_and_failures_never_enter_a_latency(table: list[CallRow]) -> None:
    good = [row for row in table if is_measured(row)]
    everyone = metrics.distributions(metrics.measured(frame(table)))
    assert everyone == metrics.distributions(metrics.measured(frame(good)))


# The bug log


def from_wire(wire: dict[str, Any]) -> CallRow:
    """A recorded response as a row sent at 0, through our stream parser."""
    parser = StreamParser()
    end_ns = 0
    for read in wire["chunks"]:
        end_ns = round(read["at_ms"] * MS)
        parser.feed(end_ns, bytes.fromhex(read["hex"]) if "hex" in read else read["text"].encode())
    facts = parser.finish(end_ns)
    chunks = facts.chunk_ns
    return call(
        sent_ns=0,
        first_token_ns=chunks[0] if chunks else None,
        first_content_ns=facts.first_content_ns,
        last_token_ns=chunks[-1] if chunks else None,
        end_ns=end_ns,
        chunk_ns=chunks,
        prompt_tokens=facts.prompt_tokens,
        cached_tokens=facts.cached_tokens,
        completion_tokens=facts.completion_tokens,
    )


def from_usage(usage: dict[str, Any]) -> CallRow:
    details = usage.get("prompt_tokens_details") or {}
    return call(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens"),
        completion_tokens=usage["completion_tokens"],
    )


@pytest.mark.parametrize(
    "case", ["A01", "A03", "A07", "B01", "B03", "B04", "B07", "B12", "C01", "C02", "C07", "D07", "N02"]
)
def test_latencies_of_recorded_streams(shared: Path, case: str) -> None:
    right = expected(shared, case)
    row = from_wire(inputs(shared, f"{case}.wire.json"))
    good = metrics.measured(frame([row]))
    for name, column in (("ttft_ms", "ttft_ns"), ("ttft_content_ms", "ttfc_ns"), ("tpot_ms", "itl_ns")):
        if name in right:
            value = good[column][0]
            assert (None if value is None else value / MS) == pytest.approx(right[name]), name
    if "inter_chunk_ms" in right:
        assert (metrics.chunk_gaps(good) / MS).tolist() == pytest.approx(right["inter_chunk_ms"])
    if "stream_end_ms" in right:
        assert good["e2e_ns"][0] / MS == right["stream_end_ms"]


def test_c04_one_token_has_no_itl(shared: Path) -> None:
    table = [from_wire(inputs(shared, f"C04.{part}.wire.json")) for part in "abc"]
    itl = metrics.distributions(metrics.measured(frame(table)))["itl_ns"]
    right = expected(shared, "C04")["aggregate"]
    assert (itl.n, itl.mean) == (right["n_tpot_samples"], right["mean_tpot_ms"] * MS)


def test_c10_planned_and_achieved_output(shared: Path) -> None:
    records = inputs(shared, "C10.records.json")
    table = [
        call(planned_output_tokens=record["planned_out"], completion_tokens=record["usage_completion_tokens"])
        for record in records
    ]
    good = metrics.measured(frame(table))
    right = expected(shared, "C10")
    found = metrics.lengths(good)["output"]
    assert found.n == right["n_requests"]
    assert (found.planned, found.achieved) == (right["planned_tokens"], right["actual_tokens"])
    assert found.n_off == right["mismatch_count"]
    share = 100 * good["output_error_tokens"] / good["planned_output_tokens"]
    assert share.to_list() == right["mismatch_pct_per_request"]


def test_d01_missing_is_not_zero(shared: Path) -> None:
    table = [from_usage(usage) for usage in inputs(shared, "D01.usage.jsonl")]
    right = expected(shared, "D01")
    assert [row.cached_tokens for row in table] == right["cached_tokens"]
    found = metrics.cache_use(metrics.measured(frame(table)))
    assert (found.n, found.n_reporting, found.coverage) == (
        right["n_requests"],
        right["n_reporting"],
        right["coverage"],
    )
    assert found.hit == right["hit_rate_reporting"]


def test_d03_more_cached_than_prompt_is_left_out(shared: Path) -> None:
    table = [from_usage(usage) for usage in inputs(shared, "D03.usage.jsonl")]
    good = metrics.measured(frame(table))
    right = expected(shared, "D03")
    found = metrics.cache_use(good)
    assert (found.n, found.n_invalid, found.hit) == (
        right["n_requests"],
        right["n_invalid_cached"],
        right["hit_rate_valid"],
    )
    assert good["cache_invalid"].arg_true().to_list() == right["invalid_ids"]
    assert good["cache_hit"].to_list() == [None, 0.25]
    assert metrics.cache_use(metrics.measured(frame([call(prompt_tokens=9, cached_tokens=-1)]))).n_invalid == 1


def test_d05_token_weighted_beside_per_call(shared: Path) -> None:
    good = metrics.measured(frame([from_usage(usage) for usage in inputs(shared, "D05.usage.jsonl")]))
    right = expected(shared, "D05")
    per_call = metrics.distributions(good)["cache_hit"]
    assert metrics.cache_use(good).hit == right["hit_rate_token_weighted"]
    assert (per_call.mean, per_call.p50) == (right["hit_rate_mean_of_ratios"], right["hit_rate_p50"])


def test_i01_calls_cut_at_the_end(shared: Path) -> None:
    recorded = inputs(shared, "I01.records.json")
    end = round(recorded["duration_s"] * S)
    table = []
    for record in recorded["requests"]:
        done, start, stop = record["state"] == "done", round(record["start"] * S), round(record["end"] * S)
        chunks = [start + (stop - start) * i // record["tokens"] for i in range(1, record["tokens"] + 1)]
        table.append(
            call(
                phase="measure" if done else "drain",
                status="ok" if done else "cancelled",
                sent_ns=start,
                first_token_ns=chunks[0],
                last_token_ns=chunks[-1],
                end_ns=stop,
                chunk_ns=chunks,
                completion_tokens=record["tokens"] if done else None,
            )
        )
    right = expected(shared, "I01")
    calls = frame(table)
    outcomes, used = metrics.outcomes(calls), metrics.throughput(calls, (0, end))
    assert (outcomes.ok, outcomes.failed, outcomes.cancelled, outcomes.error_rate) == (
        right["completed"],
        right["errored"],
        right["cancelled"],
        right["error_rate"],
    )
    assert (used.output_tok_s, used.output_with_partial_tok_s) == (
        right["completed_only_tok_s"],
        right["incl_partial_tok_s"],
    )
    assert metrics.distributions(metrics.measured(calls))["e2e_ns"].n == right["latency_samples"]


def test_t01_percentiles_stay_inside_the_sample(shared: Path) -> None:
    values, right = inputs(shared, "T01.values.json"), expected(shared, "T01")
    for part, names in (("a", ("p50", "p95", "p99")), ("b", ("p50", "p95", "p99"))):
        for name in names:
            got = stats.percentile(np.array(values[part]), stats.QUANTILES[name])
            assert got == pytest.approx(right[part][name])
    assert stats.percentile(np.array([]), 0.5) is None
    assert stats.summarise(np.array(values["b"])).p95 is None  # two samples do not carry it


def test_t03_nothing_completed_is_null(shared: Path) -> None:
    records = inputs(shared, "T03.records.json")
    failed = frame(
        [
            call(status="error", error_kind="reset", sent_ns=round(r["start"] * S), end_ns=round(r["end"] * S))
            for r in records["a"]
        ]
    )
    found, used = metrics.distributions(metrics.measured(failed)), metrics.throughput(failed, (0, 2 * S))
    assert found["ttft_ns"] == stats.Summary(0, None, None, None, None, None, None)
    assert (used.completed, used.output_tok_s, used.active_total_tok_s) == (0, None, None)
    outcomes = metrics.outcomes(failed)
    assert (outcomes.ok, outcomes.failed, outcomes.error_rate) == (0, 3, 1.0)
    at = round(records["b"][0]["start"] * S)
    single = frame([call(sent_ns=at, end_ns=at, completion_tokens=1)])
    used = metrics.throughput(single, (at, at))
    assert (used.completed, used.requests_s, used.window_s, used.active_output_tok_s) == (1, None, None, None)


def test_g06_lanes_are_not_calls_in_flight(shared: Path) -> None:
    scene, right = inputs(shared, "G06.scenario.json"), expected(shared, "G06")
    busy, think = (round(scene[name] * S) for name in ("latency_mean_s", "think_mean_s"))
    period, cycles = busy + think, 8
    table = []
    for lane in range(scene["lanes"]):
        first = period * lane // scene["lanes"] - period
        starts = (first + period * cycle for cycle in range(cycles + 2))
        table += [call(lane=lane, sent_ns=at, end_ns=at + busy) for at in starts if at + busy > 0]
    used = metrics.throughput(frame(table), (0, period * cycles))
    assert used.mean_in_flight == pytest.approx(right["expected_in_flight"])
    assert used.requests_s == pytest.approx(right["expected_rps"], rel=0.01)
