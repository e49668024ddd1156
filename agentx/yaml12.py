"""YAML 1.2 at the edge: strict reading, and models whose faults are all told at once.

Numbers are those of YAML 1.2's core schema (`1e5` is one, `no`, `1_000` and `1:30` are text). A key
given twice, an unknown tag and a document that unfolds into too many nodes are errors.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from agentx.errors import FaultsError, InputError
from agentx.store import read_bytes

LARGEST_FILE = 1024 * 1024
"""Bytes of a profile; a hundred times the largest shipped one."""
MOST_NODES = 100_000
"""Nodes after aliases are unfolded: a bound on files that unfold without end."""

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

_TAGS = {"str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge"}

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """A model that knows all its keys and takes no value of another type; frozen once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises InputError with file and line where there is none."""
    data = read_bytes(path)
    if len(data) > LARGEST_FILE:
        raise InputError(f"{path}: {len(data)} bytes, at most {LARGEST_FILE} are read", "is this the right file?")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}", "save the file as UTF-8") from error
    return parse_yaml(text.replace("\r\n", "\n"), str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; `where` names it in errors."""
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 2)
    try:
        node = reader.compose(StringIO(text))
    except DuplicateKeyError as error:
        raise InputError(f"{where}: {error.problem}", "keep one of them") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{where}:{line} {error.problem or error.context}", "check the YAML there") from error
    except YAMLError as error:
        raise InputError(f"{where}: {error}", "check the YAML") from error
    if node is None:
        raise InputError(f"{where}: empty", "write a mapping of keys and values")
    value = _Builder(where).build(node, ())
    if not isinstance(value, dict):
        raise InputError(f"{where}: a {type(value).__name__}, not a mapping", "write keys and values")
    return value


class _Builder:
    """Values out of nodes, by YAML 1.2's core schema."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = MOST_NODES

    def build(self, node: Node, above: tuple[int, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error(node, f"unfolds into more than {MOST_NODES} nodes", "use fewer aliases")
        if id(node) in above:
            raise self._error(node, "an alias inside its own anchor", "write the value out")
        if str(node.tag).removeprefix("tag:yaml.org,2002:") not in _TAGS:
            raise self._error(node, f"unknown tag {node.tag}", "profiles are data: use plain values")
        inside = (*above, id(node))
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if isinstance(node, SequenceNode):
            return [self.build(item, inside) for item in node.value]
        assert isinstance(node, MappingNode)
        return self._mapping(node, inside)

    def _mapping(self, node: MappingNode, inside: tuple[int, ...]) -> dict[str, Any]:
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, ScalarNode) and key_node.value == "<<" and not key_node.style:
                merged = {**self._merge(value_node, inside), **merged}
                continue
            key = self._key(key_node)
            line = key_node.start_mark.line + 1
            if key in own:
                raise InputError(
                    f"{self._where}: key {key!r} is given twice, in line {lines[key]} and line {line}",
                    "keep one of them",
                )
            own[key], lines[key] = self.build(value_node, inside), line
        return {**merged, **own}

    def _merge(self, node: Node, inside: tuple[int, ...]) -> dict[str, Any]:
        """The mapping of a merge key: one mapping, or a list of them of which the earlier wins."""
        value = self.build(node, inside)
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            raise self._error(node, "a merge key whose value is no mapping", "merge mappings only")
        return {key: found for part in reversed(parts) for key, found in part.items()}

    def _key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise self._error(node, "a key that is no plain text", "use text as keys")
        return str(node.value)

    def _scalar(self, node: ScalarNode) -> Any:
        text = node.value
        if node.style:  # quoted or block text
            return text
        if text in _NULLS:
            return None
        if text in _BOOLS:
            return _BOOLS[text]
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        special = _SPECIAL.fullmatch(text)
        if special:
            return math.nan if special[3] else float(f"{special[1]}inf")
        return text

    def _error(self, node: Node, what: str, hint: str) -> InputError:
        return InputError(f"{self._where}: line {node.start_mark.line + 1}: {what}", hint)


def parse_model(model: type[M], data: dict[str, Any], where: str) -> M:
    """The model made of `data`; raises FaultsError with every fault and its path."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise FaultsError(where, [_fault(model, dict(found)) for found in error.errors(include_url=False)]) from error


def _fault(model: type[BaseModel], error: dict[str, Any]) -> tuple[str, str]:
    path = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    name = _path_text(path)
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{name}: unknown key", nearest_hint(str(path[-1]), _keys_at(model, path[:-1]), "key")
    if kind == "missing":
        return f"{name}: missing", "add it"
    if kind in ("value_error", "assertion_error"):
        message, _, hint = str(error["ctx"]["error"]).partition("\nhint: ")
        return (message if not name or message.startswith(name) else f"{name}: {message}"), hint
    return f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}, it is {_short(error['input'])}", ""


def _path_text(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _keys_at(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """The keys known at a path of a model."""
    here: type[BaseModel] | None = model
    for part in path:
        field = here.model_fields.get(str(part)) if here else None
        here = _model_in(field.annotation) if field else here
    return list(here.model_fields) if here else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def nearest_hint(name: str, known: Iterable[str], what: str) -> str:
    """`did you mean …?` where a known name is near, else the list of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known {what}s: {', '.join(known)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
