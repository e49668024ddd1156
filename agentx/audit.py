"""Do the counters of a run agree? Tokens that were asked for, reported, streamed, and counted by the server.

Each is counted by someone else. Where two disagree by more than `TOLERANCE`, one of them is wrong, and a
doubt of the report says which one is believed. The seed's first lesson is why: a counter of completed
requests read 37 % on runs where 97 % of the tokens had arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from agentx import metrics
from agentx.turns import FAILED
from agentx.units import format_count, format_percent

TOLERANCE = 0.05
"""Counters that differ by this share agree: the edges of a window and calls that were cut explain so much."""
FEW_CALLS = 0.01
"""Share of calls that may be odd without being told."""
USUAL_REASONS = frozenset({"length", "stop", "tool_calls", "function_call", "content_filter"})


@dataclass(frozen=True, slots=True)
class ServerCount:
    """Tokens of one kind over the whole run, warm-up and drain included, by the server and by us."""

    server: float
    client: int
    unsure: int
    """Tokens of calls that failed or were cut: the server may have counted them."""

    @property
    def excess(self) -> float:
        """What the server counted beyond the range that our calls explain; negative where it counted less."""
        return self.server - min(max(self.server, self.client), self.client + self.unsure)

    @property
    def agrees(self) -> bool:
        """Within the tolerance."""
        return abs(self.excess) <= TOLERANCE * max(self.client, 1)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the counters say, in tokens and calls; of measured calls where nothing else is said."""

    n: int
    asked: int
    """Output tokens that the calls asked for; a planned 0 is asked for as 1."""
    reported: int
    """Output tokens that the server reports, of the calls that report any."""
    n_reporting: int
    chunks: int
    """Output chunks of the calls that report: each holds a token at least."""
    n_more_chunks: int
    """Calls of more chunks than reported tokens."""
    completed_tokens: int
    """Output tokens of calls that completed inside the window."""
    arrived_tokens: float
    """Output tokens that arrived inside the window, of whatever call."""
    n_failed: int
    """Failed calls that were sent inside the window."""
    n_failed_full: int
    """Those that had brought what was asked of them, within the tolerance."""
    finish_reasons: Mapping[str, int]
    n_length_early: int
    """Calls that ended by `length` with fewer tokens than asked for."""
    n_stop_early: int
    """Calls that ended by `stop` with fewer."""
    server: Mapping[str, ServerCount] = field(default_factory=dict)
    """`prompt` and `output`, where the servers tell them."""

    @property
    def completed_share(self) -> float | None:
        """Output tokens of completed calls / arrived ones."""
        return self.completed_tokens / self.arrived_tokens if self.arrived_tokens else None


def audit(
    calls: pl.DataFrame, good: pl.DataFrame, window: tuple[int, int] | None, servers: Mapping[str, Any] | None
) -> Audit:
    """The counters of a run; `good` are its measured calls, `servers` what was read off each `/metrics`."""
    asked = pl.col("planned_output_tokens").clip(1)
    tokens, chunks = pl.col("completion_tokens"), pl.col("chunk_ns").list.len()
    early = tokens < asked
    reason = pl.col("finish_reason")
    reporting = good.filter(tokens.is_not_null())
    inside = calls.filter(pl.col("phase").is_in(metrics.WINDOW_PHASES) & pl.col("sent_ns").is_not_null())
    failed = inside.filter(pl.col("status").is_in(FAILED))
    full = pl.max_horizontal(tokens.fill_null(0), chunks.fill_null(0)) >= (1 - TOLERANCE) * asked
    end = window[1] if window else 0
    done = good.filter(pl.col("end_ns") <= end)
    return Audit(
        n=good.height,
        asked=metrics.total(good.select(asked.alias("asked"))["asked"]),
        reported=metrics.total(reporting["completion_tokens"]),
        n_reporting=reporting.height,
        chunks=metrics.total(reporting.select(chunks.alias("chunks"))["chunks"]),
        n_more_chunks=reporting.filter(chunks > tokens).height,
        completed_tokens=round(metrics.arrived_tokens(done, end)),
        arrived_tokens=metrics.arrived_tokens(inside, end),
        n_failed=failed.height,
        n_failed_full=failed.filter(full).height,
        finish_reasons=_reasons(good),
        n_length_early=good.filter((reason == "length") & early).height,
        n_stop_early=good.filter((reason == "stop") & early).height,
        server=_server_counts(calls, servers or {}),
    )


