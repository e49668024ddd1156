"""The one definition of each metric: pure functions of a run table.

Latencies are those of calls that ended `ok` and were sent inside the window (phases measure and
drain); warm-up and failed, cut or refused calls are counted, never measured. What was not measured is
null and leaves a sample; it is never 0. Times are nanoseconds, lengths tokens, hits ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from agentx.units import NS_PER_S

Values = npt.NDArray[np.float64]

QUANTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}

WINDOW_PHASES = ("measure", "drain")


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in a few numbers; a percentile it cannot carry is None."""

    n: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    max: float | None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in ("n", "p50", "p90", "p95", "p99", "mean", "max")}


def needed(q: float) -> int:
    """Samples that a percentile needs: 1 / (1 - q)."""
    return round(1 / (1 - q))


def summarise(values: Values) -> Summary:
    """The summary of a sample; percentiles by linear interpolation, None under `needed(q)` samples."""
    n = len(values)
    if n == 0:
        return Summary(0, None, None, None, None, None, None)
    found = np.percentile(values, [100 * q for q in QUANTILES.values()])
    p50, p90, p95, p99 = (float(p) if n >= needed(q) else None for p, q in zip(found, QUANTILES.values(), strict=True))
    return Summary(n, p50, p90, p95, p99, float(values.mean()), float(values.max()))


# Per call


def with_metrics(calls: pl.DataFrame) -> pl.DataFrame:
    """The run table with a column per metric that is defined per call, null where it is not."""
    chunks = pl.col("chunk_ns").list
    spans = pl.col("last_token_ns") > pl.col("first_token_ns")
    several = pl.col("completion_tokens") >= 2
    valid_cache = pl.col("cached_tokens").is_not_null() & (pl.col("prompt_tokens") > 0)
    return calls.with_columns(
        ttft_ns=pl.col("first_token_ns") - pl.col("sent_ns"),
        ttfc_ns=pl.col("first_content_ns") - pl.col("sent_ns"),
        itl_ns=pl.when(spans & several).then(
            (pl.col("last_token_ns") - pl.col("first_token_ns")) / (pl.col("completion_tokens") - 1)
        ),
        e2e_ns=pl.col("end_ns") - pl.col("sent_ns"),
        response_ns=pl.col("end_ns") - pl.col("due_ns"),
        lag_ns=pl.col("sent_ns") - pl.col("due_ns"),
        n_chunks=chunks.len().fill_null(0),
        cache_hit=pl.when(valid_cache & (pl.col("cached_tokens") <= pl.col("prompt_tokens"))).then(
            pl.col("cached_tokens") / pl.col("prompt_tokens")
        ),
        cache_invalid=(valid_cache & (pl.col("cached_tokens") > pl.col("prompt_tokens"))).fill_null(False),
    )


