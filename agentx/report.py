"""The report: what a run measured, with its n beside everything, and what is doubtful about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from agentx import metrics, store
from agentx.runs import Run
from agentx.units import NS_PER_MS, format_count, format_duration, format_percent

LAG_FLOOR_NS = 5 * NS_PER_MS
LAG_SHARE = 0.01
"""A lag is doubtful where its P99 is over this share of the TTFT median, and over the floor."""
COVERAGE = 0.999
"""Share of calls that must report usage before totals are taken as whole."""
LENGTH_SHARE = 0.01
"""Planned and achieved lengths may differ by this share in sum."""
ERROR_SHARE = 0.01
CUT_SHARE = 0.10
REPORT = "report.json"

SHOWN = (
    "ttft_ns",
    "ttfc_ns",
    "itl_ns",
    "icl_ns",
    "e2e_ns",
    "response_ns",
    "input_tokens",
    "output_tokens",
    "cache_hit",
)
"""Distributions in the order they are shown."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the report says."""

    headline: str
    doubts: tuple[str, ...]
    distributions: dict[str, metrics.Summary]
    lag: metrics.Summary
    counts: dict[str, dict[str, int]]
    error_kinds: dict[str, int]
    error_rate: float | None
    throughput: metrics.Throughput
    cache: metrics.CacheUse
    lengths: metrics.Lengths
    facts: dict[str, Any]
    row: dict[str, Any]
    """The run in the shape of the seed's Table 7."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "headline": self.headline,
            "doubts": list(self.doubts),
            "distributions": {name: summary.to_json() for name, summary in self.distributions.items()},
            "lag_ns": self.lag.to_json(),
            "counts": self.counts,
            "error_kinds": self.error_kinds,
            "error_rate": self.error_rate,
            "throughput": asdict(self.throughput),
            "cache": asdict(self.cache),
            "lengths": asdict(self.lengths),
            "facts": self.facts,
            "row": self.row,
        }


def make_report(run: Run) -> Report:
    """The report of a run, finished or not."""
    calls, manifest = run.calls, run.manifest
    window = _window(manifest)
    distributions = metrics.latencies(calls)
    used = metrics.throughput(calls, window)
    cache = metrics.cache_use(calls)
    lag = metrics.lag(calls)
    lengths = metrics.lengths(calls)
    rate = metrics.error_rate(calls)
    facts = _facts(manifest)
    doubts = [
        *_ending(run, window),
        *[str(text) for text in manifest.get("warnings", [])],
        *_sample_doubts(distributions, calls),
        *_usage_doubts(calls, cache),
        *_failure_doubts(calls, rate),
        *_length_doubts(lengths),
        *_lag_doubts(lag, distributions["ttft_ns"]),
        *_prompt_doubts(facts),
    ]
    return Report(
        headline=_headline(manifest, used, distributions),
        doubts=tuple(doubts),
        distributions={name: distributions[name] for name in SHOWN},
        lag=lag,
        counts=metrics.counts(calls),
        error_kinds=metrics.error_kinds(calls),
        error_rate=rate,
        throughput=used,
        cache=cache,
        lengths=lengths,
        facts=facts,
        row=_row(facts, distributions, used, cache, calls),
    )


def write_report(run: Run) -> Report:
    """The report, written beside the run as `report.json`."""
    report = make_report(run)
    store.atomic_write_json(Path(run.folder) / REPORT, report.to_json())
    return report


def _window(manifest: dict[str, Any]) -> tuple[int, int] | None:
    """The measured window; that of a run that was cut short ends where the run did."""
    window = manifest.get("window")
    if not window:
        return None
    ended = (manifest.get("ended") or {}).get("at_ns")
    end = window["end_ns"] if ended is None else max(window["start_ns"], min(window["end_ns"], ended))
    return window["start_ns"], end


def _headline(manifest: dict[str, Any], used: metrics.Throughput, found: dict[str, metrics.Summary]) -> str:
    deployment = manifest.get("deployment", {})
    ttft, itl = found["ttft_ns"], found["itl_ns"]
    text = (
        f"{used.completed:,} turns completed in the window, TTFT P50 {format_duration(ttft.p50)} (n {ttft.n:,}), "
        f"ITL P50 {format_duration(itl.p50)} (n {itl.n:,})"
    )
    if deployment.get("kind") == "sim":
        return f"Simulated deployment {deployment.get('name')}, virtual time: no hardware was measured. {text}"
    return text


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    """What makes the run comparable with another."""
    settings, deployment = manifest.get("settings", {}), manifest.get("deployment", {})
    corpus, profile = manifest.get("corpus", {}), manifest.get("profile", {})
    return {
        "platform": deployment.get("name"),
        "kind": deployment.get("kind"),
        "model": deployment.get("model"),
        "max_model_len": deployment.get("max_model_len"),
        "max_model_len_source": deployment.get("max_model_len_source"),
        "cache_block": deployment.get("cache_block"),
        "cache_block_source": deployment.get("cache_block_source"),
        "endpoint": deployment.get("endpoint"),
        "prompt": deployment.get("prompt"),
        "prompt_exact": deployment.get("prompt_exact"),
        "profile": profile.get("name") or corpus.get("name"),
        "profile_digest": profile.get("digest"),
        "corpus_digest": corpus.get("digest"),
        "corpus_sessions": corpus.get("sessions"),
        "seed": manifest.get("seed"),
        **{
            name: settings.get(name)
            for name in (
                "concurrency", "duration_ns", "grace_ns", "drain", "ramp_ns", "start_window", "think_cap_ns",
                "idle_cap_ns", "cache_bust", "max_context",
            )
        },
        "agentx_version": manifest.get("agentx_version"),
        "started_at": manifest.get("started_at"),
    }  # fmt: skip


def _row(
    facts: dict[str, Any],
    found: dict[str, metrics.Summary],
    used: metrics.Throughput,
    cache: metrics.CacheUse,
    calls: pl.DataFrame,
) -> dict[str, Any]:
    inputs = metrics.column(metrics.measured(calls), "prompt_tokens")
    return {
        "platform": facts["platform"],
        "profile": facts["profile"],
        "con": facts["concurrency"],
        "requests": used.completed,
        "input_p99": found["input_tokens"].p99,
        "input_max": float(inputs.max()) if len(inputs) else None,
        "ttft_p50_ns": found["ttft_ns"].p50,
        "itl_p50_ns": found["itl_ns"].p50,
        "active_tok_s": used.active_total_tok_s,
        "cache_hit": cache.hit,
    }


# The doubts, each one sentence


def _ending(run: Run, window: tuple[int, int] | None) -> list[str]:
    ended = run.manifest.get("ended") or {}
    reason = ended.get("reason")
    found = []
    if reason == "killed":
        found.append(
            "The run was killed: up to 2 s before the kill are missing, and calls on their way count as cancelled."
        )
    elif reason == "interrupted":
        found.append("The run was interrupted: the window is shorter than asked for.")
    elif reason not in (None, "window"):
        found.append(f"The run ended early: {reason}.")
    if window is None:
        found.append("The measured window never opened: nothing is measured.")
    return found


def _sample_doubts(found: dict[str, metrics.Summary], calls: pl.DataFrame) -> list[str]:
    doubts = []
    ttft = found["ttft_ns"]
    short = [name.upper() for name, q in metrics.QUANTILES.items() if ttft.n < metrics.needed(q)]
    if ttft.n == 0:
        doubts.append("No call completed inside the window: there is no latency to report.")
    elif short:
        doubts.append(
            f"Only {ttft.n:,} calls completed: too few for {', '.join(short)} (P99 needs {metrics.needed(0.99)})."
        )
    sessions = calls.filter(pl.col("status") == "ok")["root_session_id"].n_unique()
    if ttft.n and sessions < 10:
        doubts.append(f"The calls come from {sessions} sessions only: turns of one session are not independent.")
    done = calls.filter(pl.col("status") == "ok").height
    silent = done - calls.filter((pl.col("status") == "ok") & pl.col("first_token_ns").is_not_null()).height
    if silent:
        doubts.append(f"{silent:,} calls completed without a visible first token: they have no TTFT.")
    return doubts


def _usage_doubts(calls: pl.DataFrame, cache: metrics.CacheUse) -> list[str]:
    good = metrics.measured(calls)
    n = good.height
    if n == 0:
        return []
    doubts = []
    with_usage = n - good["completion_tokens"].null_count()
    if with_usage < COVERAGE * n:
        doubts.append(
            f"{n - with_usage:,} of {n:,} calls report no usage: their tokens are missing from totals and ITL "
            "(does the server take stream_options.include_usage?)."
        )
    if cache.n_reporting == 0:
        doubts.append("The server reports no cached tokens: the cache hit is unknown, not 0.")
    elif cache.n_reporting < COVERAGE * n:
        doubts.append(f"Only {cache.n_reporting:,} of {n:,} calls report cached tokens: the cache hit is over those.")
    if cache.n_invalid:
        doubts.append(
            f"{cache.n_invalid:,} calls report more cached than prompt tokens: they are left out of the cache hit."
        )
    if cache.efficiency is not None and cache.efficiency > 1.01:
        doubts.append(
            f"The cache hit is {format_percent(cache.efficiency)} of the ceiling: the server held prompts from before "
            "this run, or its cache unit is smaller than assumed."
        )
    return doubts


def _failure_doubts(calls: pl.DataFrame, rate: float | None) -> list[str]:
    doubts = []
    if rate is not None and rate > ERROR_SHARE:
        doubts.append(f"{format_percent(rate)} of the calls failed: latencies are those of the calls that did not.")
    inside = calls.filter(pl.col("phase").is_in(metrics.WINDOW_PHASES) & pl.col("sent_ns").is_not_null())
    cut = inside.filter(pl.col("status") == "cancelled").height
    if inside.height and cut > CUT_SHARE * inside.height:
        doubts.append(
            f"{cut:,} of {inside.height:,} calls were cut at the end: long calls are missing from the latencies. "
            "A longer window or --drain keeps them."
        )
    overflow = inside.filter(pl.col("status") == "overflow").height
    if overflow:
        doubts.append(
            f"The server refused {overflow:,} calls for their context length, although they were planned to fit."
        )
    dropped = calls.filter(pl.col("error_kind") == "context_gate")
    if dropped.height:
        doubts.append(
            f"{dropped['root_session_id'].n_unique():,} sessions ({dropped.height:,} turns) do not fit the context "
            "window and were dropped before the run."
        )
    return doubts


def _length_doubts(lengths: metrics.Lengths) -> list[str]:
    doubts = []
    for what, planned, got, off in (
        ("input", lengths.planned_input, lengths.input, lengths.input_off),
        ("output", lengths.planned_output, lengths.output, lengths.output_off),
    ):
        if planned and abs(got - planned) > LENGTH_SHARE * planned:
            doubts.append(
                f"Planned and achieved {what} differ: {format_count(planned)} against {format_count(got)} tokens, in "
                f"{off:,} of {lengths.n:,} calls."
            )
    return doubts


def _lag_doubts(lag: metrics.Summary, ttft: metrics.Summary) -> list[str]:
    worst = lag.p99 if lag.p99 is not None else lag.max
    if worst is None or ttft.p50 is None or worst <= max(LAG_FLOOR_NS, LAG_SHARE * ttft.p50):
        return []
    return [
        f"The client sent late: lag P99 {format_duration(worst)} against a TTFT median of {format_duration(ttft.p50)}."
    ]


def _prompt_doubts(facts: dict[str, Any]) -> list[str]:
    if facts["prompt_exact"] is False:
        return ["Prompts are not token-exact: the server's tokenizer is not known (give --tokenizer)."]
    return []
