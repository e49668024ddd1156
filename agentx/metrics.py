"""The one definition of each metric: pure functions of a run table.

Two tables go in. `calls` is a whole run: every call counts for what it is, and a call in flight is load
whatever becomes of it. `good` (from `measured`) is the part that a latency may come from: calls that
ended `ok` and were sent inside the window (phases measure and drain). Warm-up, failed, cut and refused
calls are counted, never measured.

What was not measured is null and leaves its sample; it is never 0. Times are nanoseconds, lengths
tokens, hits ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from agentx.stats import Summary, Values, summarise
from agentx.turns import FAILED
from agentx.units import NS_PER_S

WINDOW_PHASES = ("measure", "drain")
COVERAGE = 0.999
"""Share of completed calls that must report their tokens before a token rate is told: a sum over half of
the calls is half of the truth."""


def with_metrics(calls: pl.DataFrame) -> pl.DataFrame:
    """The run table with a column per metric that is defined per call, null where it is not.

    ITL is (last - first output) / (tokens - 1) with the server's count of tokens: null under two tokens,
    and where all output came at one instant, which says nothing about the time between tokens.
    A cache report that exceeds its prompt is invalid: null in `cache_hit`, true in `cache_invalid`.
    """
    first, last, sent = pl.col("first_token_ns"), pl.col("last_token_ns"), pl.col("sent_ns")
    tokens, prompt, cached = pl.col("completion_tokens"), pl.col("prompt_tokens"), pl.col("cached_tokens")
    reported = cached.is_not_null() & (prompt > 0)
    return calls.with_columns(
        ttft_ns=first - sent,
        ttfc_ns=pl.col("first_content_ns") - sent,
        itl_ns=pl.when((last > first) & (tokens >= 2)).then((last - first) / (tokens - 1)),
        e2e_ns=pl.col("end_ns") - sent,
        response_ns=pl.col("end_ns") - pl.col("due_ns"),
        lag_ns=sent - pl.col("due_ns"),
        cache_hit=pl.when(reported & cached.is_between(0, prompt)).then(cached / prompt),
        cache_invalid=(reported & ~cached.is_between(0, prompt)).fill_null(False),
        # A planned output of 0 is asked for as 1: servers refuse 0.
        input_error_tokens=prompt - pl.col("planned_input_tokens"),
        output_error_tokens=tokens - pl.col("planned_output_tokens").clip(1),
    )


def measured(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls that a latency may come from, with their metrics."""
    return with_metrics(calls.filter(pl.col("phase").is_in(WINDOW_PHASES) & (pl.col("status") == "ok")))


def column(calls: pl.DataFrame, name: str) -> Values:
    """The values of a column that are there."""
    return calls[name].drop_nulls().to_numpy().astype(np.float64)


def total(tokens: pl.Series) -> int:
    """The sum of what is there; a column of 32 bits would sum in 32 bits and overflow."""
    return int(tokens.cast(pl.Int64).sum())


def chunk_gaps(calls: pl.DataFrame) -> Values:
    """Gaps between successive output chunks of each call (ICL), pooled; a call of n chunks has n - 1."""
    listed = calls["chunk_ns"].drop_nulls()
    counts = listed.list.len().to_numpy()
    times = listed.filter(counts > 0).explode(empty_as_null=False).to_numpy()
    starts = np.cumsum(counts[counts > 0])[:-1]
    return np.delete(np.diff(times), starts - 1).astype(np.float64)


DISTRIBUTIONS: Mapping[str, str] = {
    "ttft_ns": "ttft_ns",
    "ttfc_ns": "ttfc_ns",
    "itl_ns": "itl_ns",
    "icl_ns": "",
    "e2e_ns": "e2e_ns",
    "response_ns": "response_ns",
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "cache_hit": "cache_hit",
}
"""Distributions of a report, in its order: name to column; ICL is pooled over calls."""


def distributions(good: pl.DataFrame) -> dict[str, Summary]:
    """The summaries of DISTRIBUTIONS over measured calls."""
    return {
        name: summarise(column(good, source) if source else chunk_gaps(good)) for name, source in DISTRIBUTIONS.items()
    }


