"""Checked access to the fields of a record: what is wrong is a fault with place, value and what is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentx.errors import FaultsError
from agentx.turns import BlockIds
from agentx.units import seconds_to_ns

MAX_FAULTS = 20
"""Faults told at once of one corpus."""
LONGEST_S = 9e9
"""Largest time accepted, in seconds: what an int64 of nanoseconds holds."""
NO_IDS: BlockIds = np.empty(0, dtype=np.uint64)

_MAX_INT32 = 2**31 - 1
_MAX_ID = 2**64 - 1


@dataclass(slots=True)
class Faults:
    """Faults found so far; the one that makes it too many raises."""

    where: str
    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, message: str, hint: str = "") -> None:
        """Note a fault."""
        self.found.append((message, hint))
        if len(self.found) >= MAX_FAULTS:
            self.check()

    def check(self) -> None:
        """Raise FaultsError if there is any."""
        if self.found:
            raise FaultsError(self.where, self.found)


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked access to a session's fields; what is wrong is a fault, and the value None."""

    faults: Faults
    label: str

    def fault(self, path: str, value: Any, needed: str) -> None:
        """Note that the field at `path` has this value and what it should be."""
        shown = value if isinstance(value, str) and not path else repr(value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        what = f"{path} is {shown}" if path else shown
        self.faults.add(f"{self.label}: {what}, {needed}".removeprefix(": "))

    def text(self, record: dict[str, Any], key: str) -> str | None:
        """The field's text, which must not be empty."""
        value = record.get(key)
        if isinstance(value, str) and value:
            return value
        self.fault(key, value, "a text is needed")
        return None

    def one_of(self, record: dict[str, Any], key: str, choices: tuple[str, ...], default: str) -> str | None:
        """The field's word, `default` where it is missing or null."""
        value = record.get(key)
        if value is None:
            return default
        if value in choices:
            return str(value)
        self.fault(key, value, f"{' or '.join(choices)} is needed")
        return None

    def items(self, record: dict[str, Any], key: str, path: str = "") -> list[Any] | None:
        """The field's list."""
        value = record.get(key)
        if isinstance(value, list):
            return value
        self.fault(_at(path, key), value, "a list is needed")
        return None

    def whole(self, record: dict[str, Any], key: str, low: int, path: str = "") -> int | None:
        """The field's whole number from `low` on, also where it is written as 64.0."""
        value = record.get(key)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and low <= value <= _MAX_INT32:
            return value
        self.fault(_at(path, key), value, f"a whole number from {low} to {_MAX_INT32} is needed")
        return None

    def nanoseconds(self, record: dict[str, Any], key: str, path: str, needed: bool = False) -> int | None:
        """The field's seconds in nanoseconds; None where it is missing, or negative and not needed."""
        value = record.get(key)
        number = value if type(value) in (int, float) else None
        if number is not None and 0 <= number < LONGEST_S:
            return seconds_to_ns(number)
        if needed or (value is not None and (number is None or number > 0)):
            self.fault(_at(path, key), value, f"seconds from 0 to {LONGEST_S:.0e} are needed")
        return None

    def block_ids(self, record: dict[str, Any], path: str) -> BlockIds:
        """The field's ids, none where it is missing or null; every one a whole number below 2^64."""
        values = record.get("hash_ids")
        if values is None:
            return NO_IDS
        if not isinstance(values, list):
            self.fault(_at(path, "hash_ids"), values, "a list is needed")
            return NO_IDS
        if set(map(type, values)) <= {int}:
            try:
                return np.array(values, dtype=np.uint64)
            except OverflowError:
                pass  # told below
        for number, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= _MAX_ID:
                self.fault(f"{path}.hash_ids[{number}]", value, f"a whole number from 0 to {_MAX_ID} is needed")
                break
        return NO_IDS


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
