"""The doubts of a report: why a figure may not mean what it seems to, one sentence each.

A doubt's `kind` is a word that scripts can look for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from agentx import metrics
from agentx.audit import Audit, disagreements
from agentx.runs import Run
from agentx.stats import QUANTILES, Summary, needed
from agentx.units import NS_PER_MS, format_count, format_duration, format_percent

LAG_FLOOR_NS = 10 * NS_PER_MS
LAG_SHARE = 0.01
"""A lag is doubtful where its P99 is over this share of the TTFT median, and over the floor: below that it
moves neither the load nor a response time that anybody could read."""
LENGTH_SHARE = 0.01
"""Planned and achieved lengths may differ by this share, in sum or in how many calls."""
LENGTH_TOKENS = 8
"""A length within this many tokens of its plan may be off in any number of calls."""
ERROR_SHARE = 0.01
CEILING_SHARE = 1.01
"""A cache hit over this share of the ceiling was not earned by this run's own prompts."""
FEW_SESSIONS = 10
"""Turns of one session are alike; under so many sessions one of them moves a median."""
BUDGET_SHARE = 0.01
BUDGET_FLOOR_NS = 2 * NS_PER_MS
"""The client's own error is too large over this share of a run's median, and over the floor."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason not to take the figures at face value."""

    kind: str
    text: str


def doubts_of(
    run: Run,
    good: pl.DataFrame,
    facts: dict[str, Any],
    window: tuple[int, int] | None,
    found: dict[str, Summary],
    lag: Summary,
    cache: metrics.CacheUse,
    lengths: dict[str, metrics.Lengths],
    outcomes: metrics.Outcomes,
    audited: Audit,
) -> Iterator[Doubt]:
    """Every doubt of a run, the gravest first; `good` are its measured calls."""
    yield from _ending_doubts(run, window)
    yield from _failure_doubts(run, outcomes)
    yield from _sample_doubts(good, found, window)
    yield from _usage_doubts(good, cache)
    yield from _length_doubts(lengths)
    yield from (Doubt(kind, text) for kind, text in disagreements(audited, facts["ignore_eos"]))
    yield from _lag_doubts(lag, found["ttft_ns"])
    yield from _client_doubts(run.manifest)
    yield from _deployment_doubts(good, facts)
    for text in run.manifest.get("warnings", []):
        yield Doubt("warning", str(text))


def client_error(manifest: Mapping[str, Any], found: dict[str, Summary]) -> str | None:
    """That the client's own error is too large for this run's medians; None where it is not, or not known."""
    budget, parts = manifest.get("client_budget"), []
    for name in ("ttft", "itl"):
        if not budget:
            break
        median, worst = found[f"{name}_ns"].p50, budget[f"{name}_p99_ns"]
        if median is not None and worst > max(BUDGET_FLOOR_NS, BUDGET_SHARE * median):
            parts.append(f"{name.upper()} by up to {format_duration(worst)} (median {format_duration(median)})")
    if parts:
        return f"The client itself is off too far, {' and '.join(parts)}"
    checked = "client_budget" in manifest and (manifest.get("settings") or {}).get("self_check")
    if checked and not budget:
        return "The client itself is too slow for so many lanes: no call of its self-check completed"
    stall, ttft = _worst_stall(manifest), found["ttft_ns"].p50
    if stall and ttft is not None and stall > max(LAG_FLOOR_NS, BUDGET_SHARE * ttft):
        return f"The client itself stalled for {format_duration(stall)} (P99; TTFT median {format_duration(ttft)})"
    return None


def _worst_stall(manifest: Mapping[str, Any]) -> float:
    """P99 of the event loop's stalls in ns; 0 where it is not known."""
    return float(((manifest.get("client") or {}).get("loop_stall_ns") or {}).get("p99") or 0)


