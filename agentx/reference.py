"""The reference sampler: the published byte format behind the generated corpora, alone in its file.

ROCm/MAD's AgentX made its corpora with a small generator. Its draws are a format here: one
`random.Random(seed)` of CPython serves the whole corpus, and the order of draws, the rounding and
the hashes are fixed, so that every published number can be checked to the byte.

Lengths and pauses are lognormal, fitted to three percentiles: ln P50 is mu, and sigma is the mean of
what P90 and P99 each ask for. A turn keeps a leading part of the previous turn's blocks and adds new
ones, whose ids are hashes of their place (seed, session, turn, number). The ids therefore need no
storing: `new_block_ids` makes them again.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentx.digests import new_block_digests
from agentx.turns import BlockIds

VERSION = 1
"""Counts changes of what the same parameters give; part of what makes a stored corpus reusable."""

Z90 = 1.2816
Z99 = 2.3263
"""The standard normal quantiles in exactly the decimals of the reference."""

Triple = tuple[float, float, float]
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the sampler reads. Lengths are tokens, pauses seconds; triples are P50, P90, P99."""

    seed: int
    sessions: int
    block_size: int
    id_prefix: str
    isl: Triple
    osl: Triple
    delay: Triple
    turn_values: Sequence[int]
    turn_weights: Sequence[float]
    cache_hit: Range
    isl_clamp: Range
    osl_clamp: Range
    delay_clamp: Range


@dataclass(frozen=True, slots=True)
class Draws:
    """The drawn turns: `turns` has one element per session, the other columns one per turn."""

    turns: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    think_s: list[int] = field(default_factory=list)
    keep_blocks: list[int] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)


def fit_lognormal(triple: Triple) -> tuple[float, float]:
    """(mu, sigma) of the lognormal for P50, P90 and P99."""
    p50, p90, p99 = triple
    mu = math.log(p50)
    return mu, ((math.log(p90) - mu) / Z90 + (math.log(p99) - mu) / Z99) / 2


def draw(parameters: Parameters) -> Draws:
    """Every session's turns, in the reference's order of draws."""
    p = parameters
    rng = random.Random(p.seed)
    gauss, uniform = rng.gauss, rng.uniform
    isl, osl, delay = fit_lognormal(p.isl), fit_lognormal(p.osl), fit_lognormal(p.delay)

    def lognormal(fit: tuple[float, float], clamp: Range) -> int:
        value = math.exp(fit[0] + fit[1] * gauss(0, 1))
        return int(max(clamp[0], min(clamp[1], value)))

    drawn = Draws()
    for _ in range(p.sessions):
        n_turns = rng.choices(p.turn_values, weights=p.turn_weights)[0]
        drawn.turns.append(n_turns)
        previous = 0
        for turn in range(n_turns):
            tokens_in = lognormal(isl, p.isl_clamp)
            drawn.input_tokens.append(tokens_in)
            drawn.output_tokens.append(lognormal(osl, p.osl_clamp))
            total = max(1, tokens_in // p.block_size)
            reused = min(previous, int(total * uniform(*p.cache_hit))) if turn > 0 else 0
            new = max(1, total - reused)
            drawn.keep_blocks.append(total - new)
            drawn.new_blocks.append(new)
            drawn.think_s.append(lognormal(delay, p.delay_clamp) if turn > 0 else 0)
            previous = total
    return drawn


def session_id(id_prefix: str, seed: int, index: int) -> str:
    """The 36 hexadecimal digits that name session `index`."""
    return hashlib.blake2b(f"{id_prefix}-{seed}-{index:05d}".encode(), digest_size=18).hexdigest()


def digests_to_ids(digests: bytes | memoryview) -> BlockIds:
    """The block ids of joined digests: big-endian integers with the top bit cleared."""
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)


def new_block_ids(seed: int, session: int, turn: int, count: int) -> BlockIds:
    """The ids of a turn's new blocks number 0 to `count` - 1."""
    return digests_to_ids(new_block_digests(seed, session, turn, count))
