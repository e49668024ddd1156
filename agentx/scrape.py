"""Servers' Prometheus counters: what happened between two looks, under one name whoever serves.

Servers name the same quantity differently and have renamed it; `QUANTITIES` and `HISTOGRAMS` are the
table of those names, the first known one wins. Counters only make sense as differences: between two
looks, series by series, summed over engines. A series that fell was restarted: its new value counts,
and the restart is told. What no known name gives is None, not 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentx.http import HttpClient

Names = tuple[str, ...]

QUANTITIES: Mapping[str, tuple[Names, ...]] = {
    # Each entry: alternatives, newest first; an alternative is names that are summed.
    "cache_queries": (
        ("vllm:prefix_cache_queries_total",),
        ("vllm:gpu_prefix_cache_queries_total",),
        ("sglang:prompt_tokens_total",),
        ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    ),
    "cache_hits": (
        ("vllm:prefix_cache_hits_total",),
        ("vllm:gpu_prefix_cache_hits_total",),
        ("sglang:cached_tokens_total",),
        ("llamacpp:prompt_tokens_cached_total",),
    ),
    "external_queries": (("vllm:external_prefix_cache_queries_total",),),
    "external_hits": (("vllm:external_prefix_cache_hits_total",),),
    "prompt_tokens": (
        ("vllm:prompt_tokens_total",),
        ("sglang:prompt_tokens_total",),
        ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    ),
    "generation_tokens": (
        ("vllm:generation_tokens_total",),
        ("sglang:generation_tokens_total",),
        ("llamacpp:tokens_predicted_total",),
    ),
    "preemptions": (("vllm:num_preemptions_total",),),
}
HISTOGRAMS: Mapping[str, Names] = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "itl": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
}
LOOK_S = 10.0
"""Limit of one look in seconds."""
_PREFIXES = ("vllm", "sglang", "llamacpp")

Series = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Every sample of one exposition: name to labels to value."""

    samples: Mapping[str, Mapping[Series, float]]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of what fell under each bound, in seconds; the last bound is infinite."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    total_s: float | None

    @property
    def n(self) -> float:
        """Observations."""
        return self.cumulative[-1] if self.cumulative else 0.0

    @property
    def mean_s(self) -> float | None:
        """Mean of the observations."""
        return self.total_s / self.n if self.n and self.total_s is not None else None

    def percentile(self, q: float) -> tuple[float | None, float | None]:
        """(value, lower bound) of a percentile in seconds, interpolated within its bucket.

        Where it falls beyond the last finite bound the value is None and the bound is what is known.
        """
        wanted, below, low = q * self.n, 0.0, 0.0
        for bound, reached in zip(self.bounds, self.cumulative, strict=True):
            if self.n and reached >= wanted and reached > below:
                if bound == float("inf"):
                    return None, low
                return low + (bound - low) * (wanted - below) / (reached - below), low
            below, low = reached, bound if bound != float("inf") else low
        return None, None


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two looks."""

    counts: Mapping[str, float | None]
    histograms: Mapping[str, Histogram | None]
    sources: Mapping[str, str] = field(default_factory=dict)
    """The server's own name of each quantity that was found."""
    restarted: tuple[str, ...] = ()
    """Samples that fell: their server was restarted in between."""

    @property
    def cache_hit(self) -> float | None:
        """Tokens served from any tier / tokens looked up in the first: the other tiers are asked for the rest only."""
        queries, hits = self.counts["cache_queries"], self.counts["cache_hits"]
        if not queries or hits is None:
            return None
        return (hits + (self.counts["external_hits"] or 0.0)) / queries

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = {
            "counts": dict(self.counts),
            "cache_hit": self.cache_hit,
            "sources": dict(self.sources),
            "restarted": list(self.restarted),
        }
        for name, histogram in self.histograms.items():
            if histogram is not None:
                p50, at_least = histogram.percentile(0.5)
                found[name] = {"n": histogram.n, "p50_s": p50, "p50_at_least_s": at_least, "mean_s": histogram.mean_s}
        return found


