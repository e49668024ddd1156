"""The gate: published figures, tampered corpora, and what the axes hide."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from agentx.axes import measure, percentile
from agentx.cli import gate as gate_command
from agentx.corpus import Corpus, export_weka, load_corpus
from agentx.errors import AgentxError, FaultsError, InputError
from agentx.gate import Axis, AxisVerdict, load_axes, profile_of, run_gate
from agentx.generate import as_corpus, generate, generate_corpus
from agentx.profile import Profile, load_profile
from agentx.resources import data_folder

GENERATED = ("small", "conformance_256k", "conformance_512k")


def made(name: str) -> tuple[Corpus, Profile]:
    profile = load_profile(name)
    assert isinstance(profile, Profile)
    return as_corpus(*generate(profile)), profile


@pytest.mark.parametrize("name", GENERATED)
def test_the_published_corpora_pass_on_all_axes(name: str) -> None:
    corpus, profile = made(name)
    result = run_gate(corpus, profile)
    assert result.headline == "13/13 axes within band"
    assert result.passed


@pytest.mark.parametrize("name", ["small", "conformance_256k"])
def test_the_general_path_measures_what_the_rule_says(name: str, tmp_path: Path) -> None:
    corpus, _ = made(name)
    export_weka(corpus, tmp_path / "weka")
    by_rule, by_ids = measure(corpus), measure(load_corpus(tmp_path / "weka"))
    assert by_rule.ceiling == by_ids.ceiling
    assert by_rule.shrinking == by_ids.shrinking
    for metric, samples in by_rule.samples.items():
        assert np.array_equal(samples, by_ids.samples[metric]), metric


def test_the_cache_axis_hides_the_ceiling() -> None:
    result = run_gate(*made("conformance_256k"))
    assert result.axes.ceiling < 0.60
    assert percentile(result.axes.samples["cache_hit"], 0.5) == pytest.approx(88.2, abs=0.05)
    ceiling, shrinking = result.hidden()
    assert "59.7 %" in ceiling
    assert "88.2 %" in ceiling
    assert "51.0 % of the 1,578 follow-up turns" in shrinking


def gate_cli(*arguments: str) -> Result:
    app = typer.Typer()
    gate_command.register(app)
    return CliRunner().invoke(app, list(arguments))


def off(document: dict[str, Any]) -> list[str]:
    return [axis["axis"] for axis in document["axes"] if not axis["within"]]


OUTPUT_AXES = ["Output OSL P50", "Output OSL P90", "Output OSL P99"]


def test_tripled_outputs_fail_on_exactly_the_output_axes(tmp_path: Path) -> None:
    generate_corpus(made("small")[1], tmp_path / "w", form="weka")
    assert gate_cli(str(tmp_path / "w")).exit_code == 0
    for path in sorted((tmp_path / "w").glob("session_*.json")):
        session = orjson.loads(path.read_bytes())
        for request in session["requests"]:
            request["out"] *= 3
        path.write_bytes(orjson.dumps(session))
    told = gate_cli(str(tmp_path / "w"), "--json")
    assert told.exit_code == 1
    assert off(orjson.loads(told.stdout)) == OUTPUT_AXES
    by_name = gate_cli(str(tmp_path / "w"), "--profile", "small")
    assert by_name.exit_code == 1
    assert "10/13 axes within band" in by_name.stdout
    assert by_name.stdout.count("OFF") == 3


def test_a_changed_table_fails_even_where_its_axes_are_in_band(tmp_path: Path) -> None:
    generate_corpus(made("small")[1], tmp_path / "c")
    told = gate_cli(str(tmp_path / "c"))
    assert (told.exit_code, told.stderr) == (0, "")
    path = tmp_path / "c" / "sessions.parquet"
    table = pq.read_table(path)
    outputs = table["output_tokens"].to_numpy().copy()
    outputs[0] += 1
    place = table.schema.get_field_index("output_tokens")
    changed = table.set_column(place, table.schema.field(place), pa.array(outputs, pa.int32()))
    pq.write_table(changed, path)
    told = gate_cli(str(tmp_path / "c"))
    assert told.exit_code == 1
    assert "13/13 axes within band, but the content differs from the digest in its manifest" in told.stdout
    assert "note: " in told.stderr
    document = orjson.loads(gate_cli(str(tmp_path / "c"), "--json").stdout)
    assert (document["passed"], document["changed"], document["within"]) == (False, True, 13)


def test_the_table_reads_the_same_in_a_narrow_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_corpus(made("small")[1], tmp_path / "c")
    monkeypatch.setenv("COLUMNS", "20")
    narrow = gate_cli(str(tmp_path / "c")).stdout
    monkeypatch.setenv("COLUMNS", "not a number")
    wide = gate_cli(str(tmp_path / "c")).stdout
    assert narrow.splitlines()[:14] == wide.splitlines()[:14]
    assert narrow.split() == wide.split()
    assert wide.splitlines()[1].split()[3:] == ["tokens", "1,849", "2,000", "1,600", "-", "2,400", "479", "in"]
    assert not any(line.endswith(" ") or "\x1b" in line for line in wide.splitlines())


def test_the_example_profile_passes_its_gate() -> None:
    example = load_profile(data_folder("profiles") / "custom.example.yaml")
    assert isinstance(example, Profile)
    assert run_gate(as_corpus(*generate(example)), example).passed


def test_a_hand_edited_weka_corpus_is_measured_as_it_is(tmp_path: Path) -> None:
    corpus, profile = made("small")
    export_weka(corpus, tmp_path / "w")
    for path in sorted((tmp_path / "w").glob("session_*.json")):
        session = orjson.loads(path.read_bytes())
        for number, request in enumerate(session["requests"]):
            request["hash_ids"] = [1_000_000 * number + k for k in range(len(request["hash_ids"]))]
        path.write_bytes(orjson.dumps(session))
    result = run_gate(load_corpus(tmp_path / "w"), profile)
    assert [v.axis.name for v in result.verdicts if not v.within] == ["Cache hit P50"]
    assert result.axes.ceiling == 0.0


def test_seen_blocks_that_do_not_lead_raise_the_axis_but_not_the_ceiling(tmp_path: Path) -> None:
    requests = [
        {"t": 0.0, "type": "n", "model": "m", "in": 256, "out": 1, "hash_ids": [1, 2, 3, 4], "api_time": 0.0},
        {"t": 5.0, "type": "n", "model": "m", "in": 256, "out": 1, "hash_ids": [9, 2, 3, 4], "api_time": 0.0},
    ]
    session = {"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests}
    (tmp_path / "s.json").write_bytes(orjson.dumps(session))
    axes = measure(load_corpus(tmp_path / "s.json"))
    assert percentile(axes.samples["cache_hit"], 0.5) == 75.0
    assert axes.ceiling == 0.0


def plain_reuse(session: dict[str, Any]) -> tuple[list[float], int]:
    """Per-turn hits in percent, and the leading tokens seen before, of a session without subagents."""
    block, seen, prompts, hits, leading = session["block_size"], set[int](), [], [], 0
    for request in session["requests"]:
        ids = request["hash_ids"]
        if request["t"] > 0 and ids:
            hits.append(100.0 * sum(one in seen for one in ids) / len(ids))
        seen.update(ids)
        tokens = [(one, place) for one in ids for place in range(block)][: request["in"]]
        shared = (sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(tokens, old))) for old in prompts)  # noqa: B905
        leading += max(shared, default=0)
        prompts.append(tokens)
    return sorted(hits), leading


REQUESTS = st.lists(st.tuples(st.integers(1, 24), st.lists(st.integers(0, 3), max_size=7)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(REQUESTS)
def test_the_general_path_is_a_plain_loop_over_ids(drawn: list[tuple[int, list[int]]]) -> None:
    requests = [
        {
            "t": float(turn),
            "type": "n",
            "model": "m",
            "in": tokens,
            "out": 1,
            "hash_ids": ids if tokens % 4 == 0 else ids[: tokens // 4],  # a short last block has no id
            "api_time": 0.0,
        }
        for turn, (tokens, ids) in enumerate(drawn)
    ]
    session = {"id": "s", "models": ["m"], "block_size": 4, "hash_id_scope": "local", "requests": requests}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.json"
        path.write_bytes(orjson.dumps(session))
        axes = measure(load_corpus(path))
    hits, leading = plain_reuse(session)
    assert axes.samples["cache_hit"].tolist() == pytest.approx(hits)
    assert axes.ceiling == pytest.approx(leading / sum(tokens for tokens, _ in drawn))


def test_recorded_sessions_measure(shared: Path) -> None:
    axes = measure(load_corpus(shared / "traces" / "kv-cache-tester" / "subagents"))
    assert 0.8 < axes.ceiling < 1.0
    assert len(axes.samples["turns"]) == 3


@given(
    st.floats(0.1, 1000),
    st.floats(0.1, 1000),
    st.tuples(st.floats(0.1, 1), st.floats(1, 3)),
    st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
)
def test_a_wider_band_never_fails_what_passed(
    measured: float, target: float, band: tuple[float, float], wider: tuple[float, float]
) -> None:
    def within(low: float, high: float) -> bool:
        return AxisVerdict(Axis("a", "input", 0.5, "", (low, high)), 1, measured, target).within

    if within(*band):
        assert within(band[0] - wider[0] * band[0], band[1] + wider[1])


def test_percentiles_are_the_published_definition() -> None:
    samples = np.arange(1.0, 11.0)
    assert [percentile(samples, q) for q in (0.5, 0.9, 0.99)] == [6.0, 10.0, 10.0]
    assert percentile(np.empty(0), 0.5) is None


def test_an_axis_without_samples_is_not_in_band() -> None:
    verdict = AxisVerdict(Axis("a", "delay", 0.5, "s", (0.0, 9.0)), 0, None, 1.0)
    assert not verdict.within


def test_gates_are_data(tmp_path: Path) -> None:
    assert len(load_axes("default")) == 13
    bands = {axis.name: axis.band for axis in load_axes("small")}
    assert bands["Cache hit P50"] == (0.94, 1.06)
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nextends: default\nbands:\n  Turns P50: [0.1, 9]\n")
    assert {axis.name: axis.band for axis in load_axes(str(mine))}["Turns P50"] == (0.1, 9.0)
    mine.write_text("name: mine\nextends: default\nbands:\n  Turn P50: [0.1, 9]\n")
    with pytest.raises(InputError) as caught:
        load_axes(str(mine))
    assert caught.value.lines()[-1] == "hint: did you mean 'Turns P50'?"
    mine.write_text("name: mine\naxes:\n  - {name: A, metric: inputs, percentiles: [P49], unit: x, band: [2, 1]}\n")
    with pytest.raises(AgentxError) as told:
        load_axes(str(mine))
    lines = "\n".join(told.value.lines())
    assert "axes[0].metric" in lines
    assert "axes[0].percentiles[0]" in lines
    assert "axes[0].band" in lines
    with pytest.raises(InputError, match="not known"):
        load_axes("nothing")
    with pytest.raises(InputError, match="no such file"):
        load_axes("./nothing.yaml")


def test_gates_stand_on_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nextends: small\nbands: {Turns P50: [0.1, 9]}\n")
    (tmp_path / "b.yaml").write_text(
        "name: b\nextends: ./a.yaml\naxes:\n- {name: Delay, metric: delay, percentiles: [P50], unit: s, band: [0, 5]}\n"
    )
    bands = {axis.name: axis.band for axis in load_axes(str(tmp_path / "b.yaml"))}
    assert len(bands) == 13
    assert bands["Cache hit P50"] == (0.94, 1.06)
    assert bands["Turns P50"] == (0.1, 9.0)
    assert bands["Delay P50"] == (0.0, 5.0)
    (tmp_path / "a.yaml").write_text("name: a\nextends: ./b.yaml\n")
    with pytest.raises(InputError, match="b -> a -> b"):
        load_axes(str(tmp_path / "b.yaml"))
    group = "- {name: D, metric: delay, percentiles: [P50, P50], unit: s, band: [0, 5]}\n"
    (tmp_path / "b.yaml").write_text(f"name: b\naxes:\n{group}bands: {{X: [1, 2], Y: [1, 2]}}\n")
    with pytest.raises(FaultsError) as caught:
        load_axes(str(tmp_path / "b.yaml"))
    assert [message for message, _ in caught.value.faults] == [
        "axes: 'D P50' is given twice",
        "bands: no axis 'X'",
        "bands: no axis 'Y'",
    ]
    (tmp_path / "b.yaml").write_text("name: b\n")
    with pytest.raises(FaultsError, match="no axes"):
        load_axes(str(tmp_path / "b.yaml"))


def test_a_recorded_profile_promises_nothing() -> None:
    corpus, _ = made("small")
    with pytest.raises(InputError, match="recorded"):
        run_gate(corpus, load_profile("inferencex_256k"))


def test_a_corpus_without_turns_is_refused() -> None:
    corpus, profile = made("small")
    with pytest.raises(InputError, match="no turns"):
        run_gate(as_corpus(corpus.table.slice(0, 0), corpus.manifest), profile)


def test_a_manifest_that_names_no_profile_asks_for_one() -> None:
    corpus, _ = made("small")
    for carried in ("small", None, {"name": "small"}):
        with pytest.raises(InputError, match="no profile"):
            profile_of(replace(corpus, manifest={"profile": carried}))


def test_a_corpus_without_a_profile_asks_for_one(shared: Path) -> None:
    with pytest.raises(InputError, match="no profile"):
        profile_of(load_corpus(shared / "traces" / "kv-cache-tester" / "ci"))
