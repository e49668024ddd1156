"""`agentx gate`: the 13 axes of a corpus, measured from its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentx.gate import GateResult

EXIT_NO = 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gate")(gate)


def gate(
    corpus: Annotated[Path, typer.Argument(help="Corpus folder or file: made by agentx, or weka sessions.")],
    profile: Annotated[
        str | None, typer.Option(help="Profile it is held to.", show_default="the one it was made from")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold a corpus to its profile on every axis; exit 1 if one is off.

    Example: agentx gate corpora/small
    """
    from agentx.corpus import load_corpus
    from agentx.gate import profile_of, run_gate
    from agentx.profile import load_profile

    loaded = load_corpus(corpus)
    for note in loaded.notes:
        sys.stderr.write(f"note: {corpus}: {note}\n")
    result = run_gate(loaded, profile_of(loaded) if profile is None else load_profile(profile))
    print_gate(result, as_json=as_json)
    if not result.passed:
        raise typer.Exit(EXIT_NO)


def print_gate(result: GateResult, *, as_json: bool = False) -> None:
    """The gate's table and verdict on stdout."""
    import orjson

    from agentx.cli.tables import console, good_or_bad, sentence, table

    out = console()
    if as_json:
        out.file.write(orjson.dumps(result.to_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    rows = [
        (
            verdict.axis.name,
            verdict.axis.unit,
            _number(verdict.measured),
            _number(verdict.target),
            f"{_number(verdict.low)} - {_number(verdict.high)}",
            f"{verdict.n:,}",
            "in" if verdict.within else "OFF",
        )
        for verdict in result.verdicts
    ]
    columns = ("axis", "unit", "measured", "target", "band", "n", "verdict")
    out.print(table(columns, rows, left=(0, 1)))
    verdict_line = f"{result.headline} (corpus {result.corpus}, profile {result.profile})"
    out.print(good_or_bad(sentence(verdict_line, out.width), result.passed))
    for fact in result.hidden():
        out.print(sentence(fact, out.width))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.1f}"
