"""`agentx report`: what a run measured."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from agentx.metrics import Summary
    from agentx.report import Report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    run: Annotated[Path, typer.Argument(help="Run folder that agentx replay wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run: percentiles with their n, counts, throughput, cache, and what is doubtful.

    Example: agentx report runs/first
    """
    from agentx.report import make_report, write_report
    from agentx.runs import load_run

    loaded = load_run(run)
    print_report(write_report(loaded) if loaded.complete else make_report(loaded), as_json=as_json)


NAMES = {
    "ttft_ns": "TTFT",
    "ttfc_ns": "first content",
    "itl_ns": "ITL",
    "icl_ns": "ICL (chunk gaps)",
    "e2e_ns": "E2E",
    "response_ns": "response (from due)",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "cache_hit": "cache hit per call",
}


def print_report(made: Report, *, as_json: bool = False) -> None:
    """The report on stdout."""
    import orjson

    from agentx.cli.tables import console, table
    from agentx.units import format_count, format_duration, format_percent

    out = console()
    if as_json:
        out.file.write(orjson.dumps(made.to_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    out.print(textwrap.fill(made.headline, out.width))
    for doubt in made.doubts:
        out.print(textwrap.fill(f"doubt: {doubt}", out.width, initial_indent="  ", subsequent_indent="    "))
    out.print()
    columns = ("", "n", "P50", "P90", "P95", "P99", "mean", "max")
    out.print(table(columns, [_distribution(name, summary) for name, summary in made.distributions.items()]))
    out.print()
    used, cache, lag, facts = made.throughput, made.cache, made.lag, made.facts
    rows = [
        ("calls", _counts_text(made.counts)),
        ("completed in the window", f"{used.completed:,} turns in {_seconds(used.window_s)}"),
        ("failed", f"{format_percent(made.error_rate)} {_kinds_text(made.error_kinds)}".strip()),
        (
            "active tokens/s",
            f"{format_count(used.active_total_tok_s)} total, {format_count(used.active_input_tok_s)} input, "
            f"{_rate(used.active_output_tok_s)} output, over {_seconds(used.active_s)} with a call in flight",
        ),
        (
            "output tokens/s",
            f"{_rate(used.output_tok_s)} over the window, "
            f"{_rate(used.output_with_partial_tok_s)} with what unfinished calls had sent",
        ),
        ("requests/s", f"{_rate(used.requests_s)}, {_rate(used.mean_in_flight)} in flight on average"),
        (
            "cache hit, token-weighted",
            f"{format_percent(cache.hit)} of a ceiling of {format_percent(cache.ceiling)}: efficiency "
            f"{format_percent(cache.efficiency)} ({cache.n_reporting:,} of {cache.n:,} calls report it)",
        ),
        ("due to sent (lag)", f"P50 {format_duration(lag.p50)}, P99 {format_duration(lag.p99)}, n {lag.n:,}"),
        ("settings", _settings_text(facts)),
        ("corpus", f"{facts['profile']}, digest {str(facts['corpus_digest'])[:12]}, seed {facts['seed']}"),
        ("deployment", _deployment_text(facts)),
    ]
    for name, text in rows:
        out.print(_fact(name, text, out.width))
    out.print()
    row = made.row
    cells = {
        "platform": str(row["platform"]),
        "profile": str(row["profile"]),
        "con": str(row["con"]),
        "requests": format_count(row["requests"]),
        "input p99": format_count(row["input_p99"]),
        "TTFT p50": format_duration(row["ttft_p50_ns"]),
        "ITL p50": format_duration(row["itl_p50_ns"]),
        "active tokens/s": format_count(row["active_tok_s"]),
        "cache hit": format_percent(row["cache_hit"], 0),
    }
    out.print(table(tuple(cells), [tuple(cells.values())], left=(0, 1)))


FACT_WIDTH = 27
"""Columns of a fact's name."""


def _fact(name: str, text: str, width: int) -> str:
    """A name and its text, further lines under the text."""
    indent = " " * FACT_WIDTH
    return textwrap.fill(
        text,
        max(width, 2 * FACT_WIDTH),
        initial_indent=name.ljust(FACT_WIDTH),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _distribution(name: str, summary: Summary) -> tuple[str, ...]:
    from agentx.units import format_count, format_duration, format_percent

    show = format_duration if name.endswith("_ns") else format_percent if name == "cache_hit" else format_count
    values = (summary.p50, summary.p90, summary.p95, summary.p99, summary.mean, summary.max)
    return (NAMES[name], f"{summary.n:,}", *(show(value) for value in values))


def _counts_text(counts: dict[str, dict[str, int]]) -> str:
    parts = []
    for phase in ("warmup", "measure", "drain"):
        inside = counts.get(phase, {})
        if inside:
            parts.append(f"{phase}: " + ", ".join(f"{n:,} {status}" for status, n in inside.items()))
    return "; ".join(parts) or "none"


def _kinds_text(kinds: dict[str, int]) -> str:
    return "(" + ", ".join(f"{n:,} {kind}" for kind, n in kinds.items()) + ")" if kinds else ""


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} s"


def _settings_text(facts: dict[str, Any]) -> str:
    from agentx.units import format_duration

    window = facts["start_window"]
    parts = [
        f"{facts['concurrency']} lanes",
        f"window {format_duration(facts['duration_ns'])}",
        "drain" if facts["drain"] else f"grace {format_duration(facts['grace_ns'])}",
        f"ramp {format_duration(facts['ramp_ns'])}",
        f"start window {window[0]:g}-{window[1]:g}" if window else "no start window",
        f"think cap {format_duration(facts['think_cap_ns'])}" if facts["think_cap_ns"] is not None else "no think cap",
        f"idle cap {format_duration(facts['idle_cap_ns'])}" if facts["idle_cap_ns"] is not None else "no idle cap",
        f"cache bust {'on' if facts['cache_bust'] else 'off'}",
    ]
    return ", ".join(parts)


def _deployment_text(facts: dict[str, Any]) -> str:
    from agentx.units import format_count

    text = (
        f"{facts['platform']}, model {facts['model']}, context window {format_count(facts['max_model_len'])} "
        f"({facts['max_model_len_source']}), cache unit {facts['cache_block']} tokens ({facts['cache_block_source']})"
    )
    return text if facts["endpoint"] is None else f"{text}, {facts['endpoint']}, prompts {facts['prompt']}"
