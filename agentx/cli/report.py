"""`agentx report`: what a run measured, and what is doubtful about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentx.units import NS_PER_S, format_count, format_duration, format_percent

if TYPE_CHECKING:
    from agentx.report import Report
    from agentx.stats import Summary

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
    "lag_ns": "lag (due to sent)",
}
ROW = ("platform", "profile", "con", "requests", "input p99", "TTFT p50", "ITL p50", "active tokens/s", "cache hit")
"""Columns of the seed's Table 7."""
LABEL_WIDTH = 18
WIDEST = 120
"""Columns that sentences fill at most."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    run: Annotated[Path, typer.Argument(help="Run folder that agentx replay wrote; finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run: percentiles with their n, counts, throughput, cache, and what is doubtful. Writes nothing.

    Example: agentx report runs/first
    """
    from agentx.report import make_report
    from agentx.runs import load_run

    print_report(make_report(load_run(run)), as_json=as_json)


def print_report(made: Report, *, as_json: bool = False) -> None:
    """The report on stdout."""
    import orjson

    from agentx.cli.tables import console, entry, sentence, table

    out = console()
    if as_json:
        out.file.write(orjson.dumps(made.to_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    width = min(out.width, WIDEST)
    if made.notice:
        out.print(sentence(f"{made.notice}.", width), style="bold yellow")
    out.print(sentence(made.summary, width), style="bold")
    for doubt in made.doubts:
        out.print(entry("  doubt:", doubt.text, width, 9), style="yellow")
    out.print()
    columns = ("", "n", "P50", "P90", "P95", "P99", "mean", "max")
    shown = {**made.distributions, "lag_ns": made.lag}
    out.print(table(columns, [_distribution(name, summary) for name, summary in shown.items()]))
    out.print()
    for label, text in _facts(made):
        out.print(entry(label, text, width, LABEL_WIDTH))
    out.print()
    out.print(table(ROW, [_row(made.row)], left=(0, 1)))


def _distribution(name: str, summary: Summary) -> tuple[str, ...]:
    show = format_duration if name.endswith("_ns") else format_percent if name == "cache_hit" else format_count
    values = (summary.p50, summary.p90, summary.p95, summary.p99, summary.mean, summary.max)
    return (NAMES[name], f"{summary.n:,}", *(show(value) for value in values))


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of the run's line in the shape of the seed's Table 7."""
    return (
        str(row["platform"] or "-"),
        str(row["profile"] or "-"),
        format_count(row["con"]),
        format_count(row["requests"]),
        format_count(row["input_tokens_p99"]),
        format_duration(row["ttft_ns_p50"]),
        format_duration(row["itl_ns_p50"]),
        format_count(row["active_total_tok_s"]),
        format_percent(row["cache_hit"], 0),
    )


def _facts(made: Report) -> list[tuple[str, str]]:
    """(label, text) of what stands under the distributions."""
    return [
        ("calls", _calls(made)),
        *_throughput(made),
        ("cache hit", _cache(made)),
        ("lengths", _lengths(made)),
        ("tokens", _tokens(made)),
        ("settings", _settings(made.facts)),
        ("corpus", _corpus(made.facts)),
        ("deployment", _deployment(made.facts)),
        ("client", _client(made.facts)),
        *[("server", text) for text in _servers(made)],
    ]


def _calls(made: Report) -> str:
    seen = made.outcomes
    parts = [
        f"{seen.sent:,} sent in the window: {seen.ok:,} ok, {seen.failed:,} failed{_kinds(made.error_kinds)}, "
        f"{seen.overflow:,} over the context, {seen.cancelled:,} cut at the end"
    ]
    warmup = {status: n for status, n in made.counts.get("warmup", {}).items() if status != "skipped"}
    if warmup:
        parts.append("warm-up " + ", ".join(f"{n:,} {status}" for status, n in warmup.items()))
    if made.skipped:
        parts.append(f"turns never sent: {sum(made.skipped.values()):,}{_kinds(made.skipped)}")
    return "; ".join([*parts, f"sessions measured: {made.sessions:,}"])


def _kinds(kinds: Mapping[str, int]) -> str:
    parts = [f"{n:,} {kind.replace('_', ' ')}" for kind, n in kinds.items()]
    return f" ({', '.join(parts)})" if parts else ""


def _throughput(made: Report) -> list[tuple[str, str]]:
    used = made.throughput
    if used is None:
        return [("throughput", "-")]
    return [
        (
            "completed",
            f"{used.completed:,} turns in {_seconds(used.window_s)}, {_rate(used.requests_s)} requests/s, "
            f"{_rate(used.mean_in_flight)} in flight on average",
        ),
        (
            "active tokens/s",
            f"{_rate(used.active_total_tok_s)} total, {_rate(used.active_input_tok_s)} input, "
            f"{_rate(used.active_output_tok_s)} output, over {_seconds(used.active_s)} with a call in flight "
            f"(n {min(used.n_input, used.n_output):,})",
        ),
        (
            "output tokens/s",
            f"{_rate(used.output_tok_s)} over the window, {_rate(used.output_with_partial_tok_s)} with "
            "what unfinished calls had sent",
        ),
    ]


def _cache(made: Report) -> str:
    cache = made.cache
    return (
        f"{format_percent(cache.hit)} of prompt tokens (n {cache.n_reporting:,} of {cache.n:,} calls), ceiling "
        f"{format_percent(cache.ceiling)} (n {cache.n_ceiling:,}), efficiency {format_percent(cache.efficiency)}"
    )


def _lengths(made: Report) -> str:
    return "; ".join(
        f"{name} {of.planned:,} planned, {of.achieved:,} achieved, {of.n_off:,} of {of.n:,} calls differ"
        for name, of in made.lengths.items()
    )


def _tokens(made: Report) -> str:
    found = made.audit
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in found.finish_reasons.items())
    parts = [
        f"output {found.asked:,} asked for, {found.reported:,} reported in {found.chunks:,} chunks "
        f"(n {found.n_reporting:,} of {found.n:,})",
        f"completed calls hold {format_percent(found.completed_share)} of what arrived in the window",
        f"finished by {reasons or '-'}",
    ]
    for kind, count in found.server.items():
        parts.append(f"{kind} over the whole run: server {count.server:,.0f}, calls {count.client:,}")
    return "; ".join(parts)


def _rate(value: float | None) -> str:
    """A rate with three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} s"


def _settings(facts: Mapping[str, Any]) -> str:
    window = facts["start_window"]
    caps = [
        f"{name} cap {format_duration(facts[key])}" if facts[key] is not None else f"no {name} cap"
        for name, key in (("think", "think_cap_ns"), ("idle", "idle_cap_ns"))
    ]
    return ", ".join(
        [
            f"{format_count(facts['concurrency'])} lanes",
            f"seed {'-' if facts['seed'] is None else facts['seed']}",
            f"window {format_duration(facts['duration_ns'])}",
            "drain" if facts["drain"] else f"grace {format_duration(facts['grace_ns'])}",
            f"ramp {format_duration(facts['ramp_ns'])}",
            f"start window {window[0]:g} to {window[1]:g}" if window else "no start window",
            *caps,
            f"cache bust {'on' if facts['cache_bust'] else 'off'}",
        ]
    )


def _corpus(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['profile'] or '-'}, {format_count(facts['corpus_sessions'])} sessions, "
        f"{format_count(facts['corpus_turns'])} turns, digest {(facts['corpus_digest'] or '-')[:12]}"
    )


