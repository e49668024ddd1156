"""Imports point one way: a module may only know modules below it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "agentx"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "clock", "rng", "resources", "redact", "stats", "echo", "watch"),
    ("yaml12", "turns", "store"),
    ("profile", "deployment", "corpus", "reference", "hashing", "digests", "prefix"),
    ("descriptors",),
    ("generate", "axes"),
    ("gate",),
    ("tokens",),
    ("prompts",),
    ("call", "endpoint", "sse", "exchange", "lane"),
    ("dial",),
    ("lanes", "http"),
    ("answers",),
    ("live", "discover", "scrape"),
    ("runs", "metrics", "capacity"),
    ("selfcheck",),
    ("audit",),
    ("doubts",),
    ("report",),
    ("sim", "engines"),
    ("target",),
    ("worker",),
    ("crew",),
    ("replay",),
    ("replay_live",),
    ("cli",),
)
"""From the ground up; modules on one line may know each other."""


def rank_of(module: str) -> int:
    name = module.split(".")[1]
    for rank, names in enumerate(LAYERS):
        if name in names:
            return rank
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("agentx."):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("agentx."))
    return found


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("agentx", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(part for part in parts if part != "__init__")
        if name not in ("agentx", "agentx.__main__"):
            found.append((name, path))
    return found


def test_imports_point_down() -> None:
    wrong = [
        f"{name} knows {imported}"
        for name, path in modules()
        for imported in imports_of(path)
        if rank_of(imported) > rank_of(name)
    ]
    assert wrong == []


def test_every_layer_entry_is_a_module() -> None:
    known = {name.split(".")[1] for name, _ in modules()}
    assert {name for names in LAYERS for name in names} <= known


def test_only_the_command_line_prints() -> None:
    for name, path in modules():
        if not name.startswith("agentx.cli"):
            text = path.read_text(encoding="utf-8")
            assert "sys.stdout" not in text, name
            assert "print(" not in text.replace("blueprint(", "").replace("fingerprint(", ""), name
