"""The event parser under every split, and what counts as output."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.sse import EventParser, StreamFacts, StreamParser


def events(*parts: bytes) -> list[tuple[bytes, bytes]]:
    parser = EventParser()
    found = [event for part in parts for event in parser.feed(part)]
    return found + list(parser.finish())


def facts_of(*payloads: dict | str, keep_text: bool = True) -> StreamFacts:
    parser = StreamParser(keep_text)
    for number, payload in enumerate(payloads):
        text = payload if isinstance(payload, str) else json.dumps(payload)
        parser.feed(number * 10, f"data: {text}\n\n".encode())
    return parser.finish(len(payloads) * 10)


def chunk(finish: str | None = None, **delta: object) -> dict:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


lines = st.sampled_from(
    [
        b"data: x",
        b"data:y",
        b"data:  z",
        b": ping",
        b"event: error",
        b"id: 1",
        b"retry: 5",
        b"data",
        b"",
        b"",
        b"foo",
        "data: é好".encode(),
    ]
)


@settings(max_examples=300)
@given(st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=25), st.data(), st.booleans())
def test_any_split_gives_the_same_events(parts: list[tuple[bytes, bytes]], data: st.DataObject, mark: bool) -> None:
    stream = (b"\xef\xbb\xbf" if mark else b"") + b"".join(line + end for line, end in parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert events(*pieces) == events(stream)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_garbage_never_breaks_it(stream: bytes, cuts: list[int]) -> None:
    parser = StreamParser(keep_text=True)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for a, b in itertools.pairwise(places):
        parser.feed(a, stream[a:b])
    parser.finish(len(stream))


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "usage", "error", "prompt_tokens", "tool_calls", "index", "function",
                 "prompt_tokens_details", "finish_reason", "message", "model"]
            ),
            inner,
            max_size=4,
        ),
        max_leaves=20,
    )
)  # fmt: skip
def test_any_json_is_survived(value: object) -> None:
    facts_of(json.dumps(value))


def test_all_line_ends_and_the_optional_space() -> None:
    assert events(b"data: a\n\ndata:b\r\n\r\ndata:  c\r\rdata: d") == [
        (b"", b"a"), (b"", b"b"), (b"", b" c"), (b"", b"d"),
    ]  # fmt: skip


def test_lines_of_one_event_join() -> None:
    assert events(b"event: x\ndata: a\ndata: b\n\n") == [(b"x", b"a\nb")]


def test_a_cut_between_cr_and_lf_adds_no_event() -> None:
    assert events(b"data: a\r", b"\n\r", b"\ndata: b\r\n\r\n") == [(b"", b"a"), (b"", b"b")]


def test_only_output_counts_as_output() -> None:
    facts = facts_of(
        chunk(role="assistant", content=""),
        chunk(content=None, reasoning_content="hm"),
        chunk(reasoning="so"),
        chunk(content="x"),
        chunk("stop"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
        "[DONE]",
    )
    assert facts.chunk_ns == [10, 20, 30]
    assert facts.first_content_ns == 30
    assert (facts.prompt_tokens, facts.completion_tokens, facts.cached_tokens) == (3, 4, None)
    assert (facts.content, facts.reasoning, facts.finish_reason, facts.done) == ("x", "hmso", "stop", True)


def test_tool_call_fragments_merge_by_index() -> None:
    facts = facts_of(
        chunk(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]),
        chunk(tool_calls=[{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    )
    assert facts.tool_calls == [
        {"id": "a", "name": "f", "arguments": '{"x": 1}'},
        {"id": "b", "name": "g", "arguments": "{}"},
    ]
    assert facts.first_content_ns == 0


def test_null_missing_and_zero_cached_tokens_are_three_things() -> None:
    def cached(details: object) -> int | None:
        return facts_of({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": details}}).cached_tokens

    assert [cached(None), cached({}), cached({"cached_tokens": None}), cached({"cached_tokens": 0})] == [None] * 3 + [0]
    assert facts_of({"usage": {"prompt_tokens": True, "completion_tokens": -1}}).completion_tokens is None


def test_usage_in_every_event_keeps_the_last() -> None:
    usage = [{"prompt_tokens": 5, "completion_tokens": n} for n in (1, 2, 3)]
    facts = facts_of(*({**chunk(content="a"), "usage": u} for u in usage))
    assert (facts.completion_tokens, facts.prompt_tokens) == (3, 5)


def test_errors_in_the_stream_in_any_shape() -> None:
    for payload in (
        {"error": {"message": "boom", "code": 500}},
        {"error": "boom"},
        {"object": "error", "message": "boom", "code": 500},
    ):
        assert facts_of(chunk(content="a"), payload).error_message == "boom"
    parser = StreamParser()
    parser.feed(0, b"event: error\ndata: boom\n\n")
    assert parser.finish(0).error_message == "boom"
    assert facts_of({"error": None, "choices": []}).error_message is None
