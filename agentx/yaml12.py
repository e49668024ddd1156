"""YAML 1.2 at the edge: strict reading, and models whose faults are all told at once.

The parser's events are turned into values here, so that a plain scalar means what YAML 1.2's core
schema says and nothing else: `1e5` is a number; `no`, `1_000`, `1:30` and dates are text. Keys given
twice, tags that would make objects, and files that unfold or nest without end are refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from agentx.errors import FaultsError, InputError
from agentx.store import open_decompressed

LARGEST_FILE = 64 * 1024
"""Bytes of a file; some twenty times the longest shipped one, and read in about a second."""
MOST_VALUES = 100_000
"""Values after aliases are unfolded: a bound on files that unfold without end."""
DEEPEST = 32
"""Lists and mappings inside each other; a profile has three."""
MOST_DIGITS = 100
"""Digits of a whole number; the longest any model takes has 19."""

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_TEXT_TAGS = ("!", "!!str")

M = TypeVar("M", bound=BaseModel)


# Reading.


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises InputError or FaultsError with file and line where there is none."""
    with open_decompressed(path) as stream:
        data = stream.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise InputError(f"{path}: over {LARGEST_FILE:,} bytes, more than is read of YAML", "is this the right file?")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}", "save the file as UTF-8") from error
    return parse_yaml(text.replace("\r\n", "\n"), str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; `where` names it in errors."""
    try:
        composer = _Composer(YAML(typ="safe", pure=True).parse(StringIO(text)), where)
        value = composer.document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise InputError(f"{where}: {line}{error.problem or error.context}", "check the YAML there") from error
    except (YAMLError, AssertionError) as error:  # the parser asserts on a %YAML version it does not know
        reason = str(error).partition("\n")[0]
        raise InputError(f"{where}: {reason}", "check the YAML") from error
    if composer.faults:
        raise FaultsError(where, composer.faults)
    if value is None:
        raise InputError(f"{where}: empty", "write a mapping of keys and values")
    if not isinstance(value, dict):
        raise InputError(f"{where}: {kind_of(value)}, not a mapping", "write keys and values")
    return value


class _Composer:
    """Values out of the parser's events; what does not stop the reading is collected in `faults`."""

    def __init__(self, events: Iterator[Event], where: str) -> None:
        self.faults: list[tuple[str, str]] = []
        self._events = events
        self._where = where
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._values = 0

    def document(self) -> Any:
        """The only document's value; None where there is none."""
        next(self._events)  # the stream's start
        if type(next(self._events)).__name__ == "StreamEndEvent":
            return None
        value = self._value(next(self._events), "", 0)
        next(self._events)  # the document's end
        extra = next(self._events)
        if type(extra).__name__ != "StreamEndEvent":
            raise self._stop(extra, "a second document", "keep one document in a file")
        return value

    def _value(self, event: Event, path: str, depth: int) -> Any:
        if isinstance(event, AliasEvent):
            return self._alias(event)
        before = self._values
        self._count(1, event)
        if depth > DEEPEST:
            raise self._stop(event, f"more than {DEEPEST} lists and mappings inside each other", "write it flatter")
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent)
        tag = event.tag and str(event.tag).replace("tag:yaml.org,2002:", "!!")
        if tag and not (isinstance(event, ScalarEvent) and tag in _TEXT_TAGS):
            self._fault(event, f"{_at(path)}tag {tag} is not read", "the file is data: write plain values")
        value: Any
        if isinstance(event, ScalarEvent):
            value = event.value if event.style or tag else self._plain(event, path)
        elif isinstance(event, SequenceStartEvent):
            value = self._sequence(path, depth)
        else:
            value = self._mapping(path, depth)
        if event.anchor:
            self._anchors[event.anchor] = (value, self._values - before)
        return value

    def _sequence(self, path: str, depth: int) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            values.append(self._value(event, f"{path}[{len(values)}]", depth + 1))
        return values

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._key(event, depth)
            inside = f"{path}.{key}" if path else key
            value = self._value(next(self._events), inside, depth + 1)
            if key == "<<" and isinstance(event, ScalarEvent) and not event.style:
                merged = {**self._merge(event, value), **merged}
            elif key in own:
                both = f"line {lines[key]} and line {_line(event)}"
                self.faults.append((f"{inside} is given twice, in {both}", "keep one"))
            else:
                own[key], lines[key] = value, _line(event)
        return {**merged, **own}

    def _key(self, event: Event, depth: int) -> str:
        key = self._value(event, "", depth + 1)
        if isinstance(event, ScalarEvent):
            return str(event.value)
        if isinstance(key, str):  # an alias of a text
            return key
        self._fault(event, "a key that is no plain text", "use text as keys")
        return f"line {_line(event)}"

    def _merge(self, event: Event, value: Any) -> dict[str, Any]:
        """What a merge key brings: one mapping, or a list of them of which the earlier wins."""
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            self._fault(event, "a merge key << whose value is no mapping", "merge mappings only")
            return {}
        return {key: found for part in reversed(parts) for key, found in part.items()}

    def _alias(self, event: AliasEvent) -> Any:
        if event.anchor not in self._anchors:
            raise self._stop(event, f"alias *{event.anchor} has no whole anchor before it", "write the value out")
        value, size = self._anchors[event.anchor]
        self._count(size, event)
        return value

    def _plain(self, event: ScalarEvent, path: str) -> Any:
        """What an unquoted scalar means in YAML 1.2's core schema."""
        text: str = event.value
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            if len(text) > MOST_DIGITS:
                self._fault(event, f"{_at(path)}a number of {len(text)} digits", f"at most {MOST_DIGITS} are read")
                return 0
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if special := _SPECIAL.fullmatch(text):
            return math.nan if special[3] else float(f"{special[1]}inf")
        return text

    def _count(self, values: int, event: Event) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise self._stop(event, f"unfolds into more than {MOST_VALUES:,} values", "use fewer aliases")

    def _fault(self, event: Event, what: str, hint: str) -> None:
        self.faults.append((f"line {_line(event)}: {what}", hint))

    def _stop(self, event: Event, what: str, hint: str) -> InputError:
        return InputError(f"{self._where}: line {_line(event)}: {what}", hint)


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1


