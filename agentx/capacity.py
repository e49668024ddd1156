"""The decode law: the wall time of one request alone is C0 + k times its output tokens.

Fitted by least squares over produced tokens, never the requested ones: a server that stops early pairs a
short wall with a long request, and decode looks several times faster than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentx.errors import InputError


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """The law of a sample, or why there is none."""

    n: int
    """Requests that report their tokens."""
    c0_ms: float | None
    k_ms: float | None
    """Milliseconds per output token."""
    reason: str | None
    """`no_samples` or `osl_constant` where nothing is fitted; None where the law is."""
    mean_wall_ms: float | None


def fit_decode(output_tokens: Sequence[int | None], wall_ms: Sequence[float]) -> DecodeFit:
    """The law over requests that produced `output_tokens` (None: not reported) in `wall_ms` each.

    One length alone has no slope: nothing is fitted, only the mean wall is told. Raises InputError where the
    two differ in length or a wall is no time.
    """
    if len(output_tokens) != len(wall_ms):
        raise InputError(f"{len(output_tokens)} token counts and {len(wall_ms)} walls", "give one wall per count")
    known = [(tokens, wall) for tokens, wall in zip(output_tokens, wall_ms, strict=True) if tokens is not None]
    x, y = np.array(known, dtype=np.float64).reshape(-1, 2).T
    if not (np.isfinite(y) & (y >= 0)).all():
        raise InputError("a wall is negative or not finite", "walls are milliseconds")
    if len(x) == 0:
        return DecodeFit(0, None, None, "no_samples", None)
    if x.min() == x.max():
        return DecodeFit(len(x), None, None, "osl_constant", float(y.mean()))
    k = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return DecodeFit(len(x), float(y.mean() - k * x.mean()), k, None, float(y.mean()))
