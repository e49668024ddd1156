"""The reference sampler: its arithmetic, its hashes, and what may not disturb it."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx import reference

SMALL = reference.Parameters(
    seed=42,
    sessions=200,
    block_size=64,
    id_prefix="small",
    isl=(2000, 4000, 6000),
    osl=(128, 256, 512),
    delay=(1, 3, 8),
    turn_values=(1, 2, 3, 4, 6),
    turn_weights=(30, 30, 20, 12, 8),
    cache_hit=(0.88, 0.90),
    isl_clamp=(512, 7000),
    osl_clamp=(8, 1024),
    delay_clamp=(1, 60),
)


def test_fit_goes_through_its_percentiles() -> None:
    mu, sigma = 7.0, 0.8
    triple = tuple(np.exp(mu + sigma * z) for z in (0, reference.Z90, reference.Z99))
    assert reference.fit_lognormal(triple) == pytest.approx((mu, sigma))


def test_draws_keep_their_shape() -> None:
    drawn = reference.draw(SMALL)
    assert len(drawn.turns) == 200
    columns = (drawn.input_tokens, drawn.output_tokens, drawn.think_s, drawn.keep_blocks, drawn.new_blocks)
    assert {len(column) for column in columns} == {sum(drawn.turns)} == {479}
    blocks = np.array(drawn.keep_blocks) + np.array(drawn.new_blocks)
    assert (blocks == np.maximum(1, np.array(drawn.input_tokens) // 64)).all()
    first = np.cumsum([0, *drawn.turns[:-1]])
    assert (np.array(drawn.keep_blocks)[first] == 0).all()
    assert (np.array(drawn.think_s)[first] == 0).all()


def test_fewer_sessions_are_the_first_of_many() -> None:
    few, many = reference.draw(replace(SMALL, sessions=7)), reference.draw(SMALL)
    assert few.turns == many.turns[:7]
    assert few.input_tokens == many.input_tokens[: len(few.input_tokens)]


def test_global_generators_are_neither_read_nor_moved() -> None:
    random.seed(1)
    state, numpy_state = random.getstate(), repr(np.random.get_state())
    first = reference.draw(SMALL)
    assert random.getstate() == state
    assert repr(np.random.get_state()) == numpy_state
    random.seed(2)
    assert reference.draw(SMALL) == first
    assert reference.draw(replace(SMALL, seed=43)) != first


@settings(max_examples=30)
@given(st.integers(0, 2**64), st.integers(0, 10**6), st.integers(0, 200), st.integers(0, 300))
def test_ids_are_the_hashes_of_their_place(seed: int, session: int, turn: int, count: int) -> None:
    expected = [
        int.from_bytes(hashlib.blake2b(f"{seed}:{session}:{turn}:{b}".encode(), digest_size=8).digest(), "big") % 2**63
        for b in range(count)
    ]
    ids = reference.new_block_ids(seed, session, turn, count)
    assert ids.dtype == np.uint64
    assert ids.tolist() == expected


def test_session_id() -> None:
    expected = hashlib.blake2b(b"caseA-42-00007", digest_size=18).hexdigest()
    assert reference.session_id("caseA", 42, 7) == expected
    assert len(expected) == 36
