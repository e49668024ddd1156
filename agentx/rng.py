"""Random generators derived from one seed: one per purpose, none global."""

from __future__ import annotations

import numpy as np


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A generator for (seed, purpose); the same arguments give the same draws on every machine.

    `purpose` is any path of words and numbers, e.g. `("session", 7)`, so that session 7 draws the
    same numbers in a corpus of 10 and of a million.
    """
    words: list[int] = []
    for part in purpose:
        data = part.encode() if isinstance(part, str) else b"#%d" % part
        words.extend((len(data), int.from_bytes(data, "big")))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(words))))
