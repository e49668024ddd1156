"""How the command line shows tables: aligned columns that read the same on a terminal and in a log."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from agentx.units import printable

PIPE_WIDTH = 120
"""Columns of sentences that go to a file or a pipe, where COLUMNS does not say otherwise."""

GAP = 2
"""Spaces between columns."""


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; a pipe gets a fixed width and no colour, and nothing is ever cut off."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _pipe_width()
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False, soft_wrap=True)


def _pipe_width() -> int:
    stated = os.environ.get("COLUMNS", "")
    return int(stated) if stated.isdecimal() and int(stated) > 0 else PIPE_WIDTH


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), title: str = ""
) -> Table:
    """A table without lines; columns not in `left` are aligned to the right, and no cell is shortened."""
    cells = [[Text(printable(cell)) for cell in row] for row in rows]
    widths = [max([len(name), *(row[number].cell_len for row in cells)]) for number, name in enumerate(columns)]
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), title=title or None, title_justify="left")
    made.width = sum(widths) + GAP * (len(widths) - 1)  # its own, however narrow the console is
    for number, name in enumerate(columns):
        justify: JustifyMethod = "left" if number in left else "right"
        made.add_column(name, justify=justify, header_style="bold", no_wrap=True)
    for row in cells:
        made.add_row(*row)
    return made


def sentence(text: str, width: int) -> str:
    """The text in lines of at most `width` columns, broken between words."""
    return entry("", text, width, 0)


def entry(label: str, text: str, width: int, indent: int) -> str:
    """A label and its text from column `indent` on, the further lines under the text."""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=label.ljust(indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def good_or_bad(text: str, good: bool) -> Text:
    """The text in the colour of its verdict."""
    return Text(text, style="green" if good else "bold red")
