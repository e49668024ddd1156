"""The ceiling against a plain loop over token lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.prefix import CeilingTracker, PlayBlocks, PrefixTree, engine_ceiling, mix, prompt_blocks, salt_of
from agentx.turns import ROOT, SessionTree, Stream

BLOCK = 4


def tokens(keys: list[int], last: int) -> list[tuple[int, int]]:
    """A prompt spelled out: token j of block k is (k, j)."""
    return [(key, j) for i, key in enumerate(keys) for j in range(last if i == len(keys) - 1 else BLOCK)]


def leading(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, BLOCK)), min_size=1, max_size=14
)


@settings(max_examples=400)
@given(prompts)
def test_longest_leading_run_agrees_with_a_plain_loop(sequence: list[tuple[list[int], int]]) -> None:
    tree = PrefixTree(BLOCK)
    seen: list[list[tuple[int, int]]] = []
    for keys, last in sequence:
        flat = tokens(keys, last)
        array = np.array(keys, dtype=np.uint64)
        assert tree.match(array, last) == max((leading(flat, other) for other in seen), default=0)
        tree.insert(array, last)
        seen.append(flat)


@settings(max_examples=200)
@given(prompts)
def test_chance_agreement_of_different_blocks_is_counted(sequence: list[tuple[list[int], int]]) -> None:
    """Blocks 0 and 1 agree in two tokens, all others in none."""

    def spelled(keys: list[int], last: int) -> list[tuple[int, int]]:
        return [
            (min(key, 1) if key < 2 and j < 2 else key + 10, j) if key >= 2 or j >= 2 else (0, j)
            for key, j in tokens(keys, last)
        ]

    def common(a: int, b: int, limit: int) -> int:
        return limit if a == b else min(limit, 2) if a < 2 and b < 2 else 0

    tree = PrefixTree(BLOCK, common)
    seen: list[list[tuple[int, int]]] = []
    for keys, last in sequence:
        flat = spelled(keys, last)
        array = np.array(keys, dtype=np.uint64)
        assert tree.match(array, last) == max((leading(flat, other) for other in seen), default=0)
        tree.insert(array, last)
        seen.append(flat)


def test_the_last_token_is_never_served() -> None:
    assert engine_ceiling(130, 130, 64) == 128
    assert engine_ceiling(128, 128, 64) == 64
    assert engine_ceiling(128, 128, 1) == 127
    assert engine_ceiling(0, 1, 1) == 0
    assert engine_ceiling(5, 1, 1) == 0


def test_prompt_length_is_the_truth() -> None:
    ids = np.array([1, 2, 3], dtype=np.uint64)
    for input_tokens, n_keys, last in ((12, 3, 4), (11, 3, 3), (8, 2, 4), (13, 4, 1), (30, 8, 2), (1, 1, 1)):
        keys, last_tokens = prompt_blocks(mix(ids, 7), input_tokens, BLOCK, lambda: 9)
        assert (len(keys), last_tokens) == (n_keys, last)
        covered = min(3, n_keys)
        assert np.array_equal(keys[:covered], mix(ids[:covered], 7))
    first, _ = prompt_blocks(mix(ids, 7), 30, BLOCK, lambda: salt_of("turn", 0))
    other, _ = prompt_blocks(mix(ids, 7), 30, BLOCK, lambda: salt_of("turn", 1))
    assert np.array_equal(first[:3], other[:3])
    assert not np.isin(first[3:], other).any()


def tree_of(ids: list[list[int]], session_id: str = "s") -> SessionTree:
    arrays = [np.array(x, dtype=np.uint64) for x in ids]
    n = len(ids)
    stream = Stream(
        session_id, ROOT, ROOT, ROOT, [0] * n, [len(x) * BLOCK for x in ids], [1] * n, ["m"] * n, [0] * n, arrays
    )
    return SessionTree(session_id, 0, (stream,))


def test_salts_say_who_may_share() -> None:
    def keys(session: str = "s", play: int = 0, scope: str = "local", nonce: str = "n", bust: bool = True) -> list[int]:
        tree = tree_of([[1, 2]], session)
        blocks = PlayBlocks(tree, play, block_size=BLOCK, scope=scope, nonce=nonce, cache_bust=bust)
        return [int(k) for k in blocks.turn(0, 0)[0]]

    assert keys() == keys()
    assert keys() != keys(play=1)
    assert keys() != keys(session="t")
    assert keys() != keys(nonce="m")
    assert keys(bust=False) == keys(bust=False, play=1)
    assert keys(bust=False) != keys(bust=False, session="t")
    assert keys(scope="global") == keys(scope="global", session="t")
    assert keys(scope="global") != keys(scope="global", play=1)


def test_plays_can_be_asked_out_of_order() -> None:
    blocks = PlayBlocks(tree_of([[1], [1, 2], [3]]), 0, block_size=BLOCK, scope="local", nonce="n", cache_bust=True)
    forward = [blocks.turn(0, t)[0].tolist() for t in range(3)]
    assert [blocks.turn(0, t)[0].tolist() for t in (2, 0, 1)] == [forward[2], forward[0], forward[1]]


def test_tracker_keeps_salts_apart_and_forgets() -> None:
    tracker = CeilingTracker(BLOCK, BLOCK)
    keys = np.array([1, 2, 3], dtype=np.uint64)
    assert [tracker.observe(1, keys, 4), tracker.observe(1, keys, 4), tracker.observe(2, keys, 4)] == [0, 8, 0]
    tracker.forget(1)
    assert tracker.observe(1, keys, 4) == 0


def test_salt_depends_on_every_part() -> None:
    assert len({salt_of("a", 1), salt_of("a", 2), salt_of("a1"), salt_of("a", "1", ""), salt_of(1, "a")}) == 5


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=50), st.integers(0, 2**64 - 1))
def test_mix_is_a_bijection(keys: list[int], salt: int) -> None:
    mixed = mix(np.array(keys, dtype=np.uint64), salt)
    assert len(set(mixed.tolist())) == len(keys)
