"""`agentx doctor`: can this client be trusted on this machine?"""

from __future__ import annotations

from typing import Annotated

import typer

EXIT_NO = 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    concurrency: Annotated[int, typer.Option(min=1, help="Lanes to check with.")] = 16,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt length to check with, in tokens.")] = 2000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that play the lanes.", show_default="by their number")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the client's own error against a truthful deployment on loopback; exit 1 if its P99 is over 2 ms.

    Example: agentx doctor --concurrency 64
    """
    import time

    import orjson
    import uvloop

    from agentx.cli.tables import console, table
    from agentx.crew import checked, usual_workers
    from agentx.doubts import BUDGET_FLOOR_NS
    from agentx.stats import tail_name
    from agentx.units import format_duration

    processes = usual_workers(concurrency) if workers is None else min(workers, concurrency)
    budget = uvloop.run(checked(processes, concurrency, input_tokens))
    resolution_ns = round(time.get_clock_info("monotonic").resolution * 1e9)
    good = budget is not None and max(abs(budget.ttft_p99_ns), abs(budget.itl_p99_ns)) <= BUDGET_FLOOR_NS
    out = console()
    if as_json:
        found = {
            "clock_resolution_ns": resolution_ns,
            "client_budget": budget and budget.to_json(),
            "limit_ns": BUDGET_FLOOR_NS,
            "good": good,
        }
        out.file.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        limit = format_duration(BUDGET_FLOOR_NS)
        rows = [("clock", "pass", f"monotonic, steps of {format_duration(resolution_ns)}")]
        if budget is None:
            rows.append(("client", "fail", "no call completed against the echo deployment"))
        else:
            rows += [
                (
                    name,
                    "pass" if p99 <= BUDGET_FLOOR_NS else "fail",
                    f"bias {format_duration(bias)}, {tail_name(budget.n)} {format_duration(p99)}, limit {limit}",
                )
                for name, bias, p99 in (
                    ("TTFT error", budget.ttft_bias_ns, budget.ttft_p99_ns),
                    ("ITL error", budget.itl_bias_ns, budget.itl_p99_ns),
                )
            ]
            shape = f"{concurrency} lanes in {processes} process{'es' if processes > 1 else ''}"
            rows.append(("calls", "", f"{budget.n:,} compared, {shape}, {input_tokens:,} input tokens"))
        out.print(table(("check", "verdict", "found"), rows, left=(0, 1, 2)))
    if not good:
        raise typer.Exit(EXIT_NO)
