"""Samples in a few numbers: what a percentile is, and how many samples it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

QUANTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


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
        return asdict(self)

    def missing(self) -> list[str]:
        """Names of the percentiles that the sample is too small for."""
        return [name for name, q in QUANTILES.items() if self.n < needed(q)]


def needed(q: float) -> int:
    """Samples that a percentile needs, 1 / (1 - q): so many that one is expected beyond it."""
    return math.ceil(round(1 / (1 - q), 6))


def tail_name(n: int) -> str:
    """What the tail of a small sample is called: its P99, or where it is too small for one, its worst."""
    return "P99" if n >= needed(0.99) else "worst"


def tail(values: Values) -> float:
    """What `tail_name` names."""
    return float(np.quantile(values, 0.99) if len(values) >= needed(0.99) else values.max())


def percentile(values: Values, q: float) -> float | None:
    """The quantile by linear interpolation between the sorted samples, whatever their number; None without any."""
    return float(np.quantile(values, q)) if len(values) else None


def summarise(values: Values) -> Summary:
    """The summary of a sample; a percentile is None under `needed(q)` samples."""
    n = len(values)
    if n == 0:
        return Summary(0, None, None, None, None, None, None)
    found = np.quantile(values, list(QUANTILES.values()))
    p50, p90, p95, p99 = (float(p) if n >= needed(q) else None for p, q in zip(found, QUANTILES.values(), strict=True))
    return Summary(n, p50, p90, p95, p99, float(values.mean()), float(values.max()))
