"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded traces, captures and cases beside the checkout; skips where it is absent."""
    folder = Path(os.environ.get("AGENTX_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no recorded material at {folder}")
    return folder


@pytest.fixture(autouse=True)
def fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as wide as in a pipe, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "120")
