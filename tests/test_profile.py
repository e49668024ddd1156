"""Profiles: what loads, and how every fault is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentx.errors import AgentxError, FaultsError, InputError
from agentx.profile import Profile, load_profile, profile_names
from agentx.yaml12 import parse_yaml

GOOD = """
sessions: 10
isl: [100, 200, 300]
osl: [10, 20, 30]
delay: [1, 2, 3]
turns: {values: [1, 2], weights: [1, 1]}
cache_hit: [0.8, 0.9]
clamps: {isl: [1, 400], osl: [1, 40], delay: [1, 4]}
"""


def write(folder: Path, text: str, name: str = "p.yaml") -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(AgentxError) as caught:
        load_profile(write(folder, text))
    assert caught.value.exit_code == 2
    return caught.value.lines()


def test_every_shipped_profile_loads() -> None:
    assert profile_names() == ["conformance_256k", "conformance_512k", "inferencex_256k", "small"]
    for name in profile_names():
        assert load_profile(name).name == name


def test_the_example_loads(tmp_path: Path) -> None:
    example = load_profile(str(Path(__file__).parent.parent / "profiles" / "custom.example.yaml"))
    assert isinstance(example, Profile)
    assert [example.turns.percentile(q) for q in (0.5, 0.9, 0.99)] == list(example.turns.target or ())
    unknown = set(Profile.model_fields) - set(parse_yaml(Path("profiles/custom.example.yaml").read_text(), "example"))
    assert unknown == set(), "the example shows every key"


def test_a_small_profile_gets_its_defaults(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, GOOD, "mine.yaml"))
    assert isinstance(profile, Profile)
    assert (profile.name, profile.id_prefix, profile.block_size, profile.gate) == ("mine", "mine", 64, "default")


def test_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    text = "\ufeff" + GOOD.replace("\n", "\r\n")
    assert load_profile(write(tmp_path, text)).digest() == load_profile(write(tmp_path, GOOD)).digest()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e5", 100000), ("1.0e5", 100000.0), ("1.0e+5", 100000.0), ("1e+5", 100000.0), ("1e-3", 0.001),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("n", "n"), ("true", True), ("null", None),
        ("~", None), ("010", 10), ("0o10", 8), ("0x1f", 31), ("1_000", "1_000"), ("1:30", "1:30"), ("+5", 5),
        ("-.5", -0.5), ("5.", 5.0), ("2026-01-01", "2026-01-01"), ("'5'", "5"), ('"1e5"', "1e5"), ("1e", "1e"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = parse_yaml(f"a: {text}\n", "t")["a"]
    assert read == value
    assert isinstance(read, str) == isinstance(value, str)


def test_the_published_number_spellings(shared: Path) -> None:
    cases = json.loads((shared / "cases" / "expected.json").read_text(encoding="utf-8"))
    found = parse_yaml((shared / "cases/inputs/Y01.yaml").read_text(), "Y01")
    assert found == {"a": 100000, "b": 100000.0, "c": 100000.0, "d": 100000.0, "e": 0.001}
    assert cases


def test_whole_numbers_written_as_floats_are_whole_numbers(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, GOOD.replace("sessions: 10", "sessions: 1e5")))
    assert isinstance(profile, Profile)
    assert (profile.sessions, type(profile.sessions)) == (100_000, int)


def test_a_key_given_twice_names_both_lines(tmp_path: Path, shared: Path) -> None:
    with pytest.raises(InputError, match=r"sessions is given twice, in line 2 and line 4"):
        parse_yaml((shared / "cases/inputs/Y03.yaml").read_text(), "Y03")
    with pytest.raises(InputError, match=r"clamps\.isl is given twice, in line 3 and line 4"):
        parse_yaml("a: 1\nclamps:\n  isl: [1, 2]\n  isl: [1, 3]\n", "t")


def test_merge_keys() -> None:
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\none: {<<: *b, y: 9}\nmany: {<<: [*b, *o], w: 0}\n"
    found = parse_yaml(text, "t")
    assert found["one"] == {"x": 1, "y": 9}
    assert found["many"] == {"x": 1, "y": 2, "z": 4, "w": 0}


def test_files_that_unfold_without_end_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    with pytest.raises(InputError, match="unfolds into more than"):
        parse_yaml(bomb, "t")


def test_code_in_a_profile_is_refused() -> None:
    with pytest.raises(InputError, match=r"tag !.* is not read"):
        parse_yaml("a: !!python/object/apply:os.system ['true']\n", "t")
    with pytest.raises(InputError, match=r"tag !.* is not read"):
        parse_yaml("a: !env HOME\n", "t")


@pytest.mark.parametrize("text", ["", "- 1\n", "just text\n", "a: [1\n", "a: b: c\n", "\t- x\n", "a: *nothing\n"])
def test_what_is_no_profile_is_one_clear_error(tmp_path: Path, text: str) -> None:
    lines = faults(tmp_path, text)
    assert lines[0].startswith("error: ")
    assert len([line for line in lines if line.startswith("error: ")]) == 1


def test_every_fault_is_told_at_once_with_its_path(tmp_path: Path) -> None:
    text = """