def _ending_doubts(run: Run, window: tuple[int, int] | None) -> Iterator[Doubt]:
    reason = (run.manifest.get("ended") or {}).get("reason")
    if reason == "killed":
        yield Doubt(
            "killed",
            "The run was killed: up to 2 s before the kill are missing, and calls on their way count as cancelled.",
        )
    elif reason == "interrupted":
        yield Doubt(
            "interrupted",
            "The run was interrupted: its window, if it opened, is shorter than asked for and ends at the interrupt.",
        )
    elif reason == "stalled":
        yield Doubt("stalled", _stalled(run))
    elif reason not in (None, "window"):
        yield Doubt("ended_early", f"The run ended early: {reason}.")
    elif not run.complete:
        yield Doubt("not_closed", "The run could not be closed in order: it is read from its journal.")
    if window is None:
        yield Doubt("no_window", "No call was sent inside a measured window: warm-up never ended, or nothing was sent.")


def _stalled(run: Run) -> str:
    """What was in flight when nothing came any more, and what the canary said then."""
    cut = run.calls.filter((pl.col("status") == "cancelled") & (pl.col("error_message") == "stalled"))
    silent = (run.manifest.get("settings") or {}).get("stall_ns")
    canary = run.manifest.get("canary_after")
    after = "" if canary is None else f" The canary after it: {canary}."
    calls = _several(cut.height, "call")
    longest = metrics.column(cut, "planned_input_tokens").max(initial=0)
    return (
        f"The run stalled: for {format_duration(silent)} no byte came on any of {calls} in flight "
        f"(the longest prompt {format_count(longest)} tokens).{after}"
    )


def _failure_doubts(run: Run, outcomes: metrics.Outcomes) -> Iterator[Doubt]:
    rate, cut = outcomes.error_rate, outcomes.cut_share
    if rate is not None and rate > ERROR_SHARE:
        yield Doubt(
            "errors",
            f"{format_percent(rate)} of the calls failed ({outcomes.failed:,} of {outcomes.ok + outcomes.failed:,}): "
            "latencies are those of the calls that did not.",
        )
    if outcomes.overflow:
        yield Doubt(
            "overflow",
            f"The server refused {outcomes.overflow:,} of {outcomes.sent:,} calls for their context length: the rest "
            "of their sessions was not played.",
        )
    moved = [name.upper() for name, q in QUANTILES.items() if cut and cut >= 1 - q]
    if cut and moved:
        ended = (run.manifest.get("ended") or {}).get("reason")
        hint = " (--drain or a longer --grace keeps them)" if ended == "window" else ""
        yield Doubt(
            "cut_off",
            f"{outcomes.cancelled:,} of {outcomes.sent:,} calls were still running at the end and were cut: the "
            f"longest are missing, so {_listed(moved)} may read too low{hint}.",
        )
    dropped = run.calls.filter(pl.col("error_kind") == "context_gate")
    if dropped.height:
        yield Doubt(
            "context_gate",
            f"{dropped['root_session_id'].n_unique():,} sessions ({dropped.height:,} turns) do not fit the context "
            "window and were left out.",
        )


def _sample_doubts(good: pl.DataFrame, found: dict[str, Summary], window: tuple[int, int] | None) -> Iterator[Doubt]:
    if good.height == 0:
        yield Doubt("no_calls", "No call that was sent inside the window completed: there is no latency to report.")
        return
    if window is not None and good.filter(pl.col("end_ns") <= window[1]).height == 0:
        yield Doubt("short_window", "The window was over before any call ended: there are no rates. Give a longer one.")
    few = []
    for name, key in (("TTFT", "ttft_ns"), ("ITL", "itl_ns")):
        missing = found[key].missing()
        if missing:
            needs = [f"{name.upper()} needs {needed(QUANTILES[name])}" for name in missing]
            few.append(f"{name} has n {found[key].n:,} ({', '.join(needs)})")
    if few:
        yield Doubt("few_samples", f"Too few samples for some percentiles: {'; '.join(few)}.")
    sessions = good["root_session_id"].n_unique()
    if sessions < FEW_SESSIONS:
        yield Doubt(
            "few_sessions",
            f"The calls come from {_several(sessions, 'session')} only: turns of one session are alike, so n says "
            "more than it holds.",
        )
    silent = good["first_token_ns"].null_count()
    if silent:
        yield Doubt("no_first_token", f"{silent:,} of {good.height:,} calls completed without a visible first token.")


