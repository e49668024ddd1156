"""Where the shipped data files are: profiles and gates, one copy in the repository."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "_data"


def data_folder(name: str) -> Path:
    """The folder `profiles` or `gates`: inside an installed wheel, else at the top of the checkout."""
    root = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent
    return root / name
