"""The gate: published figures, tampered corpora, and what the axes hide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentx.axes import measure, percentile
from agentx.corpus import Corpus, export_weka, load_corpus
from agentx.errors import AgentxError, InputError
from agentx.gate import Axis, AxisVerdict, load_axes, profile_of, run_gate
from agentx.generate import as_corpus, generate, generate_corpus
from agentx.profile import Profile, load_profile

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


def test_tripled_outputs_fail_on_exactly_the_output_axes(tmp_path: Path) -> None:
    generate_corpus(load_profile("small"), tmp_path / "c")
    corpus = load_corpus(tmp_path / "c")
    column = corpus.table.schema.get_field_index("output_tokens")
    tripled = pa.array(corpus.table["output_tokens"].to_numpy() * 3, pa.int32())
    table = corpus.table.set_column(column, corpus.table.schema.field(column), tripled)
    changed = as_corpus(table, corpus.manifest)
    result = run_gate(changed, profile_of(corpus))
    assert [v.axis.name for v in result.verdicts if not v.within] == [
        "Output OSL P50",
        "Output OSL P90",
        "Output OSL P99",
    ]


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


def test_a_recorded_profile_promises_nothing() -> None:
    corpus, _ = made("small")
    with pytest.raises(InputError, match="recorded"):
        run_gate(corpus, load_profile("inferencex_256k"))


def test_a_corpus_without_a_profile_asks_for_one(shared: Path) -> None:
    with pytest.raises(InputError, match="no profile"):
        profile_of(load_corpus(shared / "traces" / "kv-cache-tester" / "ci"))
