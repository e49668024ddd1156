"""Prompts from content keys: equal blocks are equal text, and a prompt is exact to the token.

Token j of the block with content key k is word `h(k, j)` of a table whose units all have one width
(`agentx.tokens`). A prompt is then one look-up for all of its blocks; the request around it is put
together from parts that need no escaping.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson

from agentx.errors import InputError
from agentx.prefix import common_length, mix
from agentx.tokens import WordTable
from agentx.turns import BlockIds

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_STEP = np.uint64(0xD1B54A32D192ED03)
"""An odd constant that sets the draws of a block apart."""
RECENT_BYTES = 32 * 1024 * 1024
"""Prompts kept to make the next ones from."""
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


class RecentPrompts:
    """What each stream's last prompt was, so that the next one only makes what is new.

    An agent's context mostly grows: most of a long prompt is the one before. Memory is bounded; the
    streams that were silent for longest are forgotten first.
    """

    def __init__(self, filler: Filler, block_tokens: int, limit_bytes: int = RECENT_BYTES) -> None:
        self._filler = filler
        self._block = block_tokens
        self._limit = limit_bytes
        self._bytes = 0
        self._last: OrderedDict[Hashable, tuple[BlockIds, bytes]] = OrderedDict()

    def content(self, stream: Hashable, keys: BlockIds, n_tokens: int) -> bytes:
        """The same as `Filler.content`; `stream` is whose prompt it is."""
        known = self._last.pop(stream, None)
        content = None if known is None else self._grown(*known, keys, n_tokens)
        if content is None:
            content = self._filler.content(keys, self._block, n_tokens)
        self._last[stream] = (keys, content)
        self._bytes += len(content) - (0 if known is None else len(known[1]))
        while self._bytes > self._limit:
            _, (_, dropped) = self._last.popitem(last=False)
            self._bytes -= len(dropped)
        return content

    def _grown(self, old_keys: BlockIds, old: bytes, keys: BlockIds, n_tokens: int) -> bytes | None:
        """The content made from the one before; None where they have no block in common."""
        same = common_length(keys, old_keys)
        width = self._filler.width
        usable = min(same * self._block, len(old) // width)
        if usable >= n_tokens:
            return old[: n_tokens * width]
        blocks = usable // self._block
        if blocks == 0:
            return None
        return old[: blocks * self._block * width] + self._filler.content(
            keys[blocks:], self._block, n_tokens - blocks * self._block
        )


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
        self._recent = RecentPrompts(filler, block_size)
        self._known_options: dict[int, bytes] = {}

    def body(self, keys: BlockIds, last_tokens: int, output_tokens: int, stream: Hashable = None) -> bytes:
        """The body of a turn's request; its prompt is the blocks `keys`, the last of `last_tokens`.

        A planned output of 0 tokens is asked for as 1: servers take no less. `stream` is whose turn it is.
        """
        n_tokens = max(1, (len(keys) - 1) * self._block_size + last_tokens - self.overhead_tokens)
        return self._around(self._recent.content(stream, keys, n_tokens), max(1, output_tokens))

    def request(self, keys: BlockIds, n_tokens: int, max_tokens: int) -> bytes:
        """The body of a request of exactly `n_tokens` filler tokens."""
        return self._around(self.filler.content(keys, self._block_size, n_tokens), max_tokens)

    def _around(self, content: bytes, max_tokens: int) -> bytes:
        if self._chat:
            prompt = b'"messages":[{"role":"user","content":"%s"}]' % content
        elif self.filler.table.ids:
            prompt = b'"prompt":[%s]' % content[:-1]
        else:
            prompt = b'"prompt":"%s"' % content
        return b'{"model":%s,%s,%s}' % (self._model, prompt, self._options(max_tokens))

    def _options(self, max_tokens: int) -> bytes:
        options = self._known_options.get(max_tokens)
        if options is None:
            options = self._known_options[max_tokens] = self._make_options(max_tokens)
        return options

    def _make_options(self, max_tokens: int) -> bytes:
        options = b'"max_tokens":%d,"temperature":0,"stream":true' % max_tokens
        if self._extras.usage:
            options += b',"stream_options":{"include_usage":true}'
        if self._extras.min_tokens:
            options += b',"min_tokens":%d' % max_tokens
        if self._extras.ignore_eos:
            options += b',"ignore_eos":true'
        return options
