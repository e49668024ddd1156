"""The public bug reports: their inputs and the right values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def inputs(shared: Path, name: str) -> Any:
    """One input file: JSON, or JSON lines as a list."""
    text = (shared / "cases" / "inputs" / name).read_text(encoding="utf-8-sig")
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def expected(shared: Path, case: str) -> Any:
    """The right values of a case."""
    return json.loads((shared / "cases" / "expected.json").read_text(encoding="utf-8"))[case]["expected"]
