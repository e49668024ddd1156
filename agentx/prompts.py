"""Prompts from content keys: equal blocks are equal text, and a prompt is exact to the token.

Token j of the block with content key k is word `h(k, j)` of a table whose units all have one width
(`agentx.tokens`). A prompt is then one look-up for all of its blocks; the request around it is put
together from parts that need no escaping.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson

from agentx.errors import InputError
from agentx.prefix import mix
from agentx.tokens import WordTable
from agentx.turns import BlockIds

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_STEP = np.uint64(0xD1B54A32D192ED03)
"""An odd constant that sets the draws of a block apart."""
_PER_DRAW = 4
"""Words chosen by one 64-bit draw, 16 bits each."""


class Filler:
    """Text, or token ids, for content keys."""

    def __init__(self, table: WordTable) -> None:
        """Of a larger table, the first 65,536 words are used."""
        self.table = table
        self._units = np.ascontiguousarray(table.units).view(f"V{table.units.shape[1]}").reshape(-1)
        self._size = np.uint32(min(len(table), 2**16))

    @property
    def width(self) -> int:
        """Bytes of one token."""
        return self._units.itemsize

    def words(self, keys: BlockIds, block_tokens: int) -> npt.NDArray[np.uint32]:
        """Index of each token's word, shape (blocks, block_tokens)."""
        draws = -(-block_tokens // _PER_DRAW)
        places = np.arange(draws, dtype=np.uint64) * _STEP
        drawn = mix(keys[:, None] + places[None, :], 0).astype("<u8", copy=False).view("<u2")
        return (drawn[:, :block_tokens] * self._size) >> np.uint32(16)

    def content(self, keys: BlockIds, block_tokens: int, n_tokens: int) -> bytes:
        """The first `n_tokens` tokens of the blocks, `width` bytes each."""
        chosen = self.words(keys, block_tokens).reshape(-1)[:n_tokens]
        return self._units.take(chosen).tobytes()

    def common_tokens(self, key_a: int, key_b: int, limit: int) -> int:
        """Tokens, at most `limit`, that two blocks have in common at their start."""
        if key_a == key_b:
            return limit
        a, b = self.words(np.array([key_a, key_b], dtype=np.uint64), limit)
        differs = np.flatnonzero(a != b)
        return int(differs[0]) if len(differs) else limit


@dataclass(frozen=True, slots=True)
class Extras:
    """Request fields beyond the standard that the server takes."""

    min_tokens: bool = True
    ignore_eos: bool = True
    usage: bool = True


class PromptBuilder:
    """Request bodies of one run: `path` and `body` are what the live driver needs."""

    def __init__(
        self,
        filler: Filler,
        *,
        model: str,
        endpoint: str,
        block_size: int,
        extras: Extras | None = None,
        overhead_tokens: int = 0,
    ) -> None:
        """`overhead_tokens` are the chat template's own, taken off the end of every prompt.

        Raises InputError where token ids are to go to a chat endpoint.
        """
        if filler.table.ids and endpoint != "completions":
            raise InputError("token-id prompts go to /v1/completions only", "give --endpoint completions")
        self.path = PATHS[endpoint]
        self.filler = filler
        self.overhead_tokens = overhead_tokens
        self._block_size = block_size
        self._chat = endpoint == "chat"
        self._extras = extras or Extras()
        self._model = orjson.dumps(model)

    def body(self, keys: BlockIds, last_tokens: int, output_tokens: int) -> bytes:
        """The body of a turn's request; its prompt is the blocks `keys`, the last of `last_tokens`.

        A planned output of 0 tokens is asked for as 1: servers take no less.
        """
        n_tokens = (len(keys) - 1) * self._block_size + last_tokens
        return self.request(keys, max(1, n_tokens - self.overhead_tokens), max(1, output_tokens))

    def request(self, keys: BlockIds, n_tokens: int, max_tokens: int) -> bytes:
        """The body of a request of exactly `n_tokens` filler tokens."""
        content = self.filler.content(keys, self._block_size, n_tokens)
        if self._chat:
            prompt = b'"messages":[{"role":"user","content":"%s"}]' % content
        elif self.filler.table.ids:
            prompt = b'"prompt":[%s]' % content[:-1]
        else:
            prompt = b'"prompt":"%s"' % content
        return b'{"model":%s,%s,%s}' % (self._model, prompt, self._options(max_tokens))

    def _options(self, max_tokens: int) -> bytes:
        options = b'"max_tokens":%d,"temperature":0,"stream":true' % max_tokens
        if self._extras.usage:
            options += b',"stream_options":{"include_usage":true}'
        if self._extras.min_tokens:
            options += b',"min_tokens":%d' % max_tokens
        if self._extras.ignore_eos:
            options += b',"ignore_eos":true'
        return options