def measured(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls that a latency may come from, with their metrics."""
    return with_metrics(calls.filter(pl.col("phase").is_in(WINDOW_PHASES) & (pl.col("status") == "ok")))


def chunk_gaps(calls: pl.DataFrame) -> Values:
    """Gaps between successive output chunks of each call, pooled; a call of one chunk has none."""
    gaps = calls["chunk_ns"].list.diff(null_behavior="drop").explode(empty_as_null=False).drop_nulls()
    return gaps.to_numpy().astype(np.float64)


def column(calls: pl.DataFrame, name: str) -> Values:
    """The values of a column that are there."""
    return calls[name].drop_nulls().to_numpy().astype(np.float64)


def latencies(calls: pl.DataFrame) -> dict[str, Summary]:
    """The distributions of a report, of measured calls: name to summary."""
    good = measured(calls)
    names = {
        "ttft_ns": "ttft_ns",
        "ttfc_ns": "ttfc_ns",
        "itl_ns": "itl_ns",
        "e2e_ns": "e2e_ns",
        "response_ns": "response_ns",
        "input_tokens": "prompt_tokens",
        "output_tokens": "completion_tokens",
        "cache_hit": "cache_hit",
    }
    found = {name: summarise(column(good, source)) for name, source in names.items()}
    found["icl_ns"] = summarise(chunk_gaps(good))
    return found


def lag(calls: pl.DataFrame) -> Summary:
    """How late calls went out: sent - due, of every call sent inside the window."""
    sent = calls.filter(pl.col("phase").is_in(WINDOW_PHASES) & pl.col("sent_ns").is_not_null())
    return summarise(column(with_metrics(sent), "lag_ns"))


# Counts


def counts(calls: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Rows by phase and status; only what occurs."""
    grouped = calls.group_by("phase", "status").len().sort("phase", "status")
    found: dict[str, dict[str, int]] = {}
    for phase, status, n in grouped.iter_rows():
        found.setdefault(phase, {})[status] = n
    return found


def error_kinds(calls: pl.DataFrame) -> dict[str, int]:
    """How often each kind of failure occurred, most frequent first."""
    failed = calls.filter(pl.col("status").is_in(["error", "truncated", "overflow", "empty"]))
    grouped = (
        failed.group_by(pl.col("error_kind").fill_null("empty"))
        .len()
        .sort(["len", "error_kind"], descending=[True, False])
    )
    return dict(grouped.iter_rows())


def error_rate(calls: pl.DataFrame) -> float | None:
    """Failed / (completed + failed) of the calls sent in the window; overflow and cut calls are neither."""
    inside = calls.filter(pl.col("phase").is_in(WINDOW_PHASES))
    failed = inside.filter(pl.col("status").is_in(["error", "truncated", "empty"])).height
    ok = inside.filter(pl.col("status") == "ok").height
    return failed / (ok + failed) if ok + failed else None


# The window


@dataclass(frozen=True, slots=True)
class Throughput:
    """What got done in the measured window; rates are None where their time is."""

    completed: int
    """Calls that ended ok inside the window."""
    window_s: float | None
    active_s: float | None
    """Part of the window with at least one call in flight."""
    active_total_tok_s: float | None
    active_input_tok_s: float | None
    active_output_tok_s: float | None
    output_tok_s: float | None
    """Output tokens of completed calls over the whole window."""
    output_with_partial_tok_s: float | None
    """Those and the chunks that had arrived of calls still running or cut at the window's end."""
    requests_s: float | None
    mean_in_flight: float | None


def throughput(calls: pl.DataFrame, window: tuple[int, int] | None) -> Throughput:
    """Throughput over the declared window (start, end in ns); all None without one."""
    if window is None:
        return Throughput(0, None, None, None, None, None, None, None, None, None)
    start, end = window
    sent = calls.filter(pl.col("sent_ns").is_not_null() & pl.col("end_ns").is_not_null())
    inside = pl.col("phase").is_in(WINDOW_PHASES)
    done = sent.filter(inside & (pl.col("status") == "ok") & (pl.col("end_ns") <= end))
    running = sent.filter(inside & (pl.col("end_ns") > end))
    window_s = (end - start) / NS_PER_S if end > start else None
    intervals = np.column_stack((sent["sent_ns"].to_numpy(), sent["end_ns"].to_numpy())).clip(start, end)
    active_s = _covered(intervals) / NS_PER_S or None
    tokens_in, tokens_out = (int(done[name].sum() or 0) for name in ("prompt_tokens", "completion_tokens"))
    partial = int(running.select((pl.col("chunk_ns").list.eval(pl.element() <= end).list.sum()).sum()).item() or 0)
    in_flight = float((intervals[:, 1] - intervals[:, 0]).sum()) / NS_PER_S

    def rate(amount: float, seconds: float | None) -> float | None:
        return amount / seconds if seconds else None

    known = done["completion_tokens"].null_count() < done.height if done.height else False
    return Throughput(
        completed=done.height,
        window_s=window_s,
        active_s=active_s,
        active_total_tok_s=rate(tokens_in + tokens_out, active_s) if known else None,
        active_input_tok_s=rate(tokens_in, active_s) if known else None,
        active_output_tok_s=rate(tokens_out, active_s) if known else None,
        output_tok_s=rate(tokens_out, window_s) if known else None,
        output_with_partial_tok_s=rate(tokens_out + partial, window_s) if known or partial else None,
        requests_s=rate(done.height, window_s),
        mean_in_flight=rate(in_flight, window_s),
    )


def _covered(intervals: npt.NDArray[np.int64]) -> int:
    """Length of the union of the intervals."""
    if len(intervals) == 0:
        return 0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate(([ordered[0, 0]], reached[:-1]))
    return int(np.maximum(0, reached - np.maximum(ordered[:, 0], before)).sum())


# Cache and lengths


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prefix reuse over the measured calls, token-weighted; ratios are None where nothing was reported."""

    n: int
    """Calls that could report."""
    n_reporting: int
    n_invalid: int
    """Calls whose cached tokens exceed their prompt: left out."""
    hit: float | None
    ceiling: float | None
    efficiency: float | None


def cache_use(calls: pl.DataFrame) -> CacheUse:
    """Sum of cached / sum of prompt tokens beside what an unlimited cache could have served of the same calls."""
    good = measured(calls)
    reporting = good.filter(pl.col("cache_hit").is_not_null())
    prompt = int(reporting["prompt_tokens"].sum() or 0)
    cached = int(reporting["cached_tokens"].sum() or 0)
    hit = cached / prompt if prompt else None
    against = reporting if reporting.height else good.filter(pl.col("prompt_tokens") > 0)
    against = against.filter(pl.col("ceiling_cached_tokens").is_not_null())
    prompt_against = int(against["prompt_tokens"].sum() or 0)
    ceiling = int(against["ceiling_cached_tokens"].sum() or 0) / prompt_against if prompt_against else None
    return CacheUse(
        n=good.height,
        n_reporting=reporting.height,
        n_invalid=int(good["cache_invalid"].sum() or 0),
        hit=hit,
        ceiling=ceiling,
        efficiency=hit / ceiling if hit is not None and ceiling else None,
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Planned against achieved lengths of the measured calls that report usage."""

    n: int
    planned_input: int
    input: int
    input_off: int
    """Calls whose prompt has another length than planned."""
    input_off_max: int
    planned_output: int
    output: int
    output_off: int
    """Calls whose output has another length than planned."""


def lengths(calls: pl.DataFrame) -> Lengths:
    """Planned and achieved tokens; a planned output of 0 was asked for as 1."""
    good = measured(calls).filter(pl.col("prompt_tokens").is_not_null() & pl.col("completion_tokens").is_not_null())
    planned_out = good["planned_output_tokens"].clip(1)
    input_error = (good["prompt_tokens"] - good["planned_input_tokens"]).abs()
    return Lengths(
        n=good.height,
        planned_input=int(good["planned_input_tokens"].sum() or 0),
        input=int(good["prompt_tokens"].sum() or 0),
        input_off=int((input_error > 0).sum()),
        input_off_max=int(input_error.cast(pl.Int64).max() or 0),  # type: ignore[arg-type]
        planned_output=int(planned_out.sum() or 0),
        output=int(good["completion_tokens"].sum() or 0),
        output_off=int((good["completion_tokens"] != planned_out).sum()),
    )