def lag(calls: pl.DataFrame) -> Summary:
    """How late calls went out: sent - due, of every call sent inside the window, whatever became of it."""
    return summarise(column(with_metrics(_sent_inside(calls)), "lag_ns"))


# Counts


def counts(calls: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Rows by phase and status; only what occurs."""
    grouped = calls.group_by("phase", "status").len().sort("phase", "status")
    found: dict[str, dict[str, int]] = {}
    for phase, status, n in grouped.iter_rows():
        found.setdefault(phase, {})[status] = n
    return found


def kinds(calls: pl.DataFrame, statuses: Sequence[str]) -> dict[str, int]:
    """How often each kind of these statuses occurred, in any phase, most frequent first."""
    chosen = calls.filter(pl.col("status").is_in(list(statuses)))
    grouped = chosen.group_by(kind=pl.col("error_kind").fill_null(pl.col("status"))).len()
    return dict(grouped.sort(["len", "kind"], descending=[True, False]).iter_rows())


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of the calls sent inside the window."""

    sent: int
    ok: int
    failed: int
    overflow: int
    cancelled: int

    @property
    def error_rate(self) -> float | None:
        """Failed / (ok + failed): calls that we cut and context refusals are neither."""
        return self.failed / (self.ok + self.failed) if self.ok + self.failed else None

    @property
    def cut_share(self) -> float | None:
        """Cut / sent: so much of the sample, its longest calls, is missing from the latencies."""
        return self.cancelled / self.sent if self.sent else None


def outcomes(calls: pl.DataFrame) -> Outcomes:
    """The calls sent inside the window, by what became of them."""
    status = _sent_inside(calls)["status"]
    ok, failed, overflow, cancelled = (
        int(status.is_in(names).sum()) for names in (["ok"], [*FAILED], ["overflow"], ["cancelled"])
    )
    return Outcomes(status.len(), ok, failed, overflow, cancelled)


def _sent_inside(calls: pl.DataFrame) -> pl.DataFrame:
    return calls.filter(pl.col("phase").is_in(WINDOW_PHASES) & pl.col("sent_ns").is_not_null())


# The window


@dataclass(frozen=True, slots=True)
class Throughput:
    """What got done in the measured window; a rate is None where its time or its tokens are."""

    completed: int
    """Calls that ended ok inside the window: the turns that the rates below count."""
    n_input: int
    """Those of them that report prompt tokens."""
    n_output: int
    """Those of them that report output tokens."""
    input_tokens: int
    output_tokens: int
    window_s: float | None
    active_s: float | None
    """Part of the window with at least one call in flight."""
    active_total_tok_s: float | None
    active_input_tok_s: float | None
    active_output_tok_s: float | None
    output_tok_s: float | None
    """Output tokens of completed calls over the whole window."""
    output_with_partial_tok_s: float | None
    """Those, and what calls that the window's end found running had sent until then."""
    requests_s: float | None
    mean_in_flight: float | None


def throughput(calls: pl.DataFrame, window: tuple[int, int]) -> Throughput:
    """What got done from `window[0]` to `window[1]` ns. A call without an end is in flight until the latter."""
    start, end = window
    sent = calls.filter(pl.col("sent_ns").is_not_null()).with_columns(pl.col("end_ns").fill_null(end))
    ours = sent.filter(pl.col("phase").is_in(WINDOW_PHASES))
    inside = (pl.col("status") == "ok") & (pl.col("end_ns") <= end)
    done = ours.filter(inside)
    intervals = np.column_stack((sent["sent_ns"].to_numpy(), sent["end_ns"].to_numpy())).clip(start, end)
    window_s = (end - start) / NS_PER_S
    active_s = covered(intervals) / NS_PER_S
    tokens_in, tokens_out = (total(done[name]) for name in ("prompt_tokens", "completion_tokens"))
    n_in, n_out = (done.height - done[name].null_count() for name in ("prompt_tokens", "completion_tokens"))
    partial = arrived_tokens(ours.filter(~inside & pl.col("status").is_in(["ok", "cancelled"])), end)
    known_in, known_out = (done.height > 0 and n >= COVERAGE * done.height for n in (n_in, n_out))

    def rate(amount: float, seconds: float, known: bool = True) -> float | None:
        return amount / seconds if known and seconds > 0 else None

    return Throughput(
        completed=done.height,
        n_input=n_in,
        n_output=n_out,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        window_s=window_s or None,
        active_s=active_s or None,
        active_total_tok_s=rate(tokens_in + tokens_out, active_s, known_in and known_out),
        active_input_tok_s=rate(tokens_in, active_s, known_in),
        active_output_tok_s=rate(tokens_out, active_s, known_out),
        output_tok_s=rate(tokens_out, window_s, known_out),
        output_with_partial_tok_s=rate(tokens_out + partial, window_s, known_out or (done.height == 0 and partial > 0)),
        requests_s=rate(done.height, window_s),
        mean_in_flight=rate(float((intervals[:, 1] - intervals[:, 0]).sum()) / NS_PER_S, window_s),
    )


def arrived_tokens(calls: pl.DataFrame, end: int) -> float:
    """Output tokens of calls that had arrived by `end`: the share of their chunks where the total is known, else
    one token per chunk, which is the least it can be."""
    arrived = pl.col("chunk_ns").list.eval(pl.element() <= end).list.sum()
    chunks = pl.col("chunk_ns").list.len()
    per_chunk = pl.when(chunks > 0).then(pl.col("completion_tokens") / chunks).fill_null(1.0)
    return float(calls.select((arrived * per_chunk).sum()).item() or 0)


def covered(intervals: npt.NDArray[np.int64]) -> int:
    """Length of the union of intervals, given as rows of (start, end)."""
    if len(intervals) == 0:
        return 0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate((ordered[:1, 0], reached[:-1]))
    return int(np.maximum(0, reached - np.maximum(ordered[:, 0], before)).sum())


# Cache and lengths


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prefix reuse over the measured calls, token-weighted; ratios are None where nothing was reported."""

    n: int
    """Measured calls."""
    n_reporting: int
    """Those that report cached tokens, 0 included, and validly."""
    n_invalid: int
    """Those whose cached tokens exceed their prompt: left out."""
    n_ceiling: int
    """Those that the ceiling and the efficiency are over."""
    coverage: float | None
    hit: float | None
    ceiling: float | None
    efficiency: float | None
    """Sum of cached tokens / sum of ceilings, over the same calls."""


def cache_use(good: pl.DataFrame) -> CacheUse:
    """Sum of cached / sum of prompt tokens, beside what an unlimited prefix cache could have served of the same."""
    reporting = good.filter(pl.col("cache_hit").is_not_null())
    base = reporting if reporting.height else good.filter(pl.col("prompt_tokens") > 0)
    base = base.filter(pl.col("ceiling_cached_tokens").is_not_null())
    ceiling = _ratio(base, "ceiling_cached_tokens", "prompt_tokens")
    return CacheUse(
        n=good.height,
        n_reporting=reporting.height,
        n_invalid=int(good["cache_invalid"].sum()),
        n_ceiling=base.height,
        coverage=reporting.height / good.height if good.height else None,
        hit=_ratio(reporting, "cached_tokens", "prompt_tokens"),
        ceiling=ceiling,
        efficiency=_ratio(base, "cached_tokens", "ceiling_cached_tokens") if reporting.height else None,
    )


def _ratio(calls: pl.DataFrame, above: str, below: str) -> float | None:
    """Sum of one column / sum of another."""
    whole = total(calls[below])
    return total(calls[above]) / whole if whole else None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Planned against achieved lengths of the measured calls that report theirs; tokens."""

    n: int
    planned: int
    achieved: int
    n_off: int
    """Calls of another length than planned."""
    worst: int
    """Largest difference of one call, either way."""


def lengths(good: pl.DataFrame) -> dict[str, Lengths]:
    """The lengths of `input` and `output`."""
    found = {}
    for name, source in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        error = good[f"{name}_error_tokens"].drop_nulls().to_numpy().astype(np.int64)
        achieved = total(good[source])
        worst = int(np.abs(error).max()) if len(error) else 0
        found[name] = Lengths(len(error), achieved - int(error.sum()), achieved, int((error != 0).sum()), worst)
    return found