def look(text: str) -> Look:
    """The samples of an exposition; raises ValueError where it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, dict[Series, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                continue
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(_plain(sample.name), {})[labels] = float(sample.value)
    return Look(samples)


def change(before: Look, after: Look, model: str | None = None) -> Change:
    """What happened between two looks at one server; series of other models are left out."""
    counts: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    restarted: set[str] = set()
    for quantity, alternatives in QUANTITIES.items():
        counts[quantity] = None
        for names in alternatives:
            if all(name in after.samples for name in names):
                counts[quantity] = sum(_grown(before, after, name, model, restarted) for name in names)
                sources[quantity] = " + ".join(names)
                break
    histograms = {name: _histogram(before, after, names, model, restarted) for name, names in HISTOGRAMS.items()}
    return Change(counts, histograms, sources, tuple(sorted(restarted)))


def n_series(after: Look, name: str, model: str | None = None) -> int:
    """Series of a sample that belong to the model: one per engine."""
    return sum(_of_model(labels, model) for labels in after.samples.get(name, {}))


def _plain(name: str) -> str:
    """`sglang_x` as `sglang:x`: routers and versions differ in the mark after the prefix."""
    prefix, mark, rest = name.partition("_")
    return f"{prefix}:{rest}" if mark and prefix in _PREFIXES else name


def _of_model(labels: Series, model: str | None) -> bool:
    named = dict(labels).get("model_name")
    return model is None or named is None or named == model


def _grown(before: Look, after: Look, name: str, model: str | None, restarted: set[str]) -> float:
    """The sum of what each series of a sample grew by."""
    old, total = before.samples.get(name, {}), 0.0
    for labels, value in after.samples[name].items():
        if not _of_model(labels, model):
            continue
        start = old.get(labels, 0.0)
        if value < start:
            restarted.add(name)
            start = 0.0
        total += value - start
    return total


def _bound(text: str | None) -> float | None:
    """A bucket's upper bound; None where it is no number."""
    try:
        return None if text is None or math.isnan(float(text)) else float(text)
    except ValueError:
        return None


def _histogram(before: Look, after: Look, names: Names, model: str | None, restarted: set[str]) -> Histogram | None:
    name = next((name for name in names if f"{name}_bucket" in after.samples), None)
    if name is None:
        return None
    bucket, old = f"{name}_bucket", before.samples.get(f"{name}_bucket", {})
    counts: dict[float, float] = {}
    for labels, value in after.samples[bucket].items():
        bound = _bound(dict(labels).get("le"))
        if bound is None or not _of_model(labels, model):
            continue
        start = old.get(labels, 0.0)
        if value < start:
            restarted.add(bucket)
            start = 0.0
        counts[bound] = counts.get(bound, 0.0) + value - start
    known = f"{name}_sum" in after.samples
    total = _grown(before, after, f"{name}_sum", model, restarted) if known else None
    bounds = tuple(sorted(counts))
    return Histogram(bounds, tuple(counts[bound] for bound in bounds), total)


class ServerWatch:
    """Looks at servers' `/metrics` at the start of a window and at its end; what it cannot see is left out."""

    def __init__(self, clients: Sequence[HttpClient], model: str | None) -> None:
        """`clients` are its own: they are closed by `finish`."""
        self._clients = clients
        self._model = model
        self._first: dict[str, Look] = {}
        self._before: dict[str, Look] = {}

    async def begin(self) -> None:
        """Look before the first call."""
        self._first = self._before = await self._look()

    async def open_window(self) -> None:
        """Look as the window opens."""
        self._before = await self._look()

    async def finish(self) -> dict[str, Any]:
        """What happened by URL: since the window opened, and as `whole_run` the tokens counted since `begin`."""
        after = await self._look()
        for client in self._clients:
            client.close()
        found = {}
        for url, before in self._before.items():
            if url in after:
                found[url] = change(before, after[url], self._model).to_json()
                whole = change(self._first[url], after[url], self._model).counts if url in self._first else {}
                found[url]["whole_run"] = {name: whole.get(name) for name in ("prompt_tokens", "generation_tokens")}
        return found

    async def _look(self) -> dict[str, Look]:
        found = {}
        for client in self._clients:
            exchange = await client.fetch("/metrics", limit_s=LOOK_S)
            if exchange.status != 200 or exchange.error_kind is not None:
                continue
            with contextlib.suppress(ValueError):
                found[client.url] = look(exchange.content().decode("utf-8", "replace"))
        return found
