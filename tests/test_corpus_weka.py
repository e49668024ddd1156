"""The weka_trace reader: recorded traces as they are, the public bug reports, and what it refuses."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.corpus import Corpus, fits, load_corpus
from agentx.errors import FaultsError, InputError
from agentx.prefix import PlayBlocks, PrefixTree
from agentx.turns import ROOT, SessionTree
from tests.cases import expected

S = 1_000_000_000


def call(t: float, ids: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    ids = [1] if ids is None else ids
    return {"t": t, "type": "s", "model": "m", "in": 64 * max(1, len(ids)), "out": 5, "hash_ids": ids, **fields}


def subagent(t: float, requests: list[Any], **fields: Any) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": requests, **fields}


def session(requests: list[Any], name: str = "s", **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": requests,
        **fields,
    }


def load(tmp_path: Path, *sessions: Any, **options: Any) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes("\n".join(json.dumps(one) for one in sessions).encode())
    return load_corpus(path, **options)


def faults(tmp_path: Path, *sessions: Any) -> list[str]:
    with pytest.raises(FaultsError) as caught:
        load(tmp_path, *sessions)
    return [message for message, _ in caught.value.faults]


def shape(tree: SessionTree) -> dict[str, Any]:
    """Per stream: (parent, spawn turn, join turn, seconds of pause before each turn)."""
    return {
        stream.session_id: (stream.parent, stream.spawn_turn, stream.join_turn, [ns / S for ns in stream.think_ns])
        for stream in tree.streams
    }


# Recorded traces.


def test_recorded_traces_load_as_they_are(shared: Path) -> None:
    corpus = load_corpus(shared / "traces" / "kv-cache-tester")
    assert len(corpus.sessions) == 18
    assert corpus.n_turns == 285
    assert [len(tree.streams) for tree in corpus.sessions][-3:] == [4, 5, 3]
    for tree in corpus.sessions:
        file = next((shared / "traces" / "kv-cache-tester").rglob(f"{tree.session_id}.json"))
        recorded = orjson.loads(file.read_bytes())
        lists = [recorded, *(item for item in recorded["requests"] if item["type"] == "subagent")]
        for stream, source in zip(tree.streams, lists, strict=True):
            calls = [item for item in source["requests"] if item["type"] != "subagent"]
            assert [ids.tolist() for ids in stream.block_ids()] == [item["hash_ids"] for item in calls]
            assert list(stream.input_tokens) == [item["in"] for item in calls]
            assert list(stream.output_tokens) == [item["out"] for item in calls]
            assert [ns / S for ns in stream.think_ns][1:] == [item["think_time"] for item in calls][1:]


def test_recorded_subagents_start_when_their_call_ended(shared: Path) -> None:
    """In these files a subagent's `t` is its end: t - duration lies within a second after the spawning call."""
    corpus = load_corpus(shared / "traces" / "kv-cache-tester" / "subagents")
    assert corpus.manifest["subagent_times"] == "relative_end"
    assert any("basis relative_end" in note for note in corpus.notes)
    starts = [stream.think_ns[0] / S for tree in corpus.sessions for stream in tree.streams[1:]]
    assert len(starts) == 9
    assert min(starts) > 0.4
    assert max(starts) < 1
    forced = load_corpus(shared / "traces" / "kv-cache-tester" / "subagents", subagent_times="relative")
    assert forced.sessions[0].streams[1].think_ns[0] == round((160.959 - 18.99) * S)


# Public bug reports; each input beside what must stay as it is.


@pytest.fixture(scope="module")
def cases(shared: Path) -> Path:
    return shared / "cases" / "inputs"


def totals(corpus: Corpus) -> tuple[int, int, int]:
    turns = corpus.sessions.turns
    return corpus.n_turns, int(turns.ints("input_tokens").sum()), int(turns.ints("output_tokens").sum())


def test_f01_optional_fields(cases: Path) -> None:
    want = expected(cases.parent.parent, "F01")
    corpus = load_corpus(cases / "F01.trace.json")
    assert totals(corpus) == (want["n_requests"], want["sum_in"], want["sum_out"])
    assert f"requests without think_time: {want['null_think_time']} (taken from the recorded times)" in corpus.notes
    assert "fields without meaning here: x_unknown" in corpus.notes
    assert shape(corpus.sessions[0]) == {"opt": (ROOT, ROOT, ROOT, [0.0, 2.0])}


