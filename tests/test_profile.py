"""Profiles: what loads, and how every fault is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentx.errors import AgentxError, FaultsError, InputError
from agentx.profile import Profile, RecordedProfile, load_profile, profile_names
from agentx.resources import data_folder
from agentx.yaml12 import LARGEST_FILE, parse_yaml

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


def test_shipped_profiles_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_profile("small").name == "small"


def test_the_recorded_profile(tmp_path: Path) -> None:
    profile = load_profile("inferencex_256k")
    assert isinstance(profile, RecordedProfile)
    assert (profile.recorded.sessions, profile.concurrency, profile.start_window) == (393, (2, 4, 8), (0.25, 0.75))
    filtered = load_profile(write(tmp_path, "preset: inferencex_256k\nrecorded: {filter: {max_turns: 20}}\n"))
    assert isinstance(filtered, RecordedProfile)
    assert (filtered.recorded.filter.max_turns, filtered.recorded.sessions) == (20, 393)
    lines = faults(tmp_path, "preset: inferencex_256k\nrecorded: {filter: {max_turn: 20}}\nisl: [1, 2, 3]\n")
    assert any("recorded.filter.max_turn: unknown key" in line for line in lines)
    assert any("did you mean 'max_turns'?" in line for line in lines)
    assert any("isl: unknown key" in line for line in lines)


def test_the_example_loads() -> None:
    path = data_folder("profiles") / "custom.example.yaml"
    example = load_profile(path)
    assert isinstance(example, Profile)
    assert [example.turns.percentile(q) for q in (0.5, 0.9, 0.99)] == list(example.turns.target or ())
    unknown = set(Profile.model_fields) - set(parse_yaml(path.read_text(encoding="utf-8"), "example"))
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
        ("1e5_0", "1e5_0"), ("0b1", "0b1"), ("0o8", "0o8"), ("-0", 0), ("-0.0", 0.0), (".inf", float("inf")),
        ("-.INF", float("-inf")), ("TRUE", True), ("tRUE", "tRUE"), ("NULL", None), ("=", "="), ("!!str 5", "5"),
        ("! 5", "5"), ("|\n  5", "5\n"), ("1e400", float("inf")), ("1.5.2", "1.5.2"), ("5 # five", 5),
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


def test_every_key_given_twice_is_told() -> None:
    with pytest.raises(FaultsError) as caught:
        parse_yaml("a: {b: 1, b: 2}\nc: 1\n'c': 2\nc: 3\nl:\n- {x: 1}\n- {x: 1,\n   x: 2}\n", "t")
    assert [message for message, _ in caught.value.faults] == [
        "a.b is given twice, in line 1 and line 1",
        "c is given twice, in line 2 and line 3",
        "c is given twice, in line 2 and line 4",
        "l[1].x is given twice, in line 7 and line 8",
    ]


def test_merge_keys_are_no_duplicates_of_what_they_bring() -> None:
    assert parse_yaml("b: &b {x: 1}\nm: {x: 2, <<: *b}\nn: {'<<': *b}\n", "t")["m"] == {"x": 2}
    with pytest.raises(InputError, match="no mapping"):
        parse_yaml("<<: 5\n", "t")


def test_anchors_may_be_set_again() -> None:
    assert parse_yaml("a: &x 1\nb: &x 2\nc: *x\n", "t")["c"] == 2


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


@pytest.mark.parametrize(
    "text",
    [
        "", "# only\n", "- 1\n", "just text\n", "a: [1\n", "a: b: c\n", "\t- x\n", "a: *nothing\n", "a: &a {b: *a}\n",
        "a: 1\n---\nb: 2\n", "a: \x00\n", "%YAML 1.3\n---\na: 1\n", "%YAML 2.0\n---\na: 1\n", "? [a]\n: 1\n", "a: @x\n",
        "a: " + "[" * 5000, "a: " + "{b: " * 5000, "a: " + "9" * 5000, "a: 0x" + "f" * 5000, "a: !x!y 1\n",
    ],
    ids=range(20),
)  # fmt: skip
def test_what_is_no_profile_is_one_clear_error(tmp_path: Path, text: str) -> None:
    lines = faults(tmp_path, text)
    assert lines[0].startswith("error: ")
    assert len([line for line in lines if line.startswith("error: ")]) == 1


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab:-?[]{},&*!|>'\"%@`# \n\t.<1e~=\\\ufeff\x85é"), max_size=40))
def test_any_text_is_a_mapping_or_one_clear_error(text: str) -> None:
    try:
        read = parse_yaml(text, "t")
    except InputError:
        return
    assert isinstance(read, dict)


PLAIN_TEXT = st.text(st.characters(categories=("L", "N", "P", "S", "Zs"), max_codepoint=0xD7FF), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
KEYS = PLAIN_TEXT.filter(lambda key: key != "<<")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOATS | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_json_reads_as_json(data: dict[str, object]) -> None:
    assert parse_yaml(json.dumps(data, ensure_ascii=False), "t") == data


def test_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"# " + b"x" * LARGEST_FILE)
    with pytest.raises(InputError, match="more than is read"):
        load_profile(path)
    path.write_bytes(gzip.compress(b"x" * 10 * LARGEST_FILE))
    with pytest.raises(InputError, match="more than is read"):
        load_profile(path)
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(InputError, match="not UTF-8 at byte 3"):
        load_profile(path)
    with pytest.raises(InputError, match="no such file"):
        load_profile(str(tmp_path) + "/")


def test_faults_between_fields_are_told_beside_those_of_fields(tmp_path: Path) -> None:
    text = (
        GOOD.replace("sessions: 10\n", "")
        .replace("values: [1, 2], weights: [1, 1]", "values: [1, 2.5], weights: [1, -1, 0]")
        .replace("isl: [1, 400]", "isl: [150, 250]")
        .replace("delay: [1, 2, 3]", "delay: [1, 2, x]")
    )
    lines = faults(tmp_path, text)
    assert [line.partition(".yaml: ")[2] for line in lines if line.startswith("error")] == [
        "sessions: missing",
        "delay[2]: a number is needed, it is 'x'",
        "turns.values[1]: a whole number is needed, it is 2.5",
        "turns.weights[1]: at least 0 is needed, it is -1",
        "turns.weights has 3 numbers, turns.values has 2",
        "turns.weights: the sum is 0",
        "isl: its P50 100 is outside clamps.isl [150, 250]",
        "isl: its P99 300 is outside clamps.isl [150, 250]",
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("isl: [100, 200, 300]", "isl: 100", "isl: a list is needed, it is 100"),
        ("isl: [100, 200, 300]", "isl: [100, 200, 300, 400]", "isl: 3 values are needed, it has 4"),
        ("isl: [100, 200, 300]", "isl: [100, 200, null]", "isl[2]: a number is needed, it is empty"),
        ("isl: [100, 200, 300]", "isl: [100, 200, 1e12]", "isl[2]: at most 100000000 is needed, it is 1000000000000.0"),
        ("isl: [100, 200, 300]", "isl: [0, 200, 300]", "isl[0]: at least 1 is needed, it is 0"),
        ("isl: [100, 200, 300]", "isl: [1_00, 200, 300]", "isl[0]: a number is needed, it is '1_00'"),
        ("isl: [100, 200, 300]", "isl: [100, 200, .inf]", "isl[2]: a finite number is needed, it is .inf"),
        ("weights: [1, 1]", "weights: [0, 0]", "turns.weights: the sum is 0"),
        ("weights: [1, 1]", "weights: [1e308, 1e308]", "turns.weights: the sum is .inf"),
        ("weights: [1, 1]", "weights: []", "turns.weights: a list of at least 1 is needed, it is []"),
        ("sessions: 10", "sessions: yes", "sessions: a number is needed, it is 'yes'"),
        ("sessions: 10", "sessions: true", "sessions: a number is needed, it is true"),
        ("sessions: 10", "sessions: 1.5", "sessions: a whole number is needed, it is 1.5"),
        ("sessions: 10", "sessions: 10\nconcurrency: []", "concurrency: a list of at least 1 is needed"),
        ("sessions: 10", "sessions: 10\nname: ../up", "name: cannot be a folder's name"),
        ("sessions: 10", "sessions: 10\nname: 5", "name: text is needed, it is 5"),
        ("sessions: 10", "sessions: 10\nsource: recordd", "source: generated or recorded is needed, it is 'recordd'"),
        ("sessions: 10", "sessions: 10\nseed: -1", "seed: at least 0 is needed, it is -1"),
        ("sessions: 10", "sessions: 10\nstart_window: [0.9, 0.5]", "start_window: the lower bound 0.9 is over"),
        ("sessions: 10", "sessions: 10\nduration_s: 0", "duration_s: more than 0 is needed, it is 0"),
        ("clamps: {isl: [1, 400], osl: [1, 40], delay: [1, 4]}", "clamps: [1]", "clamps: a mapping is needed"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_path(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    lines = faults(tmp_path, GOOD.replace(old, new))
    assert any(told in line for line in lines), lines


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


def test_a_gate_beside_a_preset_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "team").mkdir()
    write(tmp_path / "team", GOOD + "gate: ./bands.yaml\n", "base.yaml")
    child = write(tmp_path, "preset: team/base.yaml\n", "child.yaml")
    monkeypatch.chdir(tmp_path / "team")
    profile = load_profile(Path("..") / "child.yaml")
    assert isinstance(profile, Profile)
    assert Path(profile.gate) == (tmp_path / "team" / "bands.yaml").resolve()
    assert load_profile(child).digest() == profile.digest()


def test_presets_in_a_circle_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "preset: b.yaml\n", "a.yaml")
    write(tmp_path, "preset: c.yaml\n", "b.yaml")
    path = write(tmp_path, "preset: a.yaml\n", "c.yaml")
    with pytest.raises(InputError, match="c -> a -> b -> c"):
        load_profile(path)


def test_long_chains_of_presets_are_refused_as_such(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path, f"preset: p{number + 1}.yaml\n", f"p{number}.yaml")
    with pytest.raises(InputError, match="more than 16 presets on each other: p0 -> p1"):
        load_profile(tmp_path / "p0.yaml")


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
    assert digest(GOOD.replace("weights: [1, 1]", "weights: [1, 1], target: [1, 2, 2]")) == base
    assert digest(GOOD + "cache_target: 0.5\nname: other\nid_prefix: p\nmodel_tag: p\n") == base
    for change in ("seed: 7\n", "block_size: 32\n", "model_tag: x\n", "id_prefix: y\n"):
        assert digest(GOOD + change) != base
    assert digest(GOOD.replace("sessions: 10", "sessions: 10.0")) == base


def test_faults_error_prints_each_with_its_hint() -> None:
    error = FaultsError("f.yaml", [("a: bad", "do x"), ("b: bad", "")])
    assert error.lines() == ["error: f.yaml: a: bad", "hint: do x", "error: f.yaml: b: bad"]