def _deployment(facts: Mapping[str, Any]) -> str:
    parts = [
        f"{facts['platform'] or '-'}, model {facts['model'] or '-'}",
        f"context window {format_count(facts['max_model_len'])} ({facts['max_model_len_source'] or 'unknown'})",
        f"cache unit {format_count(facts['cache_block'])} tokens ({facts['cache_block_source'] or 'unknown'})",
    ]
    if facts["endpoint"]:
        exact = {True: ", exact", False: ", not exact", None: ""}[facts["prompt_exact"]]
        parts.append(f"{facts['endpoint']}, prompts as {facts['prompt']}{exact}")
    return ", ".join(parts)


def _servers(made: Report) -> Iterator[str]:
    """What each server says of its own over the window, beside what the client saw."""
    for url, found in (made.facts["server"] or {}).items():
        parts = []
        for name, client in (("ttft", made.distributions["ttft_ns"]), ("itl", made.distributions["itl_ns"])):
            own = found.get(name)
            if own and own["n"]:
                p50 = own["p50_s"]
                over = own["p50_at_least_s"]
                shown = f"over {over or 0:g} s" if p50 is None else format_duration(p50 * NS_PER_S)
                parts.append(
                    f"{name.upper()} P50 {shown} from its buckets "
                    f"(n {own['n']:,.0f}, client {format_duration(client.p50)})"
                )
        if found.get("cache_hit") is not None:
            parts.append(f"cache hit {format_percent(found['cache_hit'])} of its prompt tokens")
        if found.get("restarted"):
            parts.append("restarted during the run")
        if parts:
            yield f"{url}/metrics: {', '.join(parts)}"


def _client(facts: Mapping[str, Any]) -> str:
    host, clock = facts["host"] or {}, facts["clock"] or {}
    parts = [
        f"agentx {facts['agentx_version'] or '-'}",
        f"Python {host.get('python', '-')} on {host.get('system', '-')} {host.get('machine', '')}".strip(),
        f"{host.get('cpus', '-')} cpus",
        f"clock steps of {clock.get('resolution_ns', '-')} ns",
        f"started {facts['started_at'] or '-'}",
    ]
    seen = facts["client"] or {}
    budget, stall = facts["client_budget"], seen.get("loop_stall_ns") or {}
    if "workers" in seen:
        parts.append(f"{seen['workers']} worker processes")
    if budget:
        from agentx.stats import tail_name

        tail = tail_name(budget["n"])
        parts.append(
            f"own error of TTFT {format_duration(budget['ttft_bias_ns'])}, "
            f"{tail} {format_duration(budget['ttft_p99_ns'])}, of ITL {format_duration(budget['itl_bias_ns'])}, "
            f"{tail} {format_duration(budget['itl_p99_ns'])} (n {budget['n']:,})"
        )
    if stall.get("n"):
        parts.append(f"loop stalls P99 {format_duration(stall['p99'])}, worst {format_duration(stall['max'])}")
    return ", ".join(parts)
