"""What is found out before a run: several URLs, affinity, canaries, servers that refuse extras, secrets."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import polars as pl
import pytest

from agentx import target
from agentx.endpoint import Endpoint
from agentx.errors import DeploymentError, InputError
from agentx.generate import as_corpus, generate
from agentx.http import LARGEST_FETCH
from agentx.profile import load_profile
from agentx.replay import ReplayOptions
from agentx.replay_live import replay_live
from agentx.target import AFFINITY, CANARIES, LiveTarget, connect, sing
from agentx.units import printable
from tests.wire import SSE_HEAD, Script, Step, Wire, chunk, delta, head, reply, serving

S = 10**9
USAGE = '{{"prompt_tokens": {}, "completion_tokens": 1, "prompt_tokens_details": {{"cached_tokens": 0}}}}'
MODELS = '{"object": "list", "data": [{"id": "m", "max_model_len": %d, "owned_by": "vllm"}]}'


def answer_to(request: bytes, *, window: int = 9000, refuse: str = "", template: int = 0) -> Script:
    """A small server: models, no tokenizer, completions that count five-byte words."""
    top, _, body = request.partition(b"\r\n\r\n")
    path = top.split(b" ")[1].decode()
    if path == "/v1/models":
        return reply(MODELS % window)
    if not path.endswith("completions"):
        return reply("{}", "404 Not Found")
    if refuse and refuse.encode() in body:
        return reply(f'{{"error": {{"message": "Unrecognized request argument: {refuse}"}}}}', "400 Bad Request")
    words = len(re.findall(rb" [a-z]{4}", body)) + template
    event = delta("x", "length", USAGE.format(words))
    steps = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Script([Step(0, steps + chunk(f"data: {event}\n\ndata: [DONE]\n\n".encode()) + b"0\r\n\r\n")])


def endless() -> Script:
    """An event stream of 64 MiB that never says it is done."""
    line = b": " + b"x" * 65_533 + b"\n"
    return Script([Step(0, SSE_HEAD), *[Step(0, chunk(line))] * 1024])


def redirect(code: int) -> Script:
    return Script([Step(0, head(f"{code} Moved", "Location: http://there", "Content-Length: 0"))])


def looked_at(answer, *, wires: int = 1, **target):  # type: ignore[no-untyped-def]
    """What `connect` finds at scripted servers, and what they saw."""

    async def go():  # type: ignore[no-untyped-def]
        async with serving(answer) as one, serving(answer) as two:
            urls = [one.url, two.url][:wires]
            ready = await connect(
                LiveTarget(urls[0], more_urls=tuple(urls[1:]), **target), lambda: 0, lambda text: None, block_size=64
            )
            try:
                await sing(ready, lambda text: None)
            finally:
                for client in ready.clients:
                    client.close()
            return ready, one, two

    return asyncio.run(asyncio.wait_for(go(), 20))


def calls(wire: Wire) -> list[dict]:
    return [json.loads(r.partition(b"\r\n\r\n")[2]) for r in wire.requests if r.startswith(b"POST /v1/")]


@pytest.mark.parametrize("refused", ["ignore_eos", "min_tokens"])
def test_what_the_server_refuses_is_left_out_with_a_warning(refused: str) -> None:
    ready, one, _ = looked_at(lambda n, r: answer_to(r, refuse=refused))
    assert any(f"refuses {refused}" in text for text in ready.warnings)
    assert not getattr(ready.extras, refused)
    assert all(refused not in body for body in calls(one)[-CANARIES:])


def test_usage_is_asked_for_and_the_plan_is_sent() -> None:
    _, one, _ = looked_at(lambda n, r: answer_to(r))
    first = calls(one)[0]
    assert first["stream_options"] == {"include_usage": True}
    assert (first["stream"], first["max_tokens"], first["min_tokens"], first["ignore_eos"]) == (True, 1, 1, True)


def test_every_url_is_looked_at_and_the_shorter_window_counts() -> None:
    windows = iter((9000, 7000, 9000, 7000))

    def answer(number: int, request: bytes) -> Script:
        return answer_to(request, window=next(windows) if b"/v1/models" in request else 1)

    ready, one, two = looked_at(answer, wires=2)
    assert ready.found.max_model_len == 7000
    assert any("the shorter one counts" in text for text in ready.warnings)
    assert len(calls(two)) == CANARIES + 1
    assert len(calls(one)) == CANARIES + 2


def test_one_call_passes_and_eight_fail_is_told_as_what_it_is() -> None:
    seen = 0

    def answer(number: int, request: bytes) -> Script:
        nonlocal seen
        seen += b"POST /v1/" in request
        return answer_to(request) if seen <= 3 else reply("{}", "500 Internal Server Error")

    with pytest.raises(DeploymentError, match=f"one call passes, 7 of {CANARIES} at once fail"):
        looked_at(answer)


def at(path: str, script: Script):  # type: ignore[no-untyped-def]
    """The usual server, but for one path."""
    return lambda n, r: script if path.encode() in r.split(b"\r\n")[0] else answer_to(r)


@pytest.mark.parametrize(
    "said", ["null", "5", '"a"', "[]", "{}", '[{"a": 1}]', "[null]", '["a"]', "[1.5]", "[true]", '[{"id": "x"}]']
)
def test_a_tokenizer_that_says_nonsense_is_not_used(said: str) -> None:
    ready, *_ = looked_at(at("/tokenize", reply(f'{{"tokens": {said}}}')))
    assert ready.found.tokenize is None
    assert not ready.prompts.filler.table.exact


@pytest.mark.parametrize("path", ["/metrics", "/server_info", "/tokenize"])
@pytest.mark.parametrize(
    "text", ["", "null", "[1]", "\x00\x01", "<html>", '{"a": NaN}', "vllm:x{ nonsense", "[" * 3000]
)
def test_describing_endpoints_may_say_anything(path: str, text: str) -> None:
    ready, *_ = looked_at(at(path, reply(text)))
    assert ready.found.max_model_len == 9000


@pytest.mark.parametrize(
    ("path", "script", "told"),
    [
        ("/v1/models", redirect(301), "is elsewhere: it answers 301 and names http://there"),
        ("/v1/models", reply("<html>", "200 OK"), "is no model list: <html>"),
        ("/v1/models", reply('{"data": null}'), "is no model list"),
        ("/v1/models", reply("{}", "503 Busy"), "answered 503"),
        ("/v1/models", Script([Step(0, head("200 OK", "Content-Length: 999") + b"{}")], "clean"), "is no model list"),
        ("/v1/models", endless(), f"an answer of over {LARGEST_FETCH} bytes"),
        ("completions", endless(), f"an answer of over {LARGEST_FETCH} bytes"),
        ("/v1/models", Script([], "reset"), "connection lost"),
        ("/v1/models", Script([], "clean"), "closed the connection without an answer"),
        ("completions", redirect(307), "a call of one token failed: HTTP 307"),
        ("completions", reply("<html>"), "is neither an event stream nor a completion"),
        ("completions", reply("{}", "429 Busy"), "a call of one token failed: HTTP 429"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_sentence(path: str, script: Script, told: str) -> None:
    with pytest.raises(DeploymentError, match=told):
        looked_at(at(path, script))


def test_the_user_is_told_while_the_first_call_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "PATIENCE_S", 0.1)
    notes: list[str] = []

    async def slow() -> int:
        await asyncio.sleep(0.35)
        return 5

    assert asyncio.run(target._told_while_waiting(slow(), "nothing came", notes.append)) == 5
    assert notes[0] == "nothing came for 0 s, still waiting"
    assert 2 <= len(notes) <= 3


def test_a_tokenizer_of_very_many_tokens_takes_no_time() -> None:
    started = time.monotonic()
    many = ", ".join(str(number) for number in range(200_000))
    ready, *_ = looked_at(at("/tokenize", reply(f'{{"tokens": [{many}]}}')))
    assert not ready.prompts.filler.table.exact
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("size", ["0", "9" * 20, "9" * 5000, "x"])
def test_a_cache_unit_that_is_none_is_not_taken(size: str) -> None:
    ready, *_ = looked_at(at("/metrics", reply(f'vllm:cache_config_info{{block_size="{size}"}} 1\n')))
    assert ready.cache_block == 64


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:1/中", "http://☃.invalid", "http://h:99999999"])
def test_urls_that_are_none_are_told(url: str) -> None:
    with pytest.raises(InputError, match="--url"):
        Endpoint.parse(url)


def test_a_long_list_of_models_is_cut() -> None:
    many = ", ".join(f'{{"id": "m{number}"}}' for number in range(500))
    with pytest.raises(InputError, match=r"m18, m19 and 480 more$"):
        looked_at(lambda n, r: reply(f'{{"data": [{many}]}}'))


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert printable("a\x1b[31mred\x07 \u202e\x9bm\r\nb ü 深") == "a\\x1b[31mred\\x07 \\u202e\\x9bm  b ü 深"


def test_several_models_are_listed_not_guessed() -> None:
    models = '{"data": [{"id": "a"}, {"id": "b"}, {"id": "lora", "parent": "a"}]}'
    with pytest.raises(InputError, match="lists 3 models: a, b, lora"):
        looked_at(lambda n, r: reply(models))
    with pytest.raises(InputError, match="'c' is not served"):
        looked_at(lambda n, r: reply(models), model="c")


def test_an_echoed_key_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-TESTONLY-0123456789")
    echo = reply('{"error": {"message": "bad key sk-TESTONLY-0123456789"}}', "401 Unauthorized")
    with pytest.raises(DeploymentError) as caught:
        looked_at(lambda n, r: echo, api_key_env="MY_KEY")
    assert "TESTONLY" not in "".join(caught.value.lines())


def test_lanes_are_spread_and_streams_keep_their_affinity(tmp_path: Path) -> None:
    corpus = as_corpus(*generate(load_profile("small").model_copy(update={"sessions": 8})))
    options = ReplayOptions(4, 20 * S, 1, plays=1, think_cap_ns=0, ramp_ns=0, self_check=False, canary=False)
    folder = tmp_path / "r"

    async def serve() -> tuple[Wire, Wire]:
        async with serving(lambda n, r: answer_to(r)) as one, serving(lambda n, r: answer_to(r)) as two:
            target = LiveTarget(one.url, more_urls=(two.url,), affinity="auto")
            await asyncio.to_thread(replay_live, corpus, target, options, folder)
            return one, two

    one, two = asyncio.run(asyncio.wait_for(serve(), 60))
    calls_table = pl.read_parquet(folder / "calls.parquet")
    assert set(calls_table.group_by("lane").agg(pl.col("endpoint").n_unique())["endpoint"]) == {1}
    assert calls_table["endpoint"].n_unique() == 2
    ids: dict[str, int] = {}
    for request in (*one.requests, *two.requests):
        if b"X-Session-ID: " in request:
            found = {name: re.search(rf"{name}: (\w+)".encode(), request) for name in AFFINITY}
            values = {match[1] for match in found.values() if match}
            assert len(values) == 1
            value = values.pop().decode()
            ids[value] = ids.get(value, 0) + 1
    turns = corpus.table.group_by("session_id").aggregate([("turn", "count")])["turn_count"].to_pylist()
    assert sorted(ids.values()) == sorted(turns)
