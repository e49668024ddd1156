"""The gate: a corpus against its profile on every axis, before anything is sent.

Axes and bands are data (`gates/*.yaml`). A verdict is "in" where low <= measured / target <= high.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from agentx.axes import METRICS, Axes, measure, percentile
from agentx.corpus import Corpus
from agentx.corpus.parquet import CHANGED
from agentx.errors import FaultsError, InputError
from agentx.profile import AnyProfile, Number, Ordered, Profile, RecordedProfile, is_path
from agentx.resources import data_folder
from agentx.units import format_percent
from agentx.yaml12 import Strict, nearest_hint, parse_model, read_yaml

QUANTILES = {"P50": 0.50, "P90": 0.90, "P99": 0.99}

Multiplier = Annotated[Number, Field(ge=0)]
Band = Annotated[tuple[Multiplier, Multiplier], Ordered]
"""Multipliers of a target; a measured value between the two, ends included, is in band."""


def _known_metric(name: str) -> str:
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}\nhint: {nearest_hint(name, METRICS, 'metric')}")
    return name


def _known_quantile(name: str) -> str:
    if name not in QUANTILES:
        raise ValueError(f"unknown percentile {name!r}\nhint: {nearest_hint(name, QUANTILES, 'percentile')}")
    return name


class AxisGroup(Strict):
    """Percentiles of one metric that share a band."""

    name: str
    metric: Annotated[str, AfterValidator(_known_metric)]
    percentiles: Annotated[list[Annotated[str, AfterValidator(_known_quantile)]], Field(min_length=1)]
    unit: str
    band: Band


class GateFile(Strict):
    """A gate as written: another gate's axes where it extends one, its own, and bands changed by axis name."""

    name: str
    extends: str | None = None
    axes: tuple[AxisGroup, ...] = ()
    bands: Annotated[dict[str, Band], Field(default_factory=dict)]


@dataclass(frozen=True, slots=True)
class Axis:
    """One gated percentile."""

    name: str
    metric: str
    quantile: float
    unit: str
    band: tuple[float, float]


