"""The axes of a corpus: samples behind each gated percentile, and the two facts they hide.

*Per-turn hit*: the share of a turn's block ids that occurred earlier in its session, in any place.
Its median is the 13th axis. A prefix cache can only serve a leading run, and long prompts weigh more
than short ones: the *token-weighted ceiling* counts the longest leading run already seen in the
session against all input tokens. The two differ a lot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentx.corpus import Corpus
from agentx.prefix import PrefixTree
from agentx.turns import SessionTree
from agentx.units import NS_PER_S

Samples = npt.NDArray[np.float64]

METRICS = ("input", "output", "turns", "delay", "cache_hit")
"""What an axis can be about: tokens, tokens, turns per session, seconds, percent."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A corpus measured."""

    samples: Mapping[str, Samples]
    """Metric to its samples, sorted: turns' input and output, sessions' turns, think times after the
    first turn, per-turn hit of the requests that start after their session does."""
    ceiling: float
    """Reusable leading tokens / input tokens over all turns, 0..1."""
    shrinking: float | None
    """Share of follow-up turns whose input is smaller than the turn's before; None without any."""
    n_follow_ups: int


def percentile(samples: Samples, q: float) -> float | None:
    """Element min(n - 1, int(q n)) of the sorted samples: the definition of the published corpora."""
    n = len(samples)
    return float(samples[min(n - 1, int(q * n))]) if n else None


def measure(corpus: Corpus) -> Axes:
    """The axes of what the corpus really holds, block ids included."""
    table = corpus.table
    turn = table["turn"].to_numpy()
    tokens_in = table["input_tokens"].to_numpy().astype(np.int64)
    reused, leading, blocks = _reuse(corpus)
    follows = turn > 0
    later = (table["t_ns"].to_numpy() > 0) & (blocks > 0)
    shrinks = tokens_in[follows] < tokens_in[np.flatnonzero(follows) - 1]
    roots = table["root_session_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    samples = {
        "input": tokens_in,
        "output": table["output_tokens"].to_numpy(),
        "turns": np.bincount(roots),
        "delay": table["think_ns"].to_numpy()[follows] / NS_PER_S,
        "cache_hit": 100.0 * reused[later] / blocks[later],
    }
    return Axes(
        samples={name: np.sort(values.astype(np.float64)) for name, values in samples.items()},
        ceiling=float(np.minimum(leading, tokens_in).sum() / tokens_in.sum()),
        shrinking=float(shrinks.mean()) if len(shrinks) else None,
        n_follow_ups=len(shrinks),
    )


def _reuse(corpus: Corpus) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Per turn: blocks seen earlier in the session, leading tokens seen earlier in it, blocks in all."""
    keep = corpus.table["keep_blocks"].to_numpy().astype(np.int64)
    new = corpus.table["new_blocks"].to_numpy().astype(np.int64)
    if corpus.manifest.get("id_rule") is not None:  # ids made by the rule occur once: what is kept is all that recurs
        return keep, keep * corpus.block_size, keep + new
    reused = np.zeros(len(keep), dtype=np.int64)
    leading = np.zeros(len(keep), dtype=np.int64)
    first_row = 0
    for tree in corpus.sessions:
        rows = slice(first_row, first_row + tree.n_turns)
        _reuse_of(tree, corpus.table["t_ns"][rows].to_numpy(), corpus.block_size, reused[rows], leading[rows])
        first_row += tree.n_turns
    return reused, leading, keep + new


def _reuse_of(
    tree: SessionTree,
    t_ns: npt.NDArray[np.int64],
    block_size: int,
    reused: npt.NDArray[np.int64],
    leading: npt.NDArray[np.int64],
) -> None:
    """Fill `reused` and `leading` of one session's turns, met in recorded order."""
    turns = [(stream, turn) for stream in tree.streams for turn in range(stream.n_turns)]
    prompts_ids = [blocks for stream in tree.streams for blocks in stream.block_ids()]
    seen: set[int] = set()
    prompts = PrefixTree(block_size)
    for row in np.argsort(t_ns, kind="stable").tolist():
        stream, turn = turns[row]
        new = stream.new_ids[turn].tolist()  # the kept ids were in the stream's turn before: seen
        reused[row] = stream.keep_blocks[turn] + sum(map(seen.__contains__, new))
        seen.update(new)
        tokens = int(stream.input_tokens[turn])
        n_blocks = -(-tokens // block_size)
        prompt = prompts_ids[row][:n_blocks]
        last = tokens - (n_blocks - 1) * block_size if len(prompt) == n_blocks else block_size
        leading[row] = prompts.match(prompt, last)
        prompts.insert(prompt, last)
