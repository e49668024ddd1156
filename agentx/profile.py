"""Workload profiles: what agentic traffic should look like, as a small YAML file.

A profile is data: percentiles of input, output and think time, the mixture of turn counts, the share
of leading blocks a turn keeps. `preset: NAME` starts from another profile; what the file says wins.
Percentile triples are (P50, P90, P99); lengths are tokens, delays seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field

from agentx.errors import InputError
from agentx.resources import data_folder
from agentx.yaml12 import Strict, kind_of, nearest_hint, parse_model, read_yaml

LONGEST_CHAIN = 16
"""Presets that may stand on each other."""
MOST_TOKENS = 10**8
"""Tokens of a prompt or an answer: a hundred times the longest context served, and within 32 bits."""
MOST_SECONDS = 7 * 24 * 3600
"""A pause or a window: a week. With MOST_TURNS a session's time stays within 64-bit nanoseconds."""
MOST_TURNS = 10_000

_NOT_CORPUS: dict[str, Any] = {
    **dict.fromkeys(("name", "description", "concurrency", "duration_s", "start_window", "gate", "cache_target"), True),
    "turns": {"target"},
}
"""Keys that do not change the corpus: how it is replayed and what it is held to."""


def _integral(value: object) -> object:
    """A whole number written as a float (`1e5`) is that whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError(f"a number is needed, it is {kind_of(value)}")
    return value


def _rising(triple: tuple[float, float, float]) -> tuple[float, float, float]:
    if not triple[0] <= triple[1] <= triple[2]:
        raise ValueError(f"P50, P90, P99 must rise, they are {_listed(triple)}\nhint: give them as [P50, P90, P99]")
    return triple


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"the lower bound {pair[0]:g} is over the upper bound {pair[1]:g}\nhint: give [low, high]")
    return pair


def _file_name(name: str) -> str:
    """A name that can be a folder's: corpora are written under it."""
    if not name.isprintable() or name.strip(" .") != name or not 0 < len(name) <= 100 or set(name) & set("/\\:"):
        raise ValueError("cannot be a folder's name\nhint: use letters, digits, - and _")
    return name


def _listed(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.10g}" for value in values) + "]"


def _count(values: Sequence[object]) -> str:
    return f"{len(values)} number" + ("s" if len(values) != 1 else "")


def _numbers(value: object) -> list[float] | None:
    """The value where it is a list of finite numbers, else None."""
    if not isinstance(value, list | tuple):
        return None
    fine = all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in value)
    return list(value) if fine else None


Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_integral), BeforeValidator(_number)]

