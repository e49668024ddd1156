"""`agentx generate`: a profile's corpus, held to its gate before it is handed out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentx.corpus import Corpus
    from agentx.gate import GateResult
    from agentx.generate import Generated


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate)


def generate(
    profile: Annotated[str, typer.Option(help="Profile: a shipped name or a YAML file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the corpus.", show_default="corpora/NAME")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Instead of the profile's seed.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Instead of the profile's number of sessions.")] = None,
    form: Annotated[
        str, typer.Option("--format", help="parquet: small, for agentx; weka: a JSON file per session, for all.")
    ] = "parquet",
    no_gate: Annotated[bool, typer.Option("--no-gate", help="Hand the corpus out even if an axis is off.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Make it again even if it is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the corpus of a profile and hold it to the profile's gate; exit 1, and no corpus, if an axis is off.

    Example: agentx generate --profile small -o corpora/small
    """
    from agentx.errors import VerdictError
    from agentx.gate import run_gate
    from agentx.generate import generate_corpus, generated_profile
    from agentx.profile import load_profile

    chosen = generated_profile(load_profile(profile))
    changes = {name: value for name, value in (("seed", seed), ("sessions", sessions)) if value is not None}
    chosen = chosen.model_copy(update=changes)
    folder = Path("corpora") / chosen.name if output is None else output
    results: list[GateResult] = []

    def check(corpus: Corpus) -> None:
        result = run_gate(corpus, chosen)
        results.append(result)
        if not result.passed and not no_gate:
            before = "; the corpus that was there before stays" if folder.exists() else ""
            raise VerdictError(
                f"{folder}: {result.headline}, so the corpus is not handed out{before}",
                "change the profile, or look at the corpus with --no-gate",
            )

    sys.stderr.write(f"making {chosen.name}: {chosen.sessions:,} sessions, seed {chosen.seed}\n")
    try:
        made = generate_corpus(chosen, folder, form=form, check=check, force=force)
    except VerdictError:
        _print(results[-1], None, folder, as_json)
        raise
    _print(results[-1], made, folder, as_json)
    how = "already there, unchanged" if made.reused else f"made again: {made.reason}" if made.reason else "made"
    counts = f"{len(made.corpus.sessions):,} sessions, {made.corpus.n_turns:,} turns"
    sys.stderr.write(f"{folder}: {how}; {counts}; content {made.corpus.digest[:12]}\n")


def _print(result: GateResult, made: Generated | None, folder: Path, as_json: bool) -> None:
    """The gate on stdout: its table, or one JSON document with the facts of the corpus."""
    import orjson

    from agentx.cli.gate import print_gate

    if not as_json:
        print_gate(result)
        return
    facts = {
        "folder": str(folder) if made else None,
        "reused": made.reused if made else None,
        "reason": made.reason if made else None,
        "digest": made.corpus.digest if made else None,
        "counts": made.corpus.manifest["counts"] if made else None,
        "gate": result.to_json(),
    }
    sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