@dataclass(frozen=True, slots=True)
class AxisVerdict:
    """One axis of one corpus."""

    axis: Axis
    n: int
    measured: float | None
    target: float

    @property
    def low(self) -> float:
        """Lowest value in band."""
        return self.target * self.axis.band[0]

    @property
    def high(self) -> float:
        """Highest value in band."""
        return self.target * self.axis.band[1]

    @property
    def within(self) -> bool:
        """The measured value is in band; without a sample it is not."""
        return self.measured is not None and self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class GateResult:
    """Every axis of one corpus, and what the axes hide."""

    corpus: str
    profile: str
    verdicts: tuple[AxisVerdict, ...]
    axes: Axes
    changed: bool
    """The content is not what its own manifest says: it fails, whatever its axes read."""

    @property
    def n_within(self) -> int:
        """Axes in band."""
        return sum(verdict.within for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """Every axis is in band, and the content is what its manifest says."""
        return self.n_within == len(self.verdicts) and not self.changed

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return f"{self.n_within}/{len(self.verdicts)} axes within band" + (f", but {CHANGED}" if self.changed else "")

    def hidden(self) -> list[str]:
        """One sentence each on what the axes do not show."""
        axes = self.axes
        hit = percentile(axes.samples["cache_hit"], 0.5)
        reads = "has no value" if hit is None else f"reads {hit:.1f} %"
        found = [
            f"A prefix cache without limit could serve {format_percent(axes.ceiling)} of all input tokens, although "
            f"the cache axis {reads}: it is a median over turns, and only leading blocks can be served."
        ]
        if axes.shrinking is not None:
            found.append(
                f"{format_percent(axes.shrinking)} of the {axes.n_follow_ups:,} follow-up turns have a shorter input "
                "than the turn before: a context that only grows would have none."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "corpus": self.corpus,
            "profile": self.profile,
            "passed": self.passed,
            "within": self.n_within,
            "of": len(self.verdicts),
            "changed": self.changed,
            "axes": [
                {
                    "axis": verdict.axis.name,
                    "unit": verdict.axis.unit,
                    "n": verdict.n,
                    "measured": verdict.measured,
                    "target": verdict.target,
                    "band": list(verdict.axis.band),
                    "low": verdict.low,
                    "high": verdict.high,
                    "within": verdict.within,
                }
                for verdict in self.verdicts
            ],
            "token_weighted_ceiling": self.axes.ceiling,
            "shrinking_turns": self.axes.shrinking,
            "n_follow_up_turns": self.axes.n_follow_ups,
        }


def load_axes(gate: str) -> tuple[Axis, ...]:
    """The axes of a shipped gate's name or of a gate file; raises InputError or FaultsError."""
    return tuple(_axes(_find(gate, Path()), ()).values())


def _axes(path: Path, chain: tuple[Path, ...]) -> Mapping[str, Axis]:
    """Axis name to axis: those of the gate it extends, its own, then its bands."""
    real = path.resolve()
    if real in chain:
        names = " -> ".join(step.stem for step in (*chain, real))
        raise InputError(f"{path}: gates extend each other in a circle: {names}", "let one of them stand on its own")
    own = parse_model(GateFile, read_yaml(path), str(path))
    axes = {} if own.extends is None else dict(_axes(_find(own.extends, path.parent), (*chain, real)))
    faults: list[tuple[str, str]] = []
    written: set[str] = set()
    for group in own.axes:
        for mark in group.percentiles:
            name = f"{group.name} {mark}"
            if name in written:
                faults.append((f"axes: {name!r} is given twice", "keep one"))
            written.add(name)
            axes[name] = Axis(name, group.metric, QUANTILES[mark], group.unit, group.band)
    faults += [(f"bands: no axis {name!r}", nearest_hint(name, axes, "axis")) for name in own.bands if name not in axes]
    if not axes:
        faults.append(("no axes", "write axes, or extend a gate: extends: default"))
    if faults:
        raise FaultsError(str(path), faults)
    axes.update((name, replace(axes[name], band=band)) for name, band in own.bands.items())
    return axes


def _find(gate: str, folder: Path) -> Path:
    """The file of a shipped gate's name, or of a path relative to `folder`."""
    if is_path(gate):
        path = folder / gate
        if not path.is_file():
            raise InputError(f"gate {gate}: no such file", "check the path")
        return path
    shipped = data_folder("gates") / f"{gate}.yaml"
    if not shipped.is_file():
        names = [entry.stem for entry in data_folder("gates").glob("*.yaml")]
        raise InputError(f"gate {gate!r} is not known", nearest_hint(gate, names, "gate"))
    return shipped


def target_of(profile: Profile, metric: str, quantile: float) -> float:
    """What the profile promises for a percentile of a metric; the cache hit in percent."""
    if metric == "cache_hit":
        middle = sum(profile.cache_hit) / 2
        return 100.0 * (middle if profile.cache_target is None else profile.cache_target)
    place = list(QUANTILES.values()).index(quantile)
    if metric == "turns":
        stated = profile.turns.target
        return float(profile.turns.percentile(quantile) if stated is None else stated[place])
    triple = {"input": profile.isl, "output": profile.osl, "delay": profile.delay}[metric]
    return triple[place]


def run_gate(corpus: Corpus, profile: AnyProfile) -> GateResult:
    """The corpus against the profile; raises InputError where one of them has nothing to compare."""
    if isinstance(profile, RecordedProfile):
        raise InputError(
            f"profile {profile.name!r} is a recorded corpus and promises no distribution",
            "name a generated profile with --profile",
        )
    if corpus.n_turns == 0:
        raise InputError(f"{corpus.source}: no turns, nothing can be held to a profile", "give a corpus with sessions")
    axes = measure(corpus)
    verdicts = []
    for axis in load_axes(profile.gate):
        samples = axes.samples[axis.metric]
        target = target_of(profile, axis.metric, axis.quantile)
        verdicts.append(AxisVerdict(axis, len(samples), percentile(samples, axis.quantile), target))
    return GateResult(corpus.name, profile.name, tuple(verdicts), axes, changed=CHANGED in corpus.notes)


def profile_of(corpus: Corpus) -> AnyProfile:
    """The profile that a generated corpus carries in its manifest; raises InputError where there is none."""
    carried = corpus.manifest.get("profile")
    resolved = carried.get("resolved") if isinstance(carried, dict) else None
    if not isinstance(resolved, dict):
        raise InputError(f"{corpus.source}: carries no profile to be held to", "name one with --profile")
    return parse_model(Profile, resolved, f"{corpus.source}: profile in the manifest")
