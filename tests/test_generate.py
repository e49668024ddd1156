"""Generated corpora: the published bytes and numbers, a cache that trusts digests only, the gate before handing out."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from agentx import cli, hashing, reference
from agentx.corpus import export_weka, fits, load_corpus
from agentx.corpus.export import joined_sha256
from agentx.corpus.parquet import MANIFEST, TABLE
from agentx.errors import InputError, VerdictError
from agentx.generate import as_corpus, generate, generate_corpus, generated_profile, reference_parameters
from agentx.profile import Profile, load_profile

ROOT = Path(__file__).resolve().parent.parent


def profile(name: str, **changes: Any) -> Profile:
    return generated_profile(load_profile(name)).model_copy(update=changes)


@pytest.fixture(scope="module")
def straightforward() -> Any:
    """The plain generator of the benchmark."""
    spec = importlib.util.spec_from_file_location("benchmark_generate", ROOT / "benchmarks" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.straightforward


# The published format.


@pytest.mark.parametrize(
    ("name", "sha256", "size"),
    [
        # Published with the reference sampler.
        ("small", "20d98ab974366d973f0dd5243310b8f2c6baa9ea884145c6b4a8c79aefc1f4b1", 437_002),
        # What the straightforward generator of benchmarks/generate.py writes.
        ("conformance_256k", "1e3724edc7678687ac2322ffa7882054490b1f7d1e64f2afce8be3e417ee6488", 49_119_424),
        ("conformance_512k", "0b5e871338ff8c3b4c1205cf1ec50f3030fa399b805a624f8cd77129b7aa13e3", 212_411_047),
    ],
)
def test_weka_files_are_the_published_bytes(tmp_path: Path, name: str, sha256: str, size: int) -> None:
    """The export is made from the Parquet form as it was stored."""
    corpus = generate_corpus(profile(name), tmp_path / "corpus").corpus
    export = export_weka(corpus, tmp_path / "weka")
    assert (export.sha256, export.size, export.files) == (sha256, size, len(corpus.sessions))
    assert joined_sha256(tmp_path / "weka") == sha256
    assert (tmp_path / "corpus" / TABLE).stat().st_size < 150_000


@pytest.mark.parametrize(("name", "sessions"), [("small", 200), ("conformance_256k", 12), ("conformance_512k", 4)])
@pytest.mark.parametrize("seed", [42, 7])
def test_any_seed_and_length_agree_with_the_straightforward_generator(
    tmp_path: Path, straightforward: Any, name: str, sessions: int, seed: int
) -> None:
    chosen = profile(name, seed=seed, sessions=sessions)
    straightforward(reference_parameters(chosen), chosen.model_tag, tmp_path, one_text=True)
    export = export_weka(as_corpus(*generate(chosen)), tmp_path / "weka")
    assert export.sha256 == joined_sha256(tmp_path)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_hashing_processes_change_nothing(workers: int) -> None:
    counts = [(session, [7, 1, 40][: session % 4]) for session in range(9)]
    found = [[ids.tolist() for ids in turns] for turns in hashing.new_ids(5, counts, workers)]
    assert found == [
        [reference.new_block_ids(5, session, turn, count).tolist() for turn, count in enumerate(turns)]
        for session, turns in counts
    ]


def test_hashing_stops_with_its_reader() -> None:
    answers = hashing.new_ids(5, [(session, [30_000]) for session in range(20)], 2)
    next(answers)
    answers.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "sessions", "turns", "input_p50", "input_p99", "output_p50", "output_p99"),
    [
        ("small", 200, 479, 1_849, 7_000, 129, 468),
        ("conformance_256k", 200, 1_778, 74_140, 245_000, 306, 16_193),
        ("conformance_512k", 300, 6_917, 61_490, 520_000, 176, 7_151),
    ],
)
def test_table_6(
    name: str, sessions: int, turns: int, input_p50: int, input_p99: int, output_p50: int, output_p99: int
) -> None:
    """The published measurements; the percentile is the sorted sample's element min(n - 1, int(q n))."""
    table, manifest = generate(profile(name))
    corpus = as_corpus(table, manifest)
    assert (len(corpus.sessions), corpus.n_turns) == (sessions, turns)
    assert (manifest["counts"]["sessions"], manifest["counts"]["turns"]) == (sessions, turns)

    def at(column: str, q: float) -> int:
        return int(np.sort(table[column].to_numpy())[min(turns - 1, int(q * turns))])

    assert (at("input_tokens", 0.5), at("input_tokens", 0.99)) == (input_p50, input_p99)
    assert (at("output_tokens", 0.5), at("output_tokens", 0.99)) == (output_p50, output_p99)


