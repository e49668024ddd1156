"""The digests behind the block ids of generated sessions, and the process that makes them.

This file imports nothing of agentx and little else: a hashing process runs it alone and is ready in
hundredths of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache

DIGEST_BYTES = 8


def new_block_digests(seed: int, session: int, turn: int, count: int) -> bytes:
    """The BLAKE2b digests of the places of a turn's new blocks number 0 to `count` - 1, joined.

    A place is the ASCII text `seed:session:turn:number`. Each hash continues a copy of the common
    beginning, which costs two thirds of hashing each anew.
    """
    start = hashlib.blake2b(f"{seed}:{session}:{turn}:".encode(), digest_size=DIGEST_BYTES).copy
    digests = []
    for numeral in _numerals(1 << max(count - 1, 1).bit_length())[:count]:
        state = start()
        state.update(numeral)
        digests.append(state.digest())
    return b"".join(digests)


@lru_cache(maxsize=32)
def _numerals(count: int) -> tuple[bytes, ...]:
    return tuple(b"%d" % number for number in range(count))


def answer(request_file: int, answer_file: int) -> None:
    """Answer one request, `{"seed": ..., "counts": [[session, [count, ...]], ...]}`, with its digests in order.

    The arguments are file descriptors.
    """
    with os.fdopen(request_file, "rb") as stream:
        request = json.load(stream)
    with os.fdopen(answer_file, "wb") as stream:
        for session, turns in request["counts"]:
            for turn, count in enumerate(turns):
                stream.write(new_block_digests(request["seed"], session, turn, count))


if __name__ == "__main__":
    answer(0, 1)