def test_f02_input_is_the_truth_for_the_length(cases: Path) -> None:
    want = expected(cases.parent.parent, "F02")
    corpus = load_corpus(cases / "F02.trace.json")
    assert totals(corpus)[:2] == (want["n_requests"], want["sum_in"])
    blocks = PlayBlocks(corpus.sessions[0], 0, block_size=64, scope="local", nonce="", cache_bust=True)
    assert [blocks.turn(0, turn)[1] for turn in range(2)] == want["last_block_tokens"]


def test_f04_one_id_has_one_length(cases: Path, tmp_path: Path) -> None:
    want = expected(cases.parent.parent, "F04")
    with pytest.raises(FaultsError, match="hash id 7 stands for blocks of 10 tokens and 64 tokens") as caught:
        load_corpus(cases / "F04.trace.json")
    assert len(caught.value.faults) == len(want["conflicting_ids"])
    trace = orjson.loads((cases / "F04.trace.json").read_bytes())
    trace["requests"][0]["in"] = 192  # sibling: the same ids, whole in both
    assert load(tmp_path, trace).n_turns == 2


def test_f04_scope_decides_who_may_conflict(tmp_path: Path) -> None:
    short, full = session([call(0, [5, 7], **{"in": 70})], "a"), session([call(0, [5, 7])], "b")
    assert load(tmp_path, short, full).n_turns == 2
    (fault,) = faults(tmp_path, {**short, "hash_id_scope": "global"}, {**full, "hash_id_scope": "global"})
    assert "hash id 7 stands for blocks of 6 tokens and 64 tokens" in fault


def test_f05_ids_are_whole_64_bit_numbers(cases: Path, tmp_path: Path) -> None:
    want = expected(cases.parent.parent, "F05")
    stream = load_corpus(cases / "F05.trace.json").sessions[0].streams[0]
    assert stream.keep_blocks == [0, want["reuse_blocks"]]
    assert len(np.unique(np.concatenate(stream.new_ids))) == want["distinct_ids"]
    big = [2**64 - 1, 2**63, 2**53 + 1, 0]
    assert load(tmp_path, session([call(0, big)])).sessions[0].streams[0].new_ids[0].tolist() == big
    for bad in (-1, 2**64, 1.0, True, "7", None):
        (fault,) = faults(tmp_path, session([call(0), call(1, [1, bad])]))  # type: ignore[list-item]
        assert fault.startswith("line 1: requests[1].hash_ids[1] is ")
        assert f"0 to {2**64 - 1}" in fault


def absolute_times(corpus: Corpus) -> dict[str, list[float]]:
    children = corpus.table.filter(corpus.table["parent_session_id"].is_valid()).to_pylist()
    times: dict[str, list[float]] = {}
    for row in children:
        times.setdefault(row["root_session_id"], []).append(row["t_ns"] / S)
    return times


def test_f07_one_basis_for_the_corpus(cases: Path, tmp_path: Path) -> None:
    want = expected(cases.parent.parent, "F07")
    corpus = load_corpus(cases / "F07.jsonl")
    assert corpus.manifest["subagent_times"] == want["basis"]
    assert absolute_times(corpus) == want["child_abs_t"]
    assert any("basis relative" in note for note in corpus.notes)
    alone = tmp_path / "b.jsonl"
    alone.write_bytes((cases / "F07.jsonl").read_bytes().splitlines()[1])
    corpus = load_corpus(alone)
    assert corpus.manifest["subagent_times"] == want["B_alone"]["basis"]
    assert absolute_times(corpus) == {"B": want["B_alone"]["child_abs_t"]}
    assert absolute_times(load_corpus(alone, subagent_times="relative")) == {"B": want["child_abs_t"]["B"]}
    with pytest.raises(InputError, match="not known"):
        load_corpus(alone, subagent_times="both")


