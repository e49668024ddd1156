"""Which leading tokens of a prompt a prefix cache could have served: content keys, and the ceiling.

A prompt is a sequence of blocks of `block_size` tokens; only its last block may be shorter. What a
block contains is a pure function of its 64-bit *content key*, and a content key is a block id mixed
with a salt: equal ids under one salt are equal text, the same id under another salt is other text.
The salt therefore says who may share: sessions with local ids get a salt each, and a new play of a
session gets a new salt where one play must not hit another's cache.

A prefix cache can only serve a *leading run*. `PrefixTree` remembers every prompt as a path in a
radix tree over content keys and tells the longest leading run of a new prompt that was seen before.
An engine never serves the last token (it must compute something) and caches whole units of its own
granularity g: its best is min(floor(shared / g), floor((input - 1) / g)) * g.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from agentx.turns import BlockIds, SessionTree

CommonTokens = Callable[[int, int, int], int]
"""(content key a, content key b, limit) -> leading tokens the two blocks have in common."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EMPTY: BlockIds = np.empty(0, dtype=np.uint64)


def mix(keys: BlockIds, salt: int) -> BlockIds:
    """The keys scrambled under `salt`: a bijection of 64-bit integers for each salt.

    The finaliser of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    z = (keys ^ np.uint64(salt)) + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: BlockIds = z ^ (z >> np.uint64(31))
    return mixed


def common_length(a: BlockIds, b: BlockIds) -> int:
    """Leading keys that two prompts have in common."""
    if a is b:
        return len(a)
    span = min(len(a), len(b))
    if span == 0:
        return 0
    first = (a[:span] == b[:span]).tobytes().find(b"\0")
    return span if first < 0 else first


def salt_of(*parts: str | int) -> int:
    """A 64-bit salt that depends on every part and their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(b"%d:%s," % (len(data), data))
    return int.from_bytes(digest.digest(), "big")