def _reasons(good: pl.DataFrame) -> dict[str, int]:
    grouped = good.group_by(reason=pl.col("finish_reason").fill_null("none")).len()
    return dict(grouped.sort(["len", "reason"], descending=[True, False]).iter_rows())


def _server_counts(calls: pl.DataFrame, servers: Mapping[str, Any]) -> dict[str, ServerCount]:
    """The servers' own counts beside ours; only what every server of the run tells."""
    sent = calls.filter(pl.col("sent_ns").is_not_null())
    certain, unsure = sent.filter(pl.col("status") == "ok"), sent.filter(pl.col("status") != "ok")
    n_servers = max(1, sent["endpoint"].n_unique())
    found = {}
    for kind, counter, reported, planned in (
        ("prompt", "prompt_tokens", "prompt_tokens", "planned_input_tokens"),
        ("output", "generation_tokens", "completion_tokens", "planned_output_tokens"),
    ):
        counts = [told.get("whole_run", {}).get(counter) for told in servers.values()]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts) >= n_servers and certain[reported].null_count() == 0:
            found[kind] = ServerCount(sum(known), metrics.total(certain[reported]), metrics.total(unsure[planned]))
    return found


def disagreements(found: Audit, ignore_eos: bool | None) -> Iterator[tuple[str, str]]:
    """(kind, sentence) of every disagreement: what differs, which counter is believed, and why."""
    share = found.completed_share
    if share is not None and share < 1 - TOLERANCE:
        yield (
            "completed_counter",
            f"Calls that completed in the window hold only {format_percent(share)} of the output tokens that arrived "
            "in it: counts and rates of completed calls read low. The arrival of tokens is believed: quote the output "
            "tokens/s with what unfinished calls had sent.",
        )
    if found.n_failed_full > TOLERANCE * max(found.n, 1):
        yield (
            "failed_but_full",
            f"{found.n_failed_full:,} of {found.n_failed:,} failed calls had brought at least "
            f"{format_percent(1 - TOLERANCE, 0)} of the tokens asked of them. The tokens are believed: it is the ends "
            "of these streams that fail, not the decoding.",
        )
    if found.n_more_chunks > FEW_CALLS * max(found.n_reporting, 1):
        yield (
            "more_chunks",
            f"{found.n_more_chunks:,} of {found.n_reporting:,} calls brought more output chunks than tokens: "
            f"{found.chunks:,} chunks, {found.reported:,} tokens reported. The chunks are believed, since each holds a "
            "token at least: ITL reads too high and token rates too low.",
        )
    yield from _finish_disagreements(found, ignore_eos)
    for kind, count in found.server.items():
        if not count.agrees:
            yield f"server_{kind}", _server_disagreement(kind, count)


def _finish_disagreements(found: Audit, ignore_eos: bool | None) -> Iterator[tuple[str, str]]:
    if found.n_length_early > FEW_CALLS * found.n:
        yield (
            "length_early",
            f"{found.n_length_early:,} of {found.n:,} calls ended by length with fewer tokens than asked for: the "
            "server has a limit of its own. Its count of tokens is believed.",
        )
    if ignore_eos and found.n_stop_early > FEW_CALLS * found.n:
        yield (
            "stop_early",
            f"{found.n_stop_early:,} of {found.n:,} calls stopped before the length asked for, although the server "
            "took ignore_eos: it does not follow it. Its count of tokens is believed.",
        )
    odd = {reason: n for reason, n in found.finish_reasons.items() if reason not in USUAL_REASONS and reason != "none"}
    if sum(odd.values()) > FEW_CALLS * found.n:
        listed = ", ".join(f"{reason} {n:,}" for reason, n in odd.items())
        yield "finish_reason", f"Calls ended by reasons of no known meaning: {listed}."


def _server_disagreement(kind: str, count: ServerCount) -> str:
    numbers = f"{format_count(count.server)} {kind} tokens over the run, our calls {format_count(count.client)}"
    if count.excess > 0:
        return (
            f"The server counted {numbers}: it served others meanwhile, or counts otherwise. Ours are believed for our "
            "calls; their latencies include the others' load."
        )
    return (
        f"The server counted {numbers}: its counter misses some. The usage of each call is believed, since it came "
        "with the tokens."
    )
