"""The report: what a run measured, with its n beside everything, and what is doubtful about it.

A pure function of a run. What is doubtful (`agentx.doubts`) stands right under the headline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from agentx import metrics, store
from agentx.audit import Audit, audit
from agentx.doubts import Doubt, client_error, doubts_of
from agentx.runs import Run, load_run
from agentx.stats import Summary
from agentx.turns import FAILED
from agentx.units import NS_PER_S, format_duration, format_percent

REPORT = "report.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the report says."""

    notice: str | None
    """What must be read before any figure: that the deployment was simulated, or that the client is too slow."""
    summary: str
    doubts: tuple[Doubt, ...]
    distributions: dict[str, Summary]
    lag: Summary
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
    audit: Audit
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
            "audit": {**asdict(self.audit), "completed_share": self.audit.completed_share},
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
    audited = audit(calls, good, window, manifest.get("server"))
    return Report(
        notice=_notice(manifest, distributions),
        summary=_summary(facts, used, distributions, cache),
        doubts=tuple(doubts_of(run, good, facts, window, distributions, lag, cache, lengths, outcomes, audited)),
        distributions=distributions,
        lag=lag,
        counts=metrics.counts(calls),
        outcomes=outcomes,
        error_kinds=metrics.kinds(calls, [*FAILED, "overflow"]),
        skipped=metrics.kinds(calls, ["skipped"]),
        sessions=good["root_session_id"].n_unique(),
        throughput=used,
        cache=cache,
        lengths=lengths,
        audit=audited,
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
        end = start + (manifest.get("settings") or {}).get("duration_ns", 0)
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


def _notice(manifest: Mapping[str, Any], found: dict[str, Summary]) -> str | None:
    deployment = manifest.get("deployment") or {}
    if deployment.get("kind") == "sim":
        return f"Simulated deployment {deployment.get('name')}, virtual time: no hardware was measured"
    notes = [client_error(manifest, found)]
    if deployment.get("engine") == "agentx":
        notes.insert(0, f"Simulated deployment served at {deployment.get('name')}: no hardware was measured")
    return ". ".join(note for note in notes if note) or None


def _summary(
    facts: dict[str, Any],
    used: metrics.Throughput | None,
    found: dict[str, Summary],
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
        "ignore_eos", "tls_insecure", "proxies",
    ),
    "settings": (
        "concurrency", "duration_ns", "grace_ns", "drain", "ramp_ns", "start_window", "think_cap_ns", "idle_cap_ns",
        "cache_bust", "max_context", "plays", "stall_ns",
    ),
}  # fmt: skip
"""What of the manifest makes a run comparable with another, by section."""


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the run comparable with another; None where the manifest does not say."""
    profile, corpus = manifest.get("profile") or {}, manifest.get("corpus") or {}
    sections = {section: manifest.get(section) or {} for section in FACTS}
    return {
        "platform": sections["deployment"].get("name"),
        "profile": profile.get("name") or corpus.get("name"),
        "profile_digest": profile.get("digest"),
        "corpus_digest": corpus.get("digest"),
        "corpus_sessions": corpus.get("sessions"),
        "corpus_turns": corpus.get("turns"),
        "seed": manifest.get("seed"),
        **{key: sections[section].get(key) for section, keys in FACTS.items() for key in keys},
        "agentx_version": manifest.get("agentx_version"),
        "host": manifest.get("host"),
        "clock": manifest.get("clock"),
        "client_budget": manifest.get("client_budget"),
        "client": manifest.get("client"),
        "server": manifest.get("server"),
        "started_at": manifest.get("started_at"),
        "ended": manifest.get("ended"),
    }


def _row(
    facts: dict[str, Any],
    found: dict[str, Summary],
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
