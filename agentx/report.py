"""The report: what a run measured, with its n beside everything, and what is doubtful about it.

A pure function of a run. A doubt is one sentence on why a figure may not mean what it seems to; it
stands right under the headline, and its `kind` is a word that scripts can look for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from agentx import metrics, store
from agentx.runs import Run, load_run
from agentx.units import NS_PER_MS, NS_PER_S, format_count, format_duration, format_percent

REPORT = "report.json"
SCHEMA_VERSION = 1

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


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason not to take the figures at face value."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the report says."""

    notice: str | None
    """What must be read before any figure: that the deployment was simulated."""
    summary: str
    doubts: tuple[Doubt, ...]
    distributions: dict[str, metrics.Summary]
    lag: metrics.Summary
    counts: dict[str, dict[str, int]]
    outcomes: metrics.Outcomes
    error_kinds: dict[str, int]
    """Failures and refusals by kind."""
    skipped: dict[str, int]
    """Turns that were never sent, by reason."""
    sessions: int
    """Session trees that the measured calls belong to."""
    throughput: metrics.Throughput | None
    """None where the measured window never opened."""
    cache: metrics.CacheUse
    lengths: dict[str, metrics.Lengths]
    facts: dict[str, Any]
    row: dict[str, Any]
    """The run in the shape of the seed's Table 7."""

    @property
    def headline(self) -> str:
        """The notice, if there is one, and the summary: never quote one without the other."""
        return f"{self.notice}. {self.summary}" if self.notice else self.summary

    def to_json(self) -> dict[str, Any]:
        """As plain data: units are in the names, ratios from 0 to 1, null where not measured."""
        return {
            "schema_version": SCHEMA_VERSION,
            "headline": self.headline,
            "doubts": [asdict(doubt) for doubt in self.doubts],
            "distributions": {name: summary.to_json() for name, summary in self.distributions.items()},
            "lag_ns": self.lag.to_json(),
            "counts": self.counts,
            "outcomes": {
                **asdict(self.outcomes),
                "error_rate": self.outcomes.error_rate,
                "cut_share": self.outcomes.cut_share,
            },
            "error_kinds": self.error_kinds,
            "skipped": self.skipped,
            "sessions": self.sessions,
            "throughput": asdict(self.throughput) if self.throughput else None,
            "cache": asdict(self.cache),
            "lengths": {name: asdict(lengths) for name, lengths in self.lengths.items()},
            "facts": self.facts,
            "row": self.row,
        }


def make_report(run: Run) -> Report:
    """The report of a run, finished or not."""
    calls, manifest = run.calls, run.manifest
    good = metrics.measured(calls)
    window = measured_window(run)
    distributions = metrics.distributions(good)
    used = metrics.throughput(calls, window) if window else None
    cache = metrics.cache_use(good)
    lag = metrics.lag(calls)
    lengths = metrics.lengths(good)
    outcomes = metrics.outcomes(calls)
    facts = facts_of(manifest)
    doubts = (
        *_ending_doubts(run, window),
        *_failure_doubts(run, outcomes),
        *_sample_doubts(good, distributions),
        *_usage_doubts(good, cache),
        *_length_doubts(lengths),
        *_lag_doubts(lag, distributions["ttft_ns"]),
        *_deployment_doubts(good, facts),
        *(Doubt("warning", str(text)) for text in manifest.get("warnings", [])),
    )
    return Report(
        notice=_notice(manifest),
        summary=_summary(facts, used, distributions, cache),
        doubts=doubts,
        distributions=distributions,
        lag=lag,
        counts=metrics.counts(calls),
        outcomes=outcomes,
        error_kinds=metrics.kinds(calls, [*metrics.FAILED, "overflow"]),
        skipped=metrics.kinds(calls, ["skipped"]),
        sessions=good["root_session_id"].n_unique(),
        throughput=used,
        cache=cache,
        lengths=lengths,
        facts=facts,
        row=_row(facts, distributions, used, cache),
    )


def write_report(run: Run | Path) -> Report:
    """The report of a run or of the run in a folder, also written into the folder as `report.json`."""
    loaded = load_run(run) if isinstance(run, Path) else run
    report = make_report(loaded)
    store.atomic_write_json(loaded.folder / REPORT, report.to_json())
    return report


def measured_window(run: Run) -> tuple[int, int] | None:
    """(start, end) in ns of the window that figures are over; None where it never opened.

    It ends where the run did, if that was earlier: at the last sign of life of a run that was killed. A
    run killed before it had told its window opened it when the last warm-up call ended; without warm-up
    when the first call was due.
    """
    calls, manifest = run.calls, run.manifest
    window = manifest.get("window")
    if window is None:
        first = calls.filter((pl.col("phase") == "measure") & pl.col("sent_ns").is_not_null())["due_ns"].min()
        if not isinstance(first, int):
            return None
        warmed = _latest(calls.filter(pl.col("phase") == "warmup"))
        start = first if warmed is None else warmed
        end = start + manifest.get("settings", {}).get("duration_ns", 0)
    else:
        start, end = window["start_ns"], window["end_ns"]
    ended = (manifest.get("ended") or {}).get("at_ns")
    if ended is None:
        ended = _latest(calls)
    return start, end if ended is None else max(start, min(end, ended))


