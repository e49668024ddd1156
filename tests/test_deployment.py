"""Deployment files: the seed's constants, and what a wrong file is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentx.deployment import deployment_names, load_deployment
from agentx.errors import AgentxError, InputError
from agentx.resources import data_folder

WHOLE = """
model: m
max_model_len: 1e5
dp: 2
max_num_seqs: 4
kv_pool_tokens: 10000
kv_bytes_per_token: 100
c0_s: 0.5
k_s: 0.05
fit_input_tokens: 1000
prefill_tok_s: 4000
"""


def test_the_constants_are_the_seeds() -> None:
    mi325x, mi300x = load_deployment("mi325x"), load_deployment("mi300x")
    assert deployment_names() == ["mi300x", "mi325x"]
    assert (mi325x.slots, mi300x.slots) == (256, 64)
    assert (mi325x.max_model_len, mi300x.max_model_len) == (1_000_000, 900_000)
    assert (mi325x.c0_s, mi325x.k_s, mi300x.c0_s, mi300x.k_s) == (0.97, 0.074, 1.32, 0.082)
    for deployment in (mi325x, mi300x):  # the two readings of the pool agree, as the seed checks itself
        assert deployment.kv_pool_bytes is not None
        assert deployment.kv_pool_bytes / deployment.kv_pool_tokens == pytest.approx(14_098, rel=0.01)


@pytest.mark.parametrize("name", ["mi325x", "mi300x"])
def test_every_number_of_a_shipped_file_has_its_source_beside_it(name: str) -> None:
    text = (data_folder("profiles") / "deployments" / f"{name}.yaml").read_text(encoding="utf-8")
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if re.fullmatch(r"[0-9.]+", value.split("#")[0].strip()):
            assert "#" in value, f"{key} has no source"


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(WHOLE)
    mine = load_deployment(path)
    assert (mine.name, mine.max_model_len, mine.slots, mine.block_size) == ("mine", 100_000, 8, 64)
    assert mine.floor_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_num_seqs: 32", "dp: missing"),
        (WHOLE + "slot: 3", "slot: unknown key"),
        (WHOLE.replace("dp: 2", "dp: two"), "dp: a number is needed, it is 'two'"),
        (WHOLE.replace("dp: 2", "dp: true"), "dp: a number is needed, it is True"),
        (WHOLE.replace("dp: 2", "dp: 0"), "dp: "),
        (WHOLE.replace("dp: 2", "dp: 1.5"), "dp: "),
        (WHOLE.replace("k_s: 0.05", "k_s: .inf"), "k_s: "),
        (WHOLE.replace("k_s: 0.05", "k_s: -1"), "k_s: "),
        (WHOLE.replace("prefill_tok_s: 4000", "prefill_tok_s: 1000"), "takes 1 s, more than c0_s 0.5"),
    ],
)
def test_deployment_files_are_strict(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(change)
    with pytest.raises(AgentxError) as caught:
        load_deployment(str(path))
    assert any(message in line for line in caught.value.lines()), caught.value.lines()
    assert caught.value.exit_code == 2


def test_unknown_deployments_are_told_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_deployment("mi325")
    assert caught.value.hint == "did you mean 'mi325x'?"
    with pytest.raises(InputError, match="no such file"):
        load_deployment("none/such.yaml")
