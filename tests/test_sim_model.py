"""The model of a serve: its law, its limits, its cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.deployment import Deployment, load_deployment
from agentx.prefix import PrefixTree, engine_ceiling, mix
from agentx.sim.model import BlockCache, Event, Request, SimModel, prefix_keys
from agentx.units import NS_PER_S

MI325X = load_deployment("mi325x")
MI300X = load_deployment("mi300x")
BLOCK = 64


def run_model(model: SimModel, arrivals: list[tuple[int, Request]], gone: dict[Request, int] | None = None) -> None:
    """Let requests arrive at their times, and some clients go away at theirs, until nothing happens any more."""
    steps: list[tuple[int, int, Request]] = [(time, 0, one) for time, one in arrivals]
    steps += [(time, 1, one) for one, time in (gone or {}).items()]
    steps.sort(key=lambda step: step[:2])
    while steps or model.next_event_ns() is not None:
        event = model.next_event_ns()
        if event is not None and (not steps or event <= steps[0][0]):
            for kind, request in model.advance(event):
                assert kind is Event.DECODING or request.end_ns == event
        else:
            now, leaves, request = steps.pop(0)
            if leaves:
                model.cancel(now, request)
            else:
                model.submit(now, request)
        assert len(model.running) <= model.deployment.slots
        assert model.waiting >= 0
    assert (len(model.running), model.waiting) == (0, 0)


def request(n_in: int, n_out: int, first: int = 0) -> Request:
    return Request(prefix_keys(np.arange(first, first + n_in // BLOCK, dtype=np.uint64)), n_in, n_out)


@pytest.mark.parametrize("deployment", [MI325X, MI300X], ids=lambda d: d.name)
@pytest.mark.parametrize("n_out", [1, 64, 256, 1024])
def test_one_request_alone_follows_the_published_fit(deployment: Deployment, n_out: int) -> None:
    alone = request(1024, n_out)
    run_model(SimModel(deployment, BLOCK), [(0, alone)])
    assert alone.first_token_ns is not None
    assert alone.end_ns is not None
    assert alone.end_ns == pytest.approx((deployment.c0_s + deployment.k_s * n_out) * NS_PER_S, abs=3)
    assert alone.end_ns - alone.first_token_ns == (n_out - 1) * round(deployment.k_s * NS_PER_S)


def test_one_prefill_queue_is_what_table_3_of_the_seed_shows() -> None:
    """TTFT P99 of waves of 1024-token prompts on MI325X, in seconds by concurrency."""
    table = {4: 1.2, 8: 2.2, 16: 3.2, 32: 6.4, 64: 11.1, 128: 19.9}
    slope, intercept = np.polyfit(list(table), list(table.values()), 1)
    assert intercept == pytest.approx(MI325X.c0_s + MI325X.k_s, rel=0.02)
    assert 1024 / slope == pytest.approx(6828, abs=1)
    assert MI325X.fit_input_tokens / (MI325X.prefill_tok_s / MI325X.dp) > MI325X.c0_s  # a lane's share is too slow


def test_slots_are_the_limit_at_short_context() -> None:
    """A wave of twice the slots takes two decodes; a wave that fits takes one."""
    quick = MI300X.model_copy(update={"prefill_tok_s": 1e9})
    for wave, decodes in ((64, 1), (128, 2)):
        requests = [request(1024, 256, 100_000 * number) for number in range(wave)]
        run_model(SimModel(quick, BLOCK), [(0, one) for one in requests])
        last = max(one.end_ns or 0 for one in requests) / NS_PER_S
        assert last == pytest.approx(decodes * 256 * quick.k_s + quick.floor_s, rel=0.01)


Arrivals = st.lists(
    st.tuples(
        st.integers(0, 20), st.integers(1, 4000), st.integers(1, 60), st.integers(0, 3), st.none() | st.integers(0, 30)
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(Arrivals, st.integers(1, 4))
def test_limits_hold_and_nothing_is_lost(arrivals: list[tuple[int, int, int, int, int | None]], slots: int) -> None:
    small = MI325X.model_copy(update={"dp": 1, "max_num_seqs": slots, "kv_pool_tokens": 2048})
    model = SimModel(small, BLOCK)
    arrivals = sorted(arrivals, key=lambda entry: entry[0])
    requests = [request(n_in, n_out, 1000 * first) for _, n_in, n_out, first, _ in arrivals]
    times = [entry[0] * NS_PER_S for entry in arrivals]
    gone = {
        one: (entry[0] + entry[4]) * NS_PER_S
        for one, entry in zip(requests, arrivals, strict=True)
        if entry[4] is not None
    }
    run_model(model, list(zip(times, requests, strict=True)), gone)
    assert len(model.cache) <= 2048 // BLOCK
    for one, arrived in zip(requests, times, strict=True):
        assert one.cached_tokens % BLOCK == 0
        assert 0 <= one.cached_tokens < one.input_tokens
        if one not in gone:
            assert one.first_token_ns is not None
            assert one.end_ns is not None
            todo = (one.input_tokens - one.cached_tokens) / small.prefill_tok_s
            least = (todo + small.floor_s + small.k_s) * NS_PER_S
            assert one.first_token_ns - arrived >= least - 3
            assert one.end_ns == one.first_token_ns + model.k_ns * (one.output_tokens - 1)
    firsts = [one.first_token_ns for one in requests if one.first_token_ns is not None]
    assert firsts == sorted(firsts), "first come, first served"


def test_who_leaves_frees_the_place_he_holds() -> None:
    one_slot = MI325X.model_copy(update={"dp": 1, "max_num_seqs": 1})
    model = SimModel(one_slot, BLOCK)
    holder, leaver, next_one = request(64, 1000), request(64, 1000, 10), request(64, 10, 20)
    run_model(model, [(0, holder), (0, leaver), (0, next_one)], {leaver: 5 * NS_PER_S, holder: 10 * NS_PER_S})
    assert leaver.first_token_ns is None
    assert next_one.first_token_ns == 10 * NS_PER_S + model.k_ns
    assert model.cancel(20 * NS_PER_S, next_one) == []


def test_what_waits_and_what_the_pools_hold() -> None:
    one_slot = MI325X.model_copy(update={"dp": 1, "max_num_seqs": 1, "kv_pool_tokens": 1000})
    model = SimModel(one_slot, BLOCK)
    first, second = request(100, 50), request(100, 50, 10)
    model.submit(0, first)
    model.submit(0, second)
    assert (len(model.running), model.waiting, model.kv_usage(0)) == (0, 2, 0.0)
    model.advance(2 * NS_PER_S)
    assert (len(model.running), model.waiting) == (1, 1)
    assert first.first_token_ns is not None
    assert model.kv_usage(first.first_token_ns - 1) == 0.1
    assert model.kv_usage(first.first_token_ns + 9 * model.k_ns) == 0.11


def test_the_cache_serves_leading_runs_and_forgets_the_least_recent() -> None:
    cache = BlockCache(4)
    cache.keep([1, 2, 3])
    assert cache.leading([1, 2, 9, 3]) == 2
    cache.keep([7, 8])
    assert len(cache) == 4
    assert (cache.leading([7, 8]), cache.leading([1, 2, 3])) == (2, 2)
    cache.keep([10, 11, 12, 13, 14, 15])
    assert (len(cache), cache.leading([10, 11, 12, 13, 14, 15])) == (4, 4)


def test_the_last_token_is_never_served() -> None:
    model = SimModel(MI325X, BLOCK)
    one, two, three = request(128, 1), request(128, 1), request(129, 1)
    run_model(model, [(0, one), (NS_PER_S, two), (2 * NS_PER_S, three)])
    assert [r.cached_tokens for r in (one, two, three)] == [0, 64, 128]


Prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12)


@given(Prompts, st.integers(1, BLOCK))
def test_a_cache_with_room_serves_the_ceiling_exactly(prompts: list[list[int]], last: int) -> None:
    """Blocks count with all that stands before them: a block seen at another place is another block."""
    model, seen = SimModel(MI325X, BLOCK), PrefixTree(BLOCK)
    for number, ids in enumerate(prompts):
        keys = mix(np.array(ids, dtype=np.uint64), 1)
        tokens = (len(ids) - 1) * BLOCK + last
        full = keys if last == BLOCK else keys[:-1]
        one = Request(prefix_keys(full), tokens, 1)
        run_model(model, [(number * 100 * NS_PER_S, one)])
        assert one.cached_tokens == engine_ceiling(seen.match(keys, last), tokens, BLOCK)
        seen.insert(keys, last)


def test_context_that_does_not_fit_is_refused() -> None:
    model = SimModel(MI300X, BLOCK)
    assert model.refusal(899_000, 1000) is None
    assert "maximum context length is 900000 tokens" in (model.refusal(899_001, 1000) or "")