def _latest(calls: pl.DataFrame) -> int | None:
    """Time of the last thing seen of any call."""
    latest = calls.select(pl.max_horizontal("sent_ns", "headers_ns", "end_ns").max()).item()
    return None if latest is None else int(latest)


def _notice(manifest: Mapping[str, Any]) -> str | None:
    deployment = manifest.get("deployment", {})
    if deployment.get("kind") != "sim":
        return None
    return f"Simulated deployment {deployment.get('name')}, virtual time: no hardware was measured"


def _summary(
    facts: dict[str, Any],
    used: metrics.Throughput | None,
    found: dict[str, metrics.Summary],
    cache: metrics.CacheUse,
) -> str:
    ttft, itl = found["ttft_ns"], found["itl_ns"]
    if used is None:
        return "Nothing was measured: the measured window never opened"
    over = format_duration(used.window_s and used.window_s * NS_PER_S)
    return (
        f"{used.completed:,} turns completed in {over} on {facts['concurrency']} lanes: TTFT P50 "
        f"{format_duration(ttft.p50)} (n {ttft.n:,}), ITL P50 {format_duration(itl.p50)} (n {itl.n:,}), cache hit "
        f"{format_percent(cache.hit)} of a ceiling of {format_percent(cache.ceiling)} (n {cache.n_reporting:,})"
    )


FACTS = {
    "deployment": (
        "kind", "urls", "engine", "model", "max_model_len", "max_model_len_source", "cache_block",
        "cache_block_source", "endpoint", "prompt", "prompt_exact", "prompt_words", "template_tokens", "min_tokens",
        "ignore_eos", "tls_insecure",
    ),
    "settings": (
        "concurrency", "duration_ns", "grace_ns", "drain", "ramp_ns", "start_window", "think_cap_ns", "idle_cap_ns",
        "cache_bust", "max_context",
    ),
}  # fmt: skip
"""What of the manifest makes a run comparable with another, by section."""


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the run comparable with another; None where the manifest does not say."""
    profile, corpus = manifest.get("profile", {}), manifest.get("corpus", {})
    return {
        "platform": manifest.get("deployment", {}).get("name"),
        "profile": profile.get("name") or corpus.get("name"),
        "profile_digest": profile.get("digest"),
        "corpus_digest": corpus.get("digest"),
        "corpus_sessions": corpus.get("sessions"),
        "corpus_turns": corpus.get("turns"),
        "seed": manifest.get("seed"),
        **{key: manifest.get(section, {}).get(key) for section, keys in FACTS.items() for key in keys},
        "agentx_version": manifest.get("agentx_version"),
        "host": manifest.get("host"),
        "clock": manifest.get("clock"),
        "started_at": manifest.get("started_at"),
        "ended": manifest.get("ended"),
    }


def _row(
    facts: dict[str, Any],
    found: dict[str, metrics.Summary],
    used: metrics.Throughput | None,
    cache: metrics.CacheUse,
) -> dict[str, Any]:
    return {
        "platform": facts["platform"],
        "profile": facts["profile"],
        "con": facts["concurrency"],
        "requests": used.completed if used else 0,
        "input_tokens_p99": found["input_tokens"].p99,
        "input_tokens_max": found["input_tokens"].max,
        "ttft_ns_p50": found["ttft_ns"].p50,
        "itl_ns_p50": found["itl_ns"].p50,
        "active_total_tok_s": used.active_total_tok_s if used else None,
        "cache_hit": cache.hit,
    }


# The doubts


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
            "The run was interrupted: its window is shorter than asked for, and ends with the calls in flight.",
        )
    elif reason not in (None, "window"):
        yield Doubt("ended_early", f"The run ended early: {reason}.")
    elif not run.complete:
        yield Doubt("not_closed", "The run could not be closed in order: it is read from its journal.")
    if window is None:
        yield Doubt("no_window", "No call was sent inside a measured window: warm-up never ended, or nothing was sent.")


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
    moved = [name.upper() for name, q in metrics.QUANTILES.items() if cut and cut >= 1 - q]
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


def _sample_doubts(good: pl.DataFrame, found: dict[str, metrics.Summary]) -> Iterator[Doubt]:
    if good.height == 0:
        yield Doubt("no_calls", "No call that was sent inside the window completed: there is no latency to report.")
        return
    few = []
    for name, key in (("TTFT", "ttft_ns"), ("ITL", "itl_ns")):
        missing = found[key].missing()
        if missing:
            needs = [f"{name.upper()} needs {metrics.needed(metrics.QUANTILES[name])}" for name in missing]
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


def _lag_doubts(lag: metrics.Summary, ttft: metrics.Summary) -> Iterator[Doubt]:
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