Count = Annotated[Whole, Field(ge=1, le=10**9)]
Seed = Annotated[Whole, Field(ge=0, le=2**63 - 1)]
Turn = Annotated[Whole, Field(ge=1, le=MOST_TURNS)]
Tokens = Annotated[Number, Field(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[Number, Field(gt=0, le=MOST_SECONDS)]
Pause = Annotated[Number, Field(ge=0, le=MOST_SECONDS)]
Ratio = Annotated[Number, Field(ge=0, le=1)]
Weight = Annotated[Number, Field(ge=0)]
Rising = AfterValidator(_rising)
Ordered = AfterValidator(_ordered)
TokenTriple = Annotated[tuple[Tokens, Tokens, Tokens], Rising]
SecondTriple = Annotated[tuple[Seconds, Seconds, Seconds], Rising]
TokenRange = Annotated[tuple[Tokens, Tokens], Ordered]
PauseRange = Annotated[tuple[Pause, Pause], Ordered]
RatioRange = Annotated[tuple[Ratio, Ratio], Ordered]


class Turns(Strict):
    """The mixture of turn counts, and the percentiles they are held to."""

    values: Annotated[tuple[Turn, ...], Field(min_length=1)]
    weights: Annotated[tuple[Weight, ...], Field(min_length=1)]
    target: Annotated[tuple[Turn, Turn, Turn], Rising] | None = None
    """P50, P90, P99 of turns per session; None: those of the mixture."""

    @classmethod
    def faults_between(cls, data: dict[str, Any]) -> list[str]:
        """One weight per value, and some weight at all."""
        values, weights = data.get("values"), data.get("weights")
        faults = []
        if isinstance(values, list | tuple) and isinstance(weights, list | tuple) and len(values) != len(weights):
            faults.append(
                f"turns.weights has {_count(weights)}, turns.values has {len(values)}\nhint: give one weight per value"
            )
        numbers = _numbers(weights)
        if numbers and not 0 < sum(numbers) < math.inf:
            faults.append(f"turns.weights: the sum is {kind_of(sum(numbers))}\nhint: give at least one value a weight")
        return faults

    def percentile(self, q: float) -> int:
        """The smallest value whose cumulative weight reaches q of the whole."""
        wanted, reached = q * sum(self.weights), 0.0
        for value, weight in sorted(zip(self.values, self.weights, strict=True)):
            reached += weight
            if reached >= wanted - 1e-9 * wanted:
                return value
        return max(self.values)


class Clamps(Strict):
    """Bounds every drawn value is kept within: input and output in tokens, delay in seconds."""

    isl: TokenRange
    osl: TokenRange
    delay: PauseRange


class RecordedFilter(Strict):
    """What is kept of a recorded corpus, in this order."""

    max_turns: Count | None = None
    """Keep the first turns of each session."""
    max_isl: Count | None = None
    """Drop sessions with a turn over this many input tokens."""
    sample: Count | None = None
    """Keep a seeded sample of this many sessions."""


class Recorded(Strict):
    """A recorded corpus on the Hugging Face hub."""

    dataset: str
    alias: str | None = None
    sessions: Count | None = None
    """Keep the first sessions only."""
    filter: RecordedFilter = RecordedFilter()


def _known_source(value: object) -> object:
    if value != "generated":
        raise ValueError(f"generated or recorded is needed, it is {kind_of(value)}")
    return value


class _Common(Strict):
    """What every profile has."""

    name: Annotated[str, AfterValidator(_file_name)]
    description: str = ""
    seed: Seed = 42
    concurrency: Annotated[tuple[Count, ...], Field(min_length=1)] = (16,)
    """Lanes it is meant to be replayed with; the first is the default."""
    duration_s: Seconds = 900.0
    start_window: RatioRange | None = None
    """Part of its turns after which a lane's first session starts."""

    def digest(self) -> str:
        """SHA-256 in hexadecimal over every key that determines the corpus, whatever it is called.

        Left out is what is only read when the corpus is gated or replayed: targets, the gate, lanes,
        window and start. Defaults count as if they were written, and `1e5` is the number 100000.
        """
        chosen = self.model_dump(mode="json", exclude=_NOT_CORPUS)
        return hashlib.sha256(orjson.dumps(chosen, option=orjson.OPT_SORT_KEYS)).hexdigest()


class Profile(_Common):
    """A profile that a corpus is generated from."""

    source: Annotated[Literal["generated"], BeforeValidator(_known_source)] = "generated"
    sampler: Literal["reference"] = "reference"
    sessions: Count
    block_size: Annotated[Whole, Field(ge=1, le=MOST_TOKENS)] = 64
    id_prefix: str
    model_tag: str
    isl: TokenTriple
    osl: TokenTriple
    delay: SecondTriple
    turns: Turns
    cache_hit: RatioRange
    cache_target: Ratio | None = None
    """Median share of reused blocks per turn that is aimed at; None: the middle of cache_hit."""
    clamps: Clamps
    gate: str = "default"
    """The bands it is held to: a shipped gate, or a file beside the profile."""

    @classmethod
    def faults_between(cls, data: dict[str, Any]) -> list[str]:
        """Percentiles lie within their clamps: a clamp that cuts one makes another distribution."""
        clamps = data.get("clamps")
        faults = []
        for name in ("isl", "osl", "delay"):
            triple = _numbers(data.get(name)) or []
            pair = _numbers(clamps.get(name)) if isinstance(clamps, dict) else None
            if pair is None or len(pair) != 2 or pair[0] > pair[1]:
                continue
            faults += [
                f"{name}: its {mark} {value:.10g} is outside clamps.{name} {_listed(pair)}\nhint: widen the clamp"
                for mark, value in zip(("P50", "P90", "P99"), triple, strict=False)
                if not pair[0] <= value <= pair[1]
            ]
        return faults


class RecordedProfile(_Common):
    """A profile that is a recorded corpus."""

    source: Literal["recorded"]
    recorded: Recorded


AnyProfile = Profile | RecordedProfile


def load_profile(name_or_path: str | Path) -> AnyProfile:
    """The profile of a shipped name (`small`) or of a YAML file.

    Raises InputError where there is no such profile or presets go in a circle, FaultsError with every
    fault of the file.
    """
    path = find_profile(str(name_or_path), Path())
    data = _resolved(path, ())
    name = data.setdefault("name", path.stem)
    if data.get("source") == "recorded":
        return parse_model(RecordedProfile, data, str(path))
    data.setdefault("id_prefix", name)
    data.setdefault("model_tag", name)
    return parse_model(Profile, data, str(path))


def profile_names() -> list[str]:
    """The shipped profiles' names."""
    return sorted(path.stem for path in data_folder("profiles").glob("*.yaml") if "." not in path.stem)


def find_profile(name: str, folder: Path) -> Path:
    """The file of a shipped profile's name, or of a path relative to `folder`; raises InputError for neither."""
    if is_path(name):
        path = folder / name
        if not path.is_file():
            raise InputError(f"profile {name}: no such file in {path.parent}", "check the path")
        return path
    shipped = data_folder("profiles") / f"{name}.yaml"
    if not shipped.is_file():
        raise InputError(f"profile {name!r} is not known", nearest_hint(name, profile_names(), "profile"))
    return shipped


def is_path(name: str) -> bool:
    """True for a file's path, False for a shipped name."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _resolved(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The file's mapping on top of its presets'; what the file says wins, mappings are merged."""
    real = path.resolve()
    names = " -> ".join(step.stem for step in (*chain, real))
    if real in chain:
        raise InputError(f"{path}: presets go in a circle: {names}", "let one of them stand on its own")
    if len(chain) > LONGEST_CHAIN:
        raise InputError(f"{path}: more than {LONGEST_CHAIN} presets on each other: {names}", "write it flatter")
    data = read_yaml(path)
    if isinstance(gate := data.get("gate"), str) and is_path(gate):  # beside the file that names it, from any folder
        data["gate"] = str(real.parent / gate)
    preset = data.pop("preset", None)
    if preset is None:
        return data
    if not isinstance(preset, str):
        raise InputError(f"{path}: preset is {preset!r}, a name or a path is needed", "write preset: small")
    below = _resolved(find_profile(preset, path.parent), (*chain, real))
    below.pop("name", None)
    return _merged(below, data)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
