"""How the command line shows tables: aligned columns that read the same on a terminal and in a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDEST = 120
"""Columns of output that goes to a file or a pipe."""


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; a pipe gets a fixed width and no colour."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else int(os.environ.get("COLUMNS", WIDEST))
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False, soft_wrap=False)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), title: str = ""
) -> Table:
    """A table without lines; columns not in `left` are aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title or None, title_justify="left")
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number in left else "right", header_style="bold", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def good_or_bad(text: str, good: bool) -> Text:
    """The text in the colour of its verdict."""
    return Text(text, style="green" if good else "bold red")