def test_f10_streams_have_ids_of_their_own_and_sessions_share_nothing(cases: Path) -> None:
    want = expected(cases.parent.parent, "F10")
    corpus = load_corpus(cases / "F10.jsonl")
    streams = [stream for tree in corpus.sessions for stream in tree.streams]
    assert len({stream.session_id for stream in streams}) == want["affinity_ids"]
    assert [stream.n_turns for stream in streams] == want["turns_per_affinity_id"]
    seen = PrefixTree(64)
    within, across = 0, 0
    for tree in corpus.sessions:
        blocks = PlayBlocks(tree, 0, block_size=64, scope=corpus.hash_id_scope, nonce="", cache_bust=False)
        own = PrefixTree(64)
        for number, stream in enumerate(tree.streams):
            for turn in range(stream.n_turns):
                prompt = blocks.turn(number, turn)
                shared_tokens = own.match(*prompt)
                within += shared_tokens
                across += seen.match(*prompt) - shared_tokens
                own.insert(*prompt)
                seen.insert(*prompt)
    assert (within, across) == (want["within_trace_reuse_tokens"], want["cross_trace_reuse_tokens"])


def test_f12_output_zero_is_kept_and_told(cases: Path) -> None:
    want = expected(cases.parent.parent, "F12")
    corpus = load_corpus(cases / "F12.trace.json")
    assert corpus.sessions[0].streams[0].output_tokens == want["recorded_out"]
    assert f"requests with a recorded output of 0 tokens: {want['upgraded']} (a server is asked for 1)" in corpus.notes


def test_f14_mark_and_line_ends(cases: Path) -> None:
    corpus = load_corpus(cases / "F14.jsonl")
    assert [tree.session_id for tree in corpus.sessions] == expected(cases.parent.parent, "F14")["ids"]


def test_f16_one_huge_line(cases: Path) -> None:
    want = expected(cases.parent.parent, "F16")
    corpus = load_corpus(cases / "F16.jsonl.gz")
    assert len(corpus.sessions) == want["n_traces"]
    assert len(corpus.sessions[0].streams[0].new_ids[0]) == want["n_hash_ids_first"]
    assert corpus.name == "F16"


@pytest.mark.parametrize(("file", "reason"), [("a.json", "no requests"), ("b.jsonl", "empty"), ("c.json", "no traces")])
def test_f18_nothing_to_replay(cases: Path, file: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_corpus(cases / f"F18.{file}")


def test_h01_input_and_output_must_fit_together(cases: Path) -> None:
    want = expected(cases.parent.parent, "H01")
    corpus = load_corpus(cases / "H01.jsonl")
    kept, dropped = fits(corpus, want["max_model_len"])
    assert [tree.session_id for tree in corpus.sessions.select(kept)] == want["kept"]
    assert dict(dropped) == want["dropped"]
    assert fits(corpus, 1010)[1] == []
    assert [tree.peak_tokens() for tree in corpus.sessions] == [1000, 1001, 1010, 1001]


def test_w01_any_locale(cases: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from agentx.corpus import load_corpus;"
        "c = load_corpus(Path(sys.argv[1]));"
        "sys.stdout.buffer.write(c.sessions[0].session_id.encode() + c.digest.encode())"
    )
    seen = set()
    for variables in orjson.loads((cases / "W01.scenario.json").read_bytes())["env"][:2]:
        command = [sys.executable, "-c", script, str(cases / "W01.trace.json")]
        seen.add(subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True).stdout)
    (output,) = seen
    assert output.decode().startswith(expected(cases.parent.parent, "W01")["id"])


# Structure.


def test_spawn_and_join(tmp_path: Path) -> None:
    requests = [
        subagent(0, [call(0)], agent_id="first"),
        call(1, api_time=2),
        subagent(4, [call(5, api_time=1), subagent(7, [call(8)], agent_id="nested"), call(9)], agent_id="mid"),
        call(12),
        subagent(14, [call(14)], agent_id="last"),
    ]
    assert shape(load(tmp_path, session(requests)).sessions[0]) == {
        "s": (ROOT, ROOT, ROOT, [0.0, 9.0]),
        "s/first": (0, ROOT, 0, [0.0]),
        "s/mid": (0, 0, 1, [2.0, 3.0]),
        "s/nested": (2, 0, 1, [2.0]),
        "s/last": (0, 1, ROOT, [2.0]),
    }


def test_a_subagent_without_calls_of_its_own_hands_its_place_on(tmp_path: Path) -> None:
    requests = [call(0), subagent(2, [subagent(3, [call(4)], agent_id="b")]), subagent(3, []), call(9)]
    tree = load(tmp_path, session(requests)).sessions[0]
    assert shape(tree) == {"s": (ROOT, ROOT, ROOT, [0.0, 9.0]), "s/b": (0, 0, 1, [4.0])}
    relative = load(tmp_path, session(requests), subagent_times="relative").sessions[0]
    assert relative.streams[1].think_ns == [(2 + 3 + 4) * S]