def prompt_blocks(
    keys: BlockIds, input_tokens: int, block_size: int, tail_salt: Callable[[], int]
) -> tuple[BlockIds, int]:
    """(content keys of a whole prompt, tokens in its last block) for a turn of `input_tokens` >= 1.

    `keys` are the content keys of the turn's ids. The prompt's length is the truth: surplus ids are cut
    off, and what the ids do not cover is text of its own, made from the tail salt, which no other turn shares.
    """
    n_blocks = -(-input_tokens // block_size)
    if len(keys) > n_blocks:
        keys = keys[:n_blocks]
    elif len(keys) < n_blocks:
        keys = np.concatenate((keys, mix(np.arange(n_blocks - len(keys), dtype=np.uint64), tail_salt())))
    return keys, input_tokens - (n_blocks - 1) * block_size


class PlayBlocks:
    """The content keys of one play of a session tree, turn by turn."""

    def __init__(
        self, tree: SessionTree, play: int, *, block_size: int, scope: str, nonce: str, cache_bust: bool
    ) -> None:
        """`scope` is the corpus's hash_id_scope; `nonce` sets this run apart from other runs."""
        self.tree = tree
        self.play = play
        self.block_size = block_size
        owner = (tree.session_id,) if scope == "local" else ()
        marker = (play,) if cache_bust else ()
        self.salt = salt_of(nonce, scope, *owner, "play", *marker)
        self.private = scope == "local" and cache_bust
        """True where no other play of any session can share this play's blocks."""
        self._keys: dict[int, tuple[int, BlockIds]] = {}

    def turn(self, stream: int, turn: int) -> tuple[BlockIds, int]:
        """(content keys, tokens in the last block) of one turn; cheapest when asked in order."""
        source = self.tree.streams[stream]
        at, keys = self._keys.get(stream, (-1, _EMPTY))
        if at > turn:
            at, keys = -1, _EMPTY
        for step in range(at + 1, turn + 1):
            keep, new = source.keep_blocks[step], source.new_ids[step]
            if len(new):
                keys = np.concatenate((keys[:keep], mix(new, self.salt)))
            elif keep < len(keys):
                keys = keys[:keep]
        self._keys[stream] = (turn, keys)
        return prompt_blocks(
            keys,
            source.input_tokens[turn],
            self.block_size,
            lambda: salt_of(self.salt, source.session_id, turn),
        )


@dataclass(frozen=True, slots=True)
class BlockRule:
    """How the blocks of a run's plays come about: what `PlayBlocks` needs beside the tree and the play."""

    block_size: int
    scope: str
    nonce: str
    cache_bust: bool

    def __call__(self, tree: SessionTree, play: int) -> PlayBlocks:
        """The blocks of a session tree's play."""
        return PlayBlocks(
            tree, play, block_size=self.block_size, scope=self.scope, nonce=self.nonce, cache_bust=self.cache_bust
        )


def engine_ceiling(shared_tokens: int, input_tokens: int, granularity: int) -> int:
    """The most an engine of this cache granularity (tokens) can serve of a prompt from its cache."""
    return min(shared_tokens, max(input_tokens - 1, 0)) // granularity * granularity


class _Node:
    """An edge of the radix tree with what follows it; `last` is the length of its last block in tokens."""

    __slots__ = ("children", "keys", "last")

    def __init__(self, keys: BlockIds, last: int) -> None:
        self.keys = keys
        self.last = last
        self.children: dict[int, _Node] = {}


_Reached = tuple[_Node, int, _Node | None, int]
"""(node reached, blocks matched to it, the edge that stopped the walk or None, blocks matched on that edge)."""


class PrefixTree:
    """Every prompt seen, as a radix tree over content keys; memory is the distinct blocks, 8 bytes each."""

    def __init__(self, block_size: int, common_tokens: CommonTokens | None = None) -> None:
        """`common_tokens`, where given, counts tokens that two different blocks share at their start."""
        self._block = block_size
        self._common = common_tokens
        self._root = _Node(_EMPTY, block_size)

    def match(self, keys: BlockIds, last_tokens: int) -> int:
        """Leading tokens of this prompt that an earlier one began with."""
        return self._matched(keys, last_tokens, self._walk(keys))

    def insert(self, keys: BlockIds, last_tokens: int) -> None:
        """Remember this prompt."""
        self._grow(keys, last_tokens, self._walk(keys))

    def observe(self, keys: BlockIds, last_tokens: int) -> int:
        """Match and then remember a prompt."""
        reached = self._walk(keys)
        tokens = self._matched(keys, last_tokens, reached)
        self._grow(keys, last_tokens, reached)
        return tokens

    def _matched(self, keys: BlockIds, last_tokens: int, reached: _Reached) -> int:
        node, at, child, same = reached
        place = at + same
        if child is None:
            return place * self._block + self._divergence(keys, place, last_tokens, node.children.values())
        if place == len(keys) or (same == len(child.keys) and child.last < self._block):
            ours = last_tokens if place == len(keys) else self._block
            theirs = child.last if same == len(child.keys) else self._block
            siblings = node.children.values() if same == 1 and theirs < ours else ()
            chance = self._divergence(keys, place - 1, last_tokens, siblings)
            return (place - 1) * self._block + max(min(ours, theirs), chance)
        return place * self._block + self._divergence(keys, place, last_tokens, (_edge_rest(child, same),))

    def _grow(self, keys: BlockIds, last_tokens: int, reached: _Reached) -> None:
        node, at, child, same = reached
        if child is None:
            if at < len(keys):
                node.children[int(keys[at])] = _Node(keys[at:].copy(), last_tokens)
            elif node is not self._root and not node.children:
                node.last = max(node.last, last_tokens)
            return
        rest = keys[at + same :]
        if same == len(child.keys):  # only a leaf with a short last block stops the walk here
            ours = self._block if len(rest) else last_tokens
            if ours > child.last:
                child.keys = np.concatenate((child.keys, rest))
                child.last = last_tokens
            return
        if len(rest) == 0:
            return
        below = _Node(child.keys[same:], child.last)
        below.children = child.children
        child.keys, child.last = child.keys[:same], self._block
        child.children = {int(below.keys[0]): below, int(rest[0]): _Node(rest.copy(), last_tokens)}

    def _walk(self, keys: BlockIds) -> _Reached:
        node, at, n = self._root, 0, len(keys)
        while at < n:
            child = node.children.get(int(keys[at]))
            if child is None:
                return node, at, None, 0
            edge = child.keys
            same = common_length(edge, keys[at:] if at else keys)
            short_leaf = same == len(edge) and child.last < self._block
            if same < len(edge) or short_leaf or at + same == n:
                return node, at, child, same
            node, at = child, at + same
        return node, at, None, 0

    def _divergence(self, keys: BlockIds, place: int, last_tokens: int, others: Iterable[_Node]) -> int:
        if self._common is None or place == len(keys):
            return 0
        ours = last_tokens if place == len(keys) - 1 else self._block
        best = 0
        for other in others:
            theirs = other.last if len(other.keys) == 1 else self._block
            best = max(best, self._common(int(keys[place]), int(other.keys[0]), min(ours, theirs)))
        return best


def _edge_rest(child: _Node, same: int) -> _Node:
    return _Node(child.keys[same:], child.last)


class CeilingTracker:
    """The ceiling of every call, given what this run sent before it."""

    def __init__(self, block_size: int, granularity: int, common_tokens: CommonTokens | None = None) -> None:
        """`granularity` is the engine's cache unit in tokens; `common_tokens` matters where it is 1."""
        self._block = block_size
        self._granularity = granularity
        self._common = common_tokens if granularity == 1 else None
        self._trees: dict[int, PrefixTree] = {}
        self._first_blocks: dict[int, int] = {}

    def observe(self, salt: int, keys: BlockIds, last_tokens: int) -> int:
        """The ceiling in tokens of the prompt now being sent; the prompt is remembered.

        `salt` is the salt of its `PlayBlocks`: only prompts under one salt share blocks.
        """
        tree = self._trees.get(salt)
        if tree is None:
            tree = self._trees[salt] = PrefixTree(self._block, self._common)
        input_tokens = (len(keys) - 1) * self._block + last_tokens
        shared = tree.observe(keys, last_tokens) or self._chance(int(keys[0]), min(input_tokens, self._block))
        return engine_ceiling(shared, input_tokens, self._granularity)

    def forget(self, salt: int) -> None:
        """Drop what was sent under a salt that will not come again."""
        self._trees.pop(salt, None)

    def _chance(self, key: int, tokens: int) -> int:
        """Leading tokens shared by chance with the first block of any prompt sent before."""
        if self._common is None:
            return 0
        best = max((self._common(key, other, min(tokens, n)) for other, n in self._first_blocks.items()), default=0)
        self._first_blocks[key] = max(tokens, self._first_blocks.get(key, 0))
        return best


class LanePlays:
    """The blocks each lane is playing; what a finished play sent is forgotten where none can share it."""

    def __init__(self, make: Callable[[SessionTree, int], PlayBlocks], ceilings: CeilingTracker | None) -> None:
        """`make` gives the blocks of a session tree's play."""
        self._make = make
        self._ceilings = ceilings
        self._current: dict[int, PlayBlocks] = {}

    def of(self, lane: int, tree: SessionTree, play: int) -> PlayBlocks:
        """The blocks of the play that the lane is on."""
        blocks = self._current.get(lane)
        if blocks is None or blocks.play != play or blocks.tree is not tree:
            if self._ceilings is not None and blocks is not None and blocks.private:
                self._ceilings.forget(blocks.salt)
            blocks = self._current[lane] = self._make(tree, play)
        return blocks
