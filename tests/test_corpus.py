"""The corpus form everything works on: table, trees, digest, context filter, Parquet, weka export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentx.corpus import Corpus, export_weka, fits, length_conflicts, load_corpus, peak_tokens
from agentx.corpus.parquet import FORMAT, FORMAT_VERSION, MANIFEST, TABLE, write_parquet
from agentx.corpus.sessions import content_digest, make_corpus
from agentx.errors import FaultsError, InputError
from agentx.generate import generate_corpus
from agentx.profile import load_profile
from agentx.reference import new_block_ids
from agentx.turns import CORPUS_SCHEMA, ROOT

RULE = {"rule": "blake2b-63", "seed": 7}
S = 1_000_000_000


def row(session: str, turn: int, **columns: Any) -> dict[str, Any]:
    """A turn of 2 new blocks after as many kept ones as it can."""
    plain = {
        "root_session_id": session.split("/")[0],
        "session_id": session,
        "parent_session_id": None,
        "turn": turn,
        "spawn_turn": ROOT,
        "join_turn": ROOT,
        "t_ns": turn * 10 * S,
        "api_ns": 0,
        "think_ns": turn * S,
        "input_tokens": 128,
        "output_tokens": 5,
        "model": "m",
        "keep_blocks": 1 if turn else 0,
        "new_blocks": 2,
        "new_ids": None,
    }
    return {**plain, **columns}


ROWS = [row("a", 0), row("a", 1, input_tokens=200), row("b", 0, output_tokens=0), row("b", 1), row("b", 2)]


def write(folder: Path, rows: list[dict[str, Any]], **manifest: Any) -> Path:
    facts: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": "test",
        "block_size": 64,
        "hash_id_scope": "local",
        "id_rule": RULE,
        **manifest,
    }
    table = pa.Table.from_pylist(rows, schema=CORPUS_SCHEMA)
    facts.setdefault("digest", content_digest(table, 64, "local", facts["id_rule"]))
    folder.mkdir(exist_ok=True)
    write_parquet(folder, table, facts)
    return folder


def subagent_rows() -> list[dict[str, Any]]:
    ids = {"new_ids": [2**64 - 1, 5], "keep_blocks": 0}
    child = {"parent_session_id": "a", "root_session_id": "a", "spawn_turn": 0, "join_turn": 1}
    grandchild = {"parent_session_id": "a/x", "root_session_id": "a", "spawn_turn": 1}
    return [
        *(row("a", turn, **ids) for turn in range(3)),
        *(row("a/x", turn, **ids, **child) for turn in range(2)),
        row("a/y", 0, **ids, **grandchild),
        row("b", 0, **ids),
    ]


def test_trees_of_a_rule_made_corpus(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "c", ROWS))
    assert corpus.notes == ()
    assert (corpus.name, len(corpus.sessions), corpus.n_turns) == ("test", 2, 5)
    tree = corpus.sessions[1]
    assert (tree.session_id, tree.index, tree.n_turns) == ("b", 1, 3)
    made = [new_block_ids(7, 1, turn, 2).tolist() for turn in range(3)]
    assert [ids.tolist() for ids in tree.streams[0].new_ids] == made
    assert [ids.tolist() for ids in tree.streams[0].new_ids[1:]] == made[1:]
    full = [ids.tolist() for ids in tree.streams[0].block_ids()]
    assert full == [made[0], made[0][:1] + made[1], made[0][:1] + made[2]]
    assert tree.streams[0].think_ns == [0, S, 2 * S]
    assert all(type(value) is int for value in tree.streams[0].input_tokens)


def test_trees_with_subagents(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "c", subagent_rows(), id_rule=None))
    first, second = corpus.sessions
    places = [(stream.session_id, stream.parent, stream.spawn_turn, stream.join_turn) for stream in first.streams]
    assert places == [("a", -1, -1, -1), ("a/x", 0, 0, 1), ("a/y", 1, 1, -1)]
    assert [stream.n_turns for stream in first.streams] == [3, 2, 1]
    assert first.streams[2].new_ids[0].tolist() == [2**64 - 1, 5]
    assert (second.session_id, second.index, len(second.streams)) == ("b", 1, 1)


def test_selecting_sessions_keeps_their_place(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "c", ROWS))
    chosen = corpus.sessions.select([1])
    assert [tree.index for tree in chosen] == [1]
    assert [tree.index for tree in corpus.sessions[::-1]] == [1, 0]
    assert chosen[0].streams[0].new_ids[0].tolist() == new_block_ids(7, 1, 0, 2).tolist()
    with pytest.raises(IndexError):
        chosen[1]


def test_fits_counts_input_and_output(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "c", ROWS))
    assert peak_tokens(corpus).tolist() == [tree.peak_tokens() for tree in corpus.sessions] == [205, 133]
    assert fits(corpus, 205) == ([0, 1], [])
    assert fits(corpus, 204) == ([1], [("a", 205)])


def test_digest_sees_content_and_nothing_else(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(subagent_rows(), schema=CORPUS_SCHEMA)
    digest = content_digest(table, 64, "local", None)
    chunked = pa.concat_tables([table[:2], table[2:5], table[5:]])
    assert content_digest(chunked, 64, "local", None) == digest
    seen = {digest, content_digest(table, 32, "local", None), content_digest(table, 64, "global", None)}
    seen.add(content_digest(table, 64, "local", RULE))
    for name, value in {"output_tokens": 6, "model": None, "new_ids": [5, 5], "session_id": "c"}.items():
        rows = subagent_rows()
        rows[-1][name] = value
        seen.add(content_digest(pa.Table.from_pylist(rows, schema=CORPUS_SCHEMA), 64, "local", None))
    assert len(seen) == 8


def test_an_edited_table_is_read_as_it_is_and_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", ROWS)
    table = pq.read_table(folder / TABLE)
    tripled = pa.array(table["output_tokens"].to_numpy() * 3, pa.int32())
    pq.write_table(table.set_column(10, CORPUS_SCHEMA.field("output_tokens"), tripled), folder / TABLE)
    corpus = load_corpus(folder)
    assert corpus.table["output_tokens"].to_pylist()[0] == 15
    assert any("changed after it was made" in note for note in corpus.notes)


def test_file_beside_its_manifest(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", ROWS)
    assert load_corpus(folder / TABLE).digest == load_corpus(folder).digest
    (folder / MANIFEST).unlink()
    for path in (folder, folder / TABLE):
        with pytest.raises(InputError, match=r"manifest\.json: missing"):
            load_corpus(path)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"format_version": 99}, "format version 99, this agentx reads 1"),
        ({"block_size": "64"}, "block_size is '64'"),
        ({"hash_id_scope": None}, "hash_id_scope is None"),
        ({"id_rule": {"rule": "md5", "seed": 1}}, "id rule .* is not known"),
        ({"id_rule": None}, "neither listed nor given by a rule"),
        ({"format": "other"}, "not the manifest of an agentx corpus"),
    ],
)
def test_bad_manifest(tmp_path: Path, manifest: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_corpus(write(tmp_path / "c", ROWS, **manifest))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (1, {"turn": 2}, "row 1: turn 2 of session 'a' does not follow"),
        (0, {"turn": 1}, "row 0: turn 1 of session 'a' does not follow"),
        (1, {"session_id": "c"}, "row 1: turn 1 of session 'c' does not follow"),
        (2, {"input_tokens": 0}, "row 2: input_tokens is 0, at least 1"),
        (2, {"think_ns": -1}, "row 2: think_ns is -1, at least 0"),
        (3, {"keep_blocks": 3}, "row 3: keeps 3 blocks of a turn that has 2"),
        (2, {"keep_blocks": 1}, "row 2: keeps 1 blocks of a turn that has 0"),
        (4, {"new_ids": [1, 2]}, "both listed and given by a rule"),
    ],
)
def test_bad_table(tmp_path: Path, place: int, change: dict[str, Any], message: str) -> None:
    rows = [dict(one) for one in ROWS]
    rows[place] |= change
    with pytest.raises(FaultsError, match=message):
        load_corpus(write(tmp_path / "c", rows))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (3, {"parent_session_id": "b"}, "row 3: session 'a/x' has the parent 'b'"),
        (3, {"spawn_turn": 3}, "spawned by turn 3 and joined by turn 1 of 3"),
        (3, {"join_turn": 0}, "spawned by turn 0 and joined by turn 0 of 3"),
        (6, {"session_id": "a", "root_session_id": "a"}, "row 6: session 'a' is here twice"),
        (6, {"root_session_id": "z"}, "is a root, but its root is 'z'"),
        (6, {"new_ids": [1]}, "row 6: new_blocks is 2, new_ids has 1"),
    ],
)
def test_bad_tree(tmp_path: Path, place: int, change: dict[str, Any], message: str) -> None:
    rows = subagent_rows()
    rows[place] |= change
    with pytest.raises(FaultsError, match=message):
        load_corpus(write(tmp_path / "c", rows, id_rule=None))


def test_damaged_or_foreign_parquet(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", ROWS)
    data = (folder / TABLE).read_bytes()
    (folder / TABLE).write_bytes(data[:-20])
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        load_corpus(folder)
    pq.write_table(pa.table({"x": [1]}), folder / TABLE)
    with pytest.raises(InputError, match="lacks the columns root_session_id"):
        load_corpus(folder)
    pq.write_table(CORPUS_SCHEMA.empty_table(), folder / TABLE)
    with pytest.raises(InputError, match="no sessions"):
        load_corpus(folder)


def listed(rows: list[dict[str, Any]]) -> Corpus:
    facts = {"block_size": 64, "hash_id_scope": "local", "name": "t"}
    table = pa.Table.from_pylist(rows, schema=CORPUS_SCHEMA)
    return make_corpus(table, block_size=64, scope="local", name="t", source="t", manifest=facts)


def test_conflicting_lengths() -> None:
    sound = listed([row("a", 0, input_tokens=70, new_ids=[5, 6]), row("a", 1, new_ids=[8, 9])])
    assert length_conflicts(sound) == []
    bad = listed([row("a", 0, input_tokens=70, new_ids=[5, 6]), row("a", 1, keep_blocks=2, new_blocks=0, new_ids=[])])
    (conflict,) = length_conflicts(bad)
    assert (conflict.session_id, conflict.block_id, conflict.tokens) == ("a", 6, (6, 64))


def test_export_is_what_json_would_write_and_reads_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    edges = [0, 9, 10, 99, 100, 10**18, 10**19, 2**63, 2**64 - 1]
    rows = []
    for name in ("a", "b"):
        blocks = 0
        for turn in range(6):
            keep = int(rng.integers(0, blocks + 1))
            new = [edges[n] for n in rng.integers(0, len(edges), int(rng.integers(0, 5)))]
            t = {"t_ns": turn * 1_234_567_000, "api_ns": 250_000_000, "think_ns": turn * 984_567_000}
            ids = {"keep_blocks": keep, "new_blocks": len(new), "new_ids": new, "model": 'mö"del'}
            rows.append(row(name, turn, **t, **ids, input_tokens=640))
            blocks = keep + len(new)
    corpus = listed(rows)
    export = export_weka(corpus, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.json"))
    assert [file.name for file in files] == ["session_00000.json", "session_00001.json"]
    assert export.size == sum(file.stat().st_size for file in files)
    for file, tree in zip(files, corpus.sessions, strict=True):
        text = file.read_text(encoding="utf-8")
        assert json.dumps(json.loads(text)) == text
        record = orjson.loads(text)
        assert list(record) == ["id", "models", "block_size", "hash_id_scope", "requests"]
        keys = ["t", "type", "model", "in", "out", "hash_ids", "api_time", "think_time", "stop"]
        assert all(list(request) == keys for request in record["requests"])
        lists = [request["hash_ids"] for request in record["requests"]]
        assert lists == [ids.tolist() for ids in tree.streams[0].block_ids()]
    again = load_corpus(tmp_path / "out")
    for name in ("session_id", "turn", "t_ns", "api_ns", "think_ns", "input_tokens", "output_tokens", "model"):
        assert again.table[name].to_pylist() == corpus.table[name].to_pylist()


def test_an_edited_export_is_read_as_it_is_and_told(tmp_path: Path) -> None:
    profile = load_profile("small").model_copy(update={"sessions": 3})
    folder = tmp_path / "c"
    generate_corpus(profile, folder, form="weka")
    assert load_corpus(folder).manifest["profile"]["name"] == "small"
    file = sorted(folder.glob("session_*.json"))[0]
    file.write_bytes(file.read_bytes().replace(b'"out": 1', b'"out": 9', 1))
    edited = load_corpus(folder)
    assert edited.manifest["profile"]["name"] == "small"
    assert "edited since they were made" in edited.notes[-1]
    (folder / ".agentx").write_text("[]")
    with pytest.raises(InputError, match="no marker of agentx"):
        load_corpus(folder)


def test_export_refuses_subagents_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="subagents are not exported"):
        export_weka(listed(subagent_rows()), tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="not made by agentx"):
        export_weka(listed([row("a", 0, new_ids=[1, 2])]), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.json"]
