"""The simulated deployment's tokenizer: plain, deterministic, and exact for filler made of single words.

A token is a run of at most 16 bytes that are no white space, with the white space before it: `" word"` is
one token, and so is `" word,"`. White space at the end of a text is no token. Real tokenizers make more
tokens of punctuation, code and long words, so other text than filler counts too low here.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

_WORD = re.compile(rb"\s*\S{1,16}")
_SLICE = re.compile(rb"(?:\s*\S{1,16}){1,4096}")


def tokenize(text: str) -> Iterator[Tokens]:
    """Token ids of a text, at most 4096 at a time: a checksum of each token's bytes, 31 bits.

    In slices, so that an event loop can do other things between them: a million tokens take a good
    part of a second.
    """
    for part in _SLICE.finditer(text.encode()):
        words = _WORD.findall(part[0])
        yield np.fromiter(map(zlib.crc32, words), dtype=np.int64, count=len(words)) & 0x7FFFFFFF


def block_keys(tokens: Tokens, block_size: int) -> list[int]:
    """A 64-bit key per full block that stands for the block and everything before it."""
    data = tokens.astype("<i8").tobytes()
    width = 8 * block_size
    keys = []
    chain = b""
    for start in range(0, len(tokens) // block_size * width, width):
        chain = hashlib.blake2b(chain + data[start : start + width], digest_size=8).digest()
        keys.append(int.from_bytes(chain, "big"))
    return keys