def test_a_subagent_that_begins_with_one_of_its_own(tmp_path: Path) -> None:
    requests = [call(0), subagent(5, [subagent(5, [call(6)], agent_id="b"), call(20)]), call(30)]
    tree = load(tmp_path, session(requests)).sessions[0]
    assert shape(tree)["s/a"] == (0, 0, 1, [6.0])  # begins when the first thing in it begins
    assert shape(tree)["s/b"] == (1, ROOT, 0, [0.0])


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    requests = [call(0), subagent(1, [call(1)]), subagent(2, [call(2)]), subagent(3, [call(3)], agent_id=None)]
    tree = load(tmp_path, session(requests)).sessions[0]
    assert [stream.session_id for stream in tree.streams] == ["s", "s/a", "s/a.2", "s/agent"]


def test_requests_out_of_order_are_sorted_and_equal_times_stay(tmp_path: Path) -> None:
    requests = [call(5, [3]), call(0, [1]), call(5, [4]), call(2, [2])]
    stream = load(tmp_path, session(requests)).sessions[0].streams[0]
    assert [ids.tolist() for ids in stream.block_ids()] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("think", [{}, {"think_time": None}, {"think_time": -3}])
def test_pause_from_the_recorded_times(tmp_path: Path, think: dict[str, Any]) -> None:
    requests = [
        call(0, api_time=8, think_time=7),
        call(10, api_time=12, **think),
        call(12, **think),
        call(25, think_time=0),
    ]
    assert shape(load(tmp_path, session(requests)).sessions[0])["s"][3] == [0.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("ids", [{"hash_ids": None}, {"hash_ids": []}])
def test_turn_without_ids(tmp_path: Path, ids: dict[str, Any]) -> None:
    bare = {key: value for key, value in call(1, **{"in": 100}).items() if key != "hash_ids"}
    stream = load(tmp_path, session([call(0, [1, 2]), {**bare, **ids}, bare, call(3, [1, 2])])).sessions[0].streams[0]
    assert list(stream.keep_blocks) == [0, 0, 0, 0]
    assert [len(ids) for ids in stream.block_ids()] == [2, 0, 0, 2]


def test_models_fall_back_to_the_session(tmp_path: Path) -> None:
    bare = {key: value for key, value in call(1).items() if key != "model"}
    tree = load(tmp_path, session([call(0), bare, subagent(2, [{**bare, "t": 2}], models=["other"])])).sessions[0]
    assert tree.streams[0].models == ["m", "m"]
    assert tree.streams[1].models == ["other"]


# Files.


def test_every_form_is_the_same_corpus(tmp_path: Path) -> None:
    sessions = [session([call(0, [n])], f"s{n}") for n in range(3)]
    texts = [orjson.dumps(one, option=orjson.OPT_INDENT_2) for one in sessions]
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, (text, pack) in enumerate(zip(texts, (bytes, gzip.compress, zstandard.compress), strict=True)):
        (folder / f"session_{number}.json{('', '.gz', '.zst')[number]}").write_bytes(pack(text))
    (folder / "LICENSE").write_bytes(b"not a trace")
    (tmp_path / "list.json").write_bytes(b"[" + b",".join(texts) + b"]")
    (tmp_path / "lines.jsonl").write_bytes(b"\r\n\r\n".join(orjson.dumps(one) for one in sessions))
    (tmp_path / "lines.jsonl.zst").write_bytes(zstandard.compress((tmp_path / "lines.jsonl").read_bytes()))
    paths = [folder, *(tmp_path / name for name in ("list.json", "lines.jsonl", "lines.jsonl.zst"))]
    assert len({load_corpus(path).digest for path in paths}) == 1
    assert [load_corpus(path).name for path in paths] == ["folder", "list", "lines", "lines"]
    assert load_corpus(folder / "session_1.json.gz").sessions[0].session_id == "s1"


def test_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no traces"):
        load_corpus(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        load_corpus(tmp_path / "none")


# Faults.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in": 0}, "requests[1].in is 0, a whole number from 1"),
        ({"in": "64"}, "requests[1].in is '64', a whole number"),
        ({"in": 64.5}, "requests[1].in is 64.5, a whole number"),
        ({"in": True}, "requests[1].in is True, a whole number"),
        ({"in": 2**31}, f"requests[1].in is {2**31}, a whole number"),
        ({"out": -1}, "requests[1].out is -1, a whole number from 0"),
        ({"out": None}, "requests[1].out is None, a whole number from 0"),
        ({"t": None}, "requests[1].t is None, seconds"),
        ({"t": -1}, "requests[1].t is -1, seconds"),
        ({"t": 1e300}, "requests[1].t is 1e+300, seconds"),
        ({"api_time": "2"}, "requests[1].api_time is '2', seconds"),
        ({"type": "x"}, "requests[1].type is 'x', n, s or subagent"),
        ({"hash_ids": 7}, "requests[1].hash_ids is 7, a list"),
        ({"type": "subagent"}, "requests[1].requests is None, a list"),
    ],
)
def test_malformed_request(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (fault,) = faults(tmp_path, session([call(0), {**call(1), **change}]))
    assert fault.startswith(f"line 1: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": None}, "id is None, a text is needed"),
        ({"block_size": 0}, "block_size is 0, a whole number from 1"),
        ({"hash_id_scope": "all"}, "hash_id_scope is 'all', local or global"),
        ({"requests": None}, "requests is None, a list"),
        ({"requests": [subagent(0, [call(0)])]}, "requests is '1 subagents', a session needs a request of its own"),
        ({"requests": [5]}, "requests[0] is 5, a JSON object"),
        ({"id": "s"}, "id is 's', the same as in line 1"),
        ({"block_size": 16}, "block_size is 16, the sessions before have 64"),
    ],
)
def test_malformed_session(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (fault,) = faults(tmp_path, session([call(0)]), session([call(0)], name="other") | {"id": "o"} | change)
    assert fault.startswith(f"line 2: {message}")


def test_nested_place_is_named(tmp_path: Path) -> None:
    deep = session([call(0), subagent(1, [call(1), subagent(2, [call(2, out="no")])])])
    (fault,) = faults(tmp_path, deep)
    assert fault.startswith("line 1: requests[1].requests[1].requests[0].out is 'no'")


def test_all_faults_at_once_up_to_twenty(tmp_path: Path) -> None:
    bad = [session([call(0, out=-1), call(1, **{"in": 0})], f"s{n}") for n in range(3)]
    assert len(faults(tmp_path, *bad)) == 6
    many = [session([call(0, out=-1)], f"s{n}") for n in range(50)]
    assert len(faults(tmp_path, *many)) == 20
    path = tmp_path / "folder"
    path.mkdir()
    (path / "a.json").write_bytes(b"{")
    (path / "b.json").write_bytes(b"")
    (path / "c.json").write_bytes(b"5")
    with pytest.raises(FaultsError) as caught:
        load_corpus(path)
    lines = [message for message, _ in caught.value.faults]
    assert lines[0].startswith("a.json: not JSON")
    assert lines[1:] == ["b.json: the file is empty", "c.json: 5, a JSON object is needed"]


# Properties.

times = st.integers(0, 50).map(lambda tenths: tenths / 10)
block_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1), max_size=6)
calls = st.builds(call, times, block_lists, api_time=times)
items = st.recursive(calls, lambda inner: st.builds(subagent, times, st.lists(inner, max_size=4)), max_leaves=12)


def count_calls(requests: list[Any]) -> int:
    return sum(count_calls(item["requests"]) if "requests" in item else 1 for item in requests)


@settings(max_examples=60, deadline=None)
@given(calls, st.lists(items, max_size=8), st.sampled_from(["auto", "absolute", "relative"]))
def test_any_tree_is_whole_and_playable(
    tmp_path_factory: pytest.TempPathFactory, first: dict[str, Any], rest: list[Any], basis: str
) -> None:
    requests = [first, *rest]
    corpus = load(tmp_path_factory.mktemp("tree"), session(requests), subagent_times=basis)
    tree = corpus.sessions[0]
    assert tree.n_turns == corpus.n_turns == count_calls(requests)
    for number, stream in enumerate(tree.streams):
        assert stream.n_turns > 0
        assert min(stream.think_ns) >= 0
        assert len(list(stream.block_ids())) == stream.n_turns
        if number:
            assert 0 <= stream.parent < number
            parent = tree.streams[stream.parent]
            assert ROOT <= stream.spawn_turn < parent.n_turns
            assert stream.join_turn in (ROOT, stream.spawn_turn + 1)