def test_context_of_524288_tokens_drops_two_sessions_of_conformance_512k() -> None:
    corpus = as_corpus(*generate(profile("conformance_512k")))
    kept, dropped = fits(corpus, 524_288)
    assert len(kept) == 298
    assert sum(tree.n_turns for tree in corpus.sessions.select(kept)) == 6_663
    assert len(dropped) == 2
    assert min(peak for _, peak in dropped) > 524_288


def test_p01_seed_alone_decides(tmp_path: Path) -> None:
    """The same bytes in fresh processes under any hash seed and locale, others under another seed."""
    script = (
        "import sys; from pathlib import Path; from agentx import cli;"
        "sys.exit(cli.run(['generate', '--profile', 'small', '--no-gate', '--format', sys.argv[1],"
        "'--seed', sys.argv[2], '-o', sys.argv[3]]))"
    )
    digests = {}
    runs = [("777", "0", "C", "parquet"), ("777", "1", "C.UTF-8", "parquet"), ("778", "0", "C", "parquet")]
    for number, (seed, hash_seed, locale, form) in enumerate(runs):
        folder = tmp_path / str(number)
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed, "LC_ALL": locale, "PYTHONUTF8": "0"}
        command = [sys.executable, "-c", script, form, seed, str(folder)]
        subprocess.run(command, env=variables, check=True, capture_output=True)
        digests[number] = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (TABLE, MANIFEST)]
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[2][0]


# The folder.


def test_manifest_says_what_made_it(tmp_path: Path) -> None:
    chosen = profile("small")
    made = generate_corpus(chosen, tmp_path / "c")
    assert not made.reused
    manifest = orjson.loads((tmp_path / "c" / MANIFEST).read_bytes())
    assert manifest["profile"]["digest"] == chosen.digest()
    assert Profile.model_validate_json(orjson.dumps(manifest["profile"]["resolved"])) == chosen
    assert manifest["digest"] == made.corpus.digest == load_corpus(tmp_path / "c").digest
    assert manifest["id_rule"] == {"rule": "blake2b-63", "seed": 42}
    assert made.corpus.source == str(tmp_path / "c")
    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == [MANIFEST, TABLE]


@pytest.mark.parametrize("form", ["parquet", "weka"])
def test_unchanged_profile_is_reused_and_an_edited_one_never(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "c"
    first = generate_corpus(profile("small", sessions=20), folder, form=form)
    stamp = folder.stat().st_mtime_ns, folder.stat().st_ino
    again = generate_corpus(profile("small", sessions=20), folder, form=form)
    assert again.reused
    assert again.corpus.digest == first.corpus.digest
    assert (folder.stat().st_mtime_ns, folder.stat().st_ino) == stamp
    edited = generate_corpus(profile("small", sessions=20, osl=(128.0, 256.0, 513.0)), folder, form=form)
    assert (edited.reused, edited.reason) == (False, "the profile is not the one it was made from")
    assert edited.corpus.digest != first.corpus.digest
    forced = generate_corpus(profile("small", sessions=20), folder, form=form, force=True)
    assert (forced.reused, forced.corpus.digest) == (False, first.corpus.digest)


def test_other_format_replaces(tmp_path: Path) -> None:
    generate_corpus(profile("small", sessions=5), tmp_path / "c")
    made = generate_corpus(profile("small", sessions=5), tmp_path / "c", form="weka")
    assert (made.reused, made.reason) == (False, "it was in another format")
    assert not (tmp_path / "c" / TABLE).exists()
    assert made.corpus.name == "small"
    assert made.corpus.manifest["profile"]["name"] == "small"
    with pytest.raises(InputError, match="format 'csv' is not known"):
        generate_corpus(profile("small"), tmp_path / "c", form="csv")


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def triple_outputs(path: Path) -> None:
    table = pq.read_table(path)
    place = table.schema.get_field_index("output_tokens")
    tripled = (table["output_tokens"].to_numpy() * 3).astype(np.int32)
    pq.write_table(table.set_column(place, table.schema.field(place), [tripled]), path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [triple_outputs, cut, Path.unlink])
def test_damaged_corpus_is_made_again_and_told(tmp_path: Path, damage: Any) -> None:
    digest = generate_corpus(profile("small"), tmp_path / "c").corpus.digest
    damage(tmp_path / "c" / TABLE)
    made = generate_corpus(profile("small"), tmp_path / "c")
    assert not made.reused
    assert "damaged" in made.reason
    assert load_corpus(tmp_path / "c").digest == digest


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}"])
def test_damaged_manifest_is_made_again(tmp_path: Path, content: bytes) -> None:
    generate_corpus(profile("small", sessions=5), tmp_path / "c")
    (tmp_path / "c" / MANIFEST).write_bytes(content)
    made = generate_corpus(profile("small", sessions=5), tmp_path / "c")
    assert not made.reused
    assert made.reason