def _usage_doubts(good: pl.DataFrame, cache: metrics.CacheUse) -> Iterator[Doubt]:
    n = good.height
    if n == 0:
        return
    silent = max(good[name].null_count() for name in ("completion_tokens", "prompt_tokens"))
    if silent:
        yield Doubt(
            "usage_missing",
            f"{silent:,} of {n:,} calls report no usage: they are missing from token counts and ITL"
            f"{', and token rates are unknown' if silent > (1 - metrics.COVERAGE) * n else ''} (does the server take "
            "stream_options.include_usage?).",
        )
    if cache.n_reporting + cache.n_invalid == 0:
        yield Doubt("cache_unknown", "The server reports no cached tokens: the cache hit is unknown, not 0.")
    elif cache.n_reporting + cache.n_invalid < n:
        yield Doubt(
            "cache_coverage",
            f"Only {cache.n_reporting:,} of {n:,} calls report cached tokens ({format_percent(cache.coverage)}): the "
            "cache hit is over those.",
        )
    if cache.n_invalid:
        yield Doubt(
            "cache_invalid",
            f"{cache.n_invalid:,} of {n:,} calls report more cached than prompt tokens: the cache hit leaves them out.",
        )
    if cache.efficiency is not None and cache.efficiency > CEILING_SHARE:
        yield Doubt(
            "over_ceiling",
            f"The cache hit is {format_percent(cache.efficiency)} of its ceiling: the server held prompts from before "
            "this run, or its cache unit is smaller than assumed.",
        )


def _length_doubts(lengths: dict[str, metrics.Lengths]) -> Iterator[Doubt]:
    for name, of in lengths.items():
        apart = abs(of.achieved - of.planned) > LENGTH_SHARE * of.planned
        many = of.n_off > LENGTH_SHARE * of.n and of.worst > LENGTH_TOKENS
        if apart or many:
            yield Doubt(
                f"{name}_length",
                f"Planned and achieved {name} differ in {of.n_off:,} of {of.n:,} calls, by up to {of.worst:,} tokens: "
                f"{format_count(of.planned)} planned, {format_count(of.achieved)} achieved.",
            )


def _lag_doubts(lag: Summary, ttft: Summary) -> Iterator[Doubt]:
    name, worst = ("P99", lag.p99) if lag.p99 is not None else ("max", lag.max)
    if worst is not None and ttft.p50 is not None and worst > max(LAG_FLOOR_NS, LAG_SHARE * ttft.p50):
        yield Doubt(
            "lag",
            f"The client sent late: lag {name} {format_duration(worst)} (n {lag.n:,}) against a TTFT median of "
            f"{format_duration(ttft.p50)}.",
        )


def _deployment_doubts(good: pl.DataFrame, facts: dict[str, Any]) -> Iterator[Doubt]:
    if facts["prompt_exact"] is False:
        yield Doubt(
            "prompt_inexact", "Prompts are not exact to the token: the tokenizer is not known (give --tokenizer)."
        )
    others = sorted(set(good["response_model"].drop_nulls().unique()) - {facts["model"]})
    if others and facts["model"] is not None:
        yield Doubt("model", f"The model asked for is {facts['model']}, the answers name {_listed(others)}.")
    if facts["tls_insecure"]:
        yield Doubt("tls_insecure", "Certificates were not checked: who answered is not proven.")


def _listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _several(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _client_doubts(manifest: Mapping[str, Any]) -> Iterator[Doubt]:
    if _worst_stall(manifest) > LAG_FLOOR_NS:
        stall = manifest["client"]["loop_stall_ns"]
        yield Doubt(
            "client_stall",
            f"The client's event loop stalled: P99 {format_duration(stall['p99'])}, worst "
            f"{format_duration(stall['max'])} (n {stall['n']:,}). Times are read that much too late.",
        )
