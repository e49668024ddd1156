"""Prompts: one token per word wherever it stands, equal blocks equal text, bodies that say what was asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.errors import InputError
from agentx.prompts import Extras, Filler, PromptBuilder, RecentPrompts
from agentx.tokens import COMMON_WORDS, WordTable, common_words, token_ids, words_from_server, words_from_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra `engine` is not installed")
tiny = pytest.importorskip("agentx.engines.tiny")

BLOCK = 64


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return tokenizers.Tokenizer.from_file(str(tiny.tiny_folder() / "tokenizer.json"))


@pytest.fixture(scope="module")
def table() -> WordTable:
    return words_from_tokenizer(tiny.tiny_folder())


def words_of(table: WordTable) -> list[str]:
    return [bytes(unit).decode() for unit in table.units]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sequence_of_words_is_as_many_tokens(tokenizer, table: WordTable, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    words = words_of(table)
    chosen = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=60))
    text = "".join(chosen)
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == len(chosen)
    assert len(tokenizer.encode(text.lstrip(), add_special_tokens=False).ids) == len(chosen)


def test_tables_hold_words_of_one_width(table: WordTable) -> None:
    assert len(table) >= 100
    assert {len(word) for word in words_of(table)} == {table.units.shape[1]}
    assert table.exact
    assert len(set(words_of(table))) == len(table)


def test_the_common_words_are_what_they_claim() -> None:
    words = COMMON_WORDS.split()
    assert {len(word) for word in words} == {4}
    assert len(set(words)) == len(words) >= 400
    assert not common_words().exact


@pytest.mark.parametrize(("vocabulary", "digits"), [(None, 4), (8192, 4), (32_000, 5), (151_936, 5), (2_000, 4)])
def test_token_ids_are_of_one_width_and_in_the_vocabulary(vocabulary: int | None, digits: int) -> None:
    table = token_ids(vocabulary)
    ids = [int(word.rstrip(",")) for word in words_of(table)]
    assert table.units.shape[1] == digits + 1
    assert len(ids) >= 500
    assert max(ids) < (vocabulary or 8000)
    with pytest.raises(InputError, match="too few ids"):
        token_ids(20)


def test_words_are_checked_with_the_server(tokenizer) -> None:  # type: ignore[no-untyped-def]
    asked = 0

    async def tokenize(text: str) -> list[int]:
        nonlocal asked
        asked += 1
        return tokenizer.encode(text, add_special_tokens=False).ids

    table = asyncio.run(words_from_server(tokenize))
    assert table.exact
    assert asked <= 20
    for word in words_of(table):
        assert len(tokenizer.encode(word, add_special_tokens=False).ids) == 1


def test_a_server_that_splits_every_word_is_told_plainly() -> None:
    async def letters(text: str) -> list[int]:
        return [ord(c) for c in text]

    with pytest.raises(InputError, match="only 0 words"):
        asyncio.run(words_from_server(letters))


def test_a_tokenizer_that_is_not_there_is_told_plainly(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json there"):
        words_from_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read"):
        words_from_tokenizer(tmp_path)


keys_of = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6).map(lambda keys: np.array(keys, dtype=np.uint64))


@settings(max_examples=60, deadline=None)
@given(keys_of, st.integers(1, BLOCK))
def test_a_block_is_a_function_of_its_key(keys: np.ndarray, last: int) -> None:
    filler = Filler(common_words())
    n_tokens = (len(keys) - 1) * BLOCK + last
    whole = filler.content(keys, BLOCK, n_tokens)
    assert len(whole) == n_tokens * filler.width
    alone = b"".join(filler.content(keys[i : i + 1], BLOCK, BLOCK) for i in range(len(keys)))
    assert alone.startswith(whole)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, BLOCK))
def test_common_tokens_agree_with_the_text(a: int, b: int, limit: int) -> None:
    filler = Filler(common_words())
    one, two = (filler.content(np.array([key], dtype=np.uint64), BLOCK, limit) for key in (a, b))
    same = 0
    while same < limit and one[: (same + 1) * filler.width] == two[: (same + 1) * filler.width]:
        same += 1
    assert filler.common_tokens(a, b, limit) == same


def test_filler_is_varied() -> None:
    filler = Filler(common_words())
    text = filler.content(np.arange(50, dtype=np.uint64), BLOCK, 50 * BLOCK).decode()
    words = text.split()
    assert len(set(words)) > 300
    assert len({tuple(words[i : i + 3]) for i in range(len(words) - 2)}) > 0.99 * (len(words) - 2)


def test_a_long_prompt_costs_less_than_joining_its_words() -> None:
    filler, keys = Filler(common_words()), np.arange(3829, dtype=np.uint64)
    chosen = filler.words(keys, BLOCK).reshape(-1)[:245_000].tolist()
    units = [bytes(unit) for unit in filler.table.units]

    def took(work) -> float:  # type: ignore[no-untyped-def]
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        return best

    ours = took(lambda: filler.content(keys, BLOCK, 245_000))
    plain = took(lambda: b"".join([units[word] for word in chosen]))
    assert ours < plain


def builder(endpoint: str, table: WordTable | None = None, **more: object) -> PromptBuilder:
    return PromptBuilder(Filler(table or common_words()), model='m"x', endpoint=endpoint, block_size=BLOCK, **more)  # type: ignore[arg-type]


def test_bodies_parse_and_hold_exactly_what_was_asked() -> None:
    keys = np.arange(3, dtype=np.uint64)
    chat = json.loads(builder("chat", overhead_tokens=10).body(keys, 5, 7))
    (message,) = chat["messages"]
    assert (message["role"], len(message["content"].split())) == ("user", 2 * BLOCK + 5 - 10)
    assert (chat["model"], chat["max_tokens"], chat["min_tokens"], chat["ignore_eos"]) == ('m"x', 7, 7, True)
    assert (chat["stream"], chat["stream_options"]) == (True, {"include_usage": True})
    text = json.loads(builder("completions", extras=Extras(False, False, False)).body(keys, BLOCK, 0))
    assert (len(text["prompt"].split()), text["max_tokens"]) == (3 * BLOCK, 1)
    assert not {"min_tokens", "ignore_eos", "stream_options"} & set(text)
    ids = json.loads(builder("completions", token_ids(8192)).body(keys, 1, 3))
    assert len(ids["prompt"]) == 2 * BLOCK + 1
    assert all(1000 <= token < 8192 for token in ids["prompt"])
    assert len(json.loads(builder("chat", overhead_tokens=999).body(keys, 1, 1))["messages"][0]["content"].split()) == 1
    with pytest.raises(InputError, match="token-id prompts go to /v1/completions only"):
        builder("chat", token_ids(8192))


def test_prompts_of_growing_turns_are_prefixes_of_each_other() -> None:
    made = builder("chat")
    short, long = np.arange(4, dtype=np.uint64), np.arange(6, dtype=np.uint64)
    first = json.loads(made.body(short, BLOCK, 1))["messages"][0]["content"]
    second = json.loads(made.body(long, 9, 1))["messages"][0]["content"]
    assert second.startswith(first)


@settings(max_examples=200, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 6), st.integers(1, BLOCK)),
        min_size=1,
        max_size=12,
    ),
    limit=st.sampled_from([0, 2000, 10**6]),
)
def test_a_prompt_made_from_the_one_before_is_the_same(turns: list[tuple[int, int, int, int]], limit: int) -> None:
    filler = Filler(common_words())
    recent = RecentPrompts(filler, BLOCK, limit_bytes=limit)
    streams: dict[int, list[int]] = {}
    fresh = itertools.count(1)
    for stream, keep, new, last in turns:
        known = streams[stream] = streams.get(stream, [])[:keep] + [next(fresh) for _ in range(new)]
        keys = np.array(known, dtype=np.uint64)
        n_tokens = (len(keys) - 1) * BLOCK + last
        assert recent.content(stream, keys, n_tokens) == filler.content(keys, BLOCK, n_tokens)
        assert recent._bytes == sum(len(content) for _, content in recent._last.values()) <= max(limit, 0)