def _at(path: str) -> str:
    return f"{path}: " if path else ""


# Models.


class Strict(BaseModel):
    """A model that knows all its keys and is frozen once made; numbers are finite.

    `faults_between(data)` may tell what is wrong between fields, from the raw mapping: it is told
    together with the faults of single fields. A text in it may end in a line `hint: ...`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def faults_between(cls, data: dict[str, Any]) -> list[str]:
        """Faults that no single field shows; must take any values."""
        return []

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, validate: Callable[[Any], Any]) -> Any:
        between = cls.faults_between(data) if isinstance(data, dict) else []
        faults: list[InitErrorDetails] = []
        try:
            made = validate(data)
        except ValidationError as error:
            if not between:
                raise
            faults = [_again(dict(found)) for found in error.errors(include_url=False)]
        if not between:
            return made
        for text in between:
            faults.append(InitErrorDetails(type="value_error", loc=(), input=data, ctx={"error": ValueError(text)}))
        raise ValidationError.from_exception_data(cls.__name__, faults)


def _again(found: dict[str, Any]) -> InitErrorDetails:
    return InitErrorDetails(type=found["type"], loc=found["loc"], input=found["input"], ctx=found.get("ctx", {}))


def parse_model(model: type[M], data: dict[str, Any], where: str) -> M:
    """The model made of `data`; raises FaultsError with every fault and its path."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise FaultsError(where, [_fault(model, dict(found)) for found in error.errors(include_url=False)]) from error


_NEEDED = {
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "string_type": "text is needed",
    "bool_type": "true or false is needed",
    "tuple_type": "a list is needed",
    "list_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "greater_than_equal": "at least {ge:g} is needed",
    "greater_than": "more than {gt:g} is needed",
    "less_than_equal": "at most {le:.15g} is needed",
    "less_than": "less than {lt:g} is needed",
    "too_short": "a list of at least {min_length} is needed",
}
"""What a fault of pydantic's says here."""


def _fault(model: type[BaseModel], error: dict[str, Any]) -> tuple[str, str]:
    path: tuple[str | int, ...] = error["loc"]
    name = _path_text(path)
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return f"{name}: unknown key", nearest_hint(str(path[-1]), _keys_at(model, path[:-1]), "key")
    if kind == "missing":
        return f"{name}: missing", "add it"
    if kind == "value_error":
        message, _, hint = str(error["ctx"]["error"]).partition("\nhint: ")
        return (message if name and message.startswith(name) else f"{_at(name)}{message}"), hint
    if kind == "too_long":
        return f"{name}: {error['ctx']['max_length']} values are needed, it has {error['ctx']['actual_length']}", ""
    needed = _NEEDED[kind].format(**error.get("ctx", {})) if kind in _NEEDED else error["msg"].lower()
    return f"{name}: {needed}, it is {kind_of(given)}", ""


def _path_text(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _keys_at(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """The keys known at a path of a model."""
    here: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        field = here.model_fields.get(part) if here else None
        here = _model_in(field.annotation) if field else None
    return list(here.model_fields) if here else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def nearest_hint(name: str, known: Iterable[str], what: str) -> str:
    """`did you mean …?` where a known name is near, else the list of them; `what` is one of them in a word."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"each {what} known: {', '.join(known)}"


def kind_of(value: object) -> str:
    """A value as an error shows it: short, and in YAML's words."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