session: 10
sessions: 0
isl: [300, 200, 100]
osl: [10, .nan, 30]
delay: [1, 2]
turns: {values: [1, 2, 3], weights: [1, 1]}
cache_hit: [0.9, 1.5]
clamps: {isl: [400, 1], osl: [1, 40], delay: [1, .inf], isle: [1, 2]}
block_size: "64"
"""
    lines = faults(tmp_path, text)
    for part in (
        "session: unknown key",
        "did you mean 'sessions'?",
        "sessions: ",
        "isl: P50, P90, P99 must rise, they are [300, 200, 100]",
        "osl[1]: ",
        "delay[2]: missing",
        "turns.weights has 2 numbers, turns.values has 3",
        "give one weight per value",
        "cache_hit[1]: ",
        "clamps.isl: the lower bound 400 is over the upper bound 1",
        "clamps.delay[1]: ",
        "clamps.isle: unknown key",
        "did you mean 'isl'?",
        "block_size: a number is needed, it is '64'",
    ):
        assert any(part in line for line in lines), f"{part!r} is not in {lines}"


def test_a_median_outside_its_clamps_is_refused(tmp_path: Path) -> None:
    lines = faults(tmp_path, GOOD.replace("isl: [1, 400]", "isl: [150, 400]"))
    assert any("isl: its P50 100 is outside clamps.isl [150, 400]" in line for line in lines)


def test_presets_are_inherited_and_the_entry_wins(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    child = load_profile(write(tmp_path, "preset: base.yaml\nsessions: 99\nclamps: {isl: [2, 400]}\n", "child.yaml"))
    assert isinstance(child, Profile)
    assert (child.name, child.sessions, child.clamps.isl, child.clamps.osl) == ("child", 99, (2, 400), (1, 40))
    shipped = load_profile(write(tmp_path, "preset: small\nseed: 1\n", "s.yaml"))
    assert isinstance(shipped, Profile)
    assert (shipped.gate, shipped.seed, shipped.id_prefix) == ("small", 1, "small")


def test_presets_in_a_circle_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "preset: b.yaml\n", "a.yaml")
    write(tmp_path, "preset: c.yaml\n", "b.yaml")
    path = write(tmp_path, "preset: a.yaml\n", "c.yaml")
    with pytest.raises(InputError, match="c -> a -> b -> c"):
        load_profile(path)


def test_unknown_names_are_told_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_profile("smal")
    assert caught.value.hint == "did you mean 'small'?"
    with pytest.raises(InputError, match="no such file"):
        load_profile("./nowhere.yaml")


def test_the_digest_covers_what_makes_the_corpus_and_nothing_else(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return load_profile(write(tmp_path, text)).digest()

    base = digest(GOOD)
    assert digest(GOOD + "concurrency: [4]\nduration_s: 5\ngate: small\nstart_window: [0.1, 0.2]\n") == base
    for change in ("seed: 7\n", "block_size: 32\n", "model_tag: x\n", "id_prefix: y\n"):
        assert digest(GOOD + change) != base
    assert digest(GOOD.replace("sessions: 10", "sessions: 10.0")) == base


def test_faults_error_prints_each_with_its_hint() -> None:
    error = FaultsError("f.yaml", [("a: bad", "do x"), ("b: bad", "")])
    assert error.lines() == ["error: f.yaml: a: bad", "hint: do x", "error: f.yaml: b: bad"]