@pytest.mark.parametrize("form", ["parquet", "weka"])
def test_a_corpus_folder_with_files_of_yours_is_not_replaced(tmp_path: Path, form: str) -> None:
    generate_corpus(profile("small", sessions=5), tmp_path / "c", form=form)
    (tmp_path / "c" / "notes.txt").write_bytes(b"mine")
    with pytest.raises(InputError, match="not made by agentx"):
        generate_corpus(profile("small", sessions=6), tmp_path / "c", form=form)
    assert (tmp_path / "c" / "notes.txt").read_bytes() == b"mine"


def test_damaged_weka_file_is_made_again(tmp_path: Path) -> None:
    generate_corpus(profile("small", sessions=5), tmp_path / "c", form="weka")
    flip_a_byte(tmp_path / "c" / "session_00003.json")
    made = generate_corpus(profile("small", sessions=5), tmp_path / "c", form="weka")
    assert (made.reused, made.reason) == (False, "its files are damaged or changed")


def test_older_sampler_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_corpus(profile("small"), tmp_path / "c")
    monkeypatch.setattr(reference, "VERSION", reference.VERSION + 1)
    made = generate_corpus(profile("small"), tmp_path / "c")
    assert (made.reused, made.reason) == (False, "the sampler has changed")


def test_check_sees_the_corpus_before_it_appears(tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def refuse(corpus: Any) -> None:
        assert corpus.n_turns == 479
        assert not folder.exists()
        raise VerdictError("no")

    with pytest.raises(VerdictError):
        generate_corpus(profile("small"), folder, check=refuse)
    assert list(tmp_path.iterdir()) == []


def test_recorded_profile_is_refused() -> None:
    with pytest.raises(InputError, match="recorded corpus"):
        generate(load_profile("inferencex_256k"))


# The command.


def test_command_makes_a_corpus_and_shows_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "c"
    assert cli.run(["generate", "--profile", "small", "-o", str(folder)]) == 0
    shown = capsys.readouterr()
    assert "13/13 axes within band" in shown.out
    assert "200 sessions, 479 turns" in shown.err
    assert cli.run(["generate", "--profile", "small", "-o", str(folder), "--json"]) == 0
    shown = capsys.readouterr()
    facts = orjson.loads(shown.out)
    assert facts["reused"] is True
    assert facts["counts"]["turns"] == 479
    assert facts["gate"]["passed"] is True
    assert "already there, unchanged" in shown.err


def test_command_hands_nothing_out_when_an_axis_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "c"
    few = ["generate", "--profile", "small", "--sessions", "3", "-o", str(folder)]
    assert cli.run(few) == 1
    shown = capsys.readouterr()
    assert "OFF" in shown.out
    assert "not handed out" in shown.err
    assert list(tmp_path.iterdir()) == []
    assert cli.run([*few, "--no-gate"]) == 0
    assert "OFF" in capsys.readouterr().out
    assert len(load_corpus(folder).sessions) == 3
    assert cli.run(few) == 1  # also when the corpus is there already
    capsys.readouterr()
    assert cli.run([*few, "--json"]) == 1
    facts = orjson.loads(capsys.readouterr().out)
    assert (facts["folder"], facts["gate"]["passed"]) == (None, False)


def test_command_never_touches_a_folder_of_yours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_bytes(b"mine")
    assert cli.run(["generate", "--profile", "small", "-o", str(tmp_path)]) == 2
    assert "not made by agentx" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_sample_corpora_are_what_their_profiles_make() -> None:
    for folder in sorted(path.parent for path in (ROOT / "traces").glob("*/manifest.json")):
        sample = load_corpus(folder)
        assert sample.digest == as_corpus(*generate(profile(folder.name))).digest


def test_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "generate.py"), "--quick"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "| parquet |" in done.stdout
    assert "20d98ab974366d973f0dd5243310b8f2c6baa9ea884145c6b4a8c79aefc1f4b1" in done.stdout
