"""Workload profiles: what agentic traffic should look like, as a small YAML file.

A profile is data: percentiles of input, output and think time, the mixture of turn counts, the share
of leading blocks a turn keeps. `preset: NAME` starts from another profile; what the file says wins.
Percentile triples are (P50, P90, P99); lengths are tokens, delays seconds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agentx.errors import InputError
from agentx.resources import data_folder
from agentx.yaml12 import Strict, nearest_hint, parse_model, read_yaml

LONGEST_CHAIN = 16
"""Presets that may stand on each other."""

_NOT_CORPUS = ("name", "description", "concurrency", "duration_s", "start_window", "gate", "cache_target")
"""Keys that do not change a generated corpus: how it is replayed and what it is held to."""


def _integral(value: object) -> object:
    """A whole number written as a float (`1e5`) is that whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError(f"a number is needed, it is {value!r}")
    return value


def _rising(triple: tuple[float, float, float]) -> tuple[float, float, float]:
    if not triple[0] <= triple[1] <= triple[2]:
        raise ValueError(f"P50, P90, P99 must rise, they are {_numbers(triple)}\nhint: give them as [P50, P90, P99]")
    return triple


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"the lower bound {pair[0]:g} is over the upper bound {pair[1]:g}\nhint: give [low, high]")
    return pair


def _numbers(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


Count = Annotated[int, BeforeValidator(_integral), BeforeValidator(_number), Field(ge=1, le=10**9)]
Seed = Annotated[int, BeforeValidator(_integral), BeforeValidator(_number), Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Ratio = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Weight = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Triple = Annotated[tuple[Positive, Positive, Positive], AfterValidator(_rising)]
Range = Annotated[tuple[Positive, Positive], AfterValidator(_ordered)]
RatioRange = Annotated[tuple[Ratio, Ratio], AfterValidator(_ordered)]
RatioBand = Annotated[tuple[Positive, Positive], AfterValidator(_ordered)]
"""Multipliers of a target between which a measured value is in band."""


class Turns(Strict):
    """The mixture of turn counts, and the percentiles they are held to."""

    values: Annotated[list[Count], Field(min_length=1)]
    weights: Annotated[list[Weight], Field(min_length=1)]
    target: Triple | None = None
    """P50, P90, P99 of turns per session; None: those of the mixture."""

    @model_validator(mode="after")
    def _match(self) -> Self:
        if len(self.values) != len(self.weights):
            raise ValueError(
                f"turns.weights has {len(self.weights)} numbers, turns.values has {len(self.values)}"
                "\nhint: give one weight per value"
            )
        if sum(self.weights) <= 0:
            raise ValueError("turns.weights are all 0\nhint: give at least one value a weight")
        return self

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

    isl: Range
    osl: Range
    delay: Range


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


class _Common(Strict):
    """What every profile has."""

    name: str
    description: str = ""
    seed: Seed = 42
    concurrency: tuple[Count, ...] = (16,)
    """Lanes it is meant to be replayed with; the first is the default."""
    duration_s: Positive = 900.0
    start_window: RatioRange | None = None
    """Part of its turns after which a lane's first session starts."""

    def digest(self) -> str:
        """SHA-256 over every key that determines the corpus, hexadecimal; a turns target is among them."""
        chosen = self.model_dump(mode="json", exclude=set(_NOT_CORPUS))
        return hashlib.sha256(orjson.dumps(chosen, option=orjson.OPT_SORT_KEYS)).hexdigest()


class Profile(_Common):
    """A profile that a corpus is generated from."""

    source: Literal["generated"] = "generated"
    sampler: Literal["reference"] = "reference"
    sessions: Count
    block_size: Count = 64
    id_prefix: str
    model_tag: str
    isl: Triple
    osl: Triple
    delay: Triple
    turns: Turns
    cache_hit: RatioRange
    cache_target: Ratio | None = None
    """Median share of reused blocks per turn that is aimed at; None: the middle of cache_hit."""
    clamps: Clamps
    gate: str = "default"
    """The bands it is held to: a shipped gate, or a file beside the profile."""

    @model_validator(mode="after")
    def _percentiles_fit_clamps(self) -> Self:
        faults = []
        for name in ("isl", "osl", "delay"):
            low, high = getattr(self.clamps, name)
            p50, _, _ = getattr(self, name)
            if not low <= p50 <= high:
                faults.append(f"{name}: its P50 {p50:g} is outside clamps.{name} {_numbers((low, high))}")
        if faults:
            raise ValueError("; ".join(faults) + "\nhint: a clamp that cuts the median makes another distribution")
        return self


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
    if isinstance(gate := data.get("gate"), str) and _is_path(gate):
        data["gate"] = str(path.parent / gate)
    return parse_model(Profile, data, str(path))


def profile_names() -> list[str]:
    """The shipped profiles' names."""
    return sorted(path.stem for path in data_folder("profiles").glob("*.yaml") if path.stem.count(".") == 0)


def find_profile(name: str, folder: Path) -> Path:
    """The file of a shipped profile's name, or of a path relative to `folder`; raises InputError for neither."""
    if _is_path(name):
        path = folder / Path(name).expanduser()
        if not path.is_file():
            raise InputError(f"profile {name}: no such file in {path.parent}", "check the path")
        return path
    shipped = data_folder("profiles") / f"{name}.yaml"
    if not shipped.is_file():
        raise InputError(f"profile {name!r} is not known", nearest_hint(name, profile_names(), "profile"))
    return shipped


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _resolved(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The file's mapping on top of its presets'; what the file says wins, mappings are merged."""
    real = path.resolve()
    if real in chain or len(chain) >= LONGEST_CHAIN:
        names = " -> ".join(step.stem for step in (*chain, real))
        raise InputError(f"{path}: presets go in a circle: {names}", "let one of them stand on its own")
    data = read_yaml(path)
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
