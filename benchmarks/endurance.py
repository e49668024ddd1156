"""Ten thousand lanes for a minute: is every planned turn accounted for, and what does it cost?

One `agentx replay` of `small` against the echo deployment in a process of its own, in two shapes: one that
this client can keep up with, and one that asks for far more events than any client in Python can read.
Lost are turns that stand in no row or in two, and calls without an end. Prints Markdown.

    python benchmarks/endurance.py            about five minutes
    python benchmarks/endurance.py --quick    a few seconds, for the tests
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl
from peak import with_peak

from agentx.echo import running_echo
from agentx.report import make_report
from agentx.runs import load_run

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((1_000_000, 250_000), (200_000, 20_000))
"""TTFT and ITL of the echo deployment in microseconds."""


def replay(lanes: int, seconds: int, ttft_us: int, itl_us: int) -> list[str]:
    """A table row for one run."""
    with running_echo() as url, tempfile.TemporaryDirectory() as folder:
        words = [
            "replay",
            "--profile",
            "small",
            "--url",
            f"{url}/echo/{ttft_us}/{itl_us}",
            "--start",
            "none",
            "-o",
            "run",
        ]
        words += ["--concurrency", str(lanes), "--duration", f"{seconds}s", "--no-self-check", "--workers", "1"]
        subprocess.run(
            with_peak([sys.executable, "-m", "agentx", *words], "peak"),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        peak = int((Path(folder) / "peak").read_text()) / 1024
        run = load_run(Path(folder) / "run")
    report = make_report(run)
    calls = run.calls
    sent = calls.filter(pl.col("sent_ns").is_not_null())
    twice = calls.height - calls.select("lane", "play", "session_id", "turn").n_unique()
    gaps = _missing_turns(calls)
    endless = sent["end_ns"].null_count()
    ttft, stall = report.distributions["ttft_ns"], run.manifest["client"]["loop_stall_ns"]
    kinds = pl.concat_str(pl.col("status"), pl.col("error_kind"), separator=" ", ignore_nulls=True)
    counts = dict(sent.group_by(kinds.alias("kind")).len().sort("kind").iter_rows())
    return [
        f"{lanes:,} lanes, {seconds} s, TTFT {ttft_us / 1000:g} ms, ITL {itl_us / 1000:g} ms",
        f"{sent.height:,} ({', '.join(f'{n:,} {kind}' for kind, n in counts.items())})",
        f"{twice + gaps + endless:,}",
        "-" if ttft.p50 is None else f"{ttft.p50 / 1e6:,.0f} ms",
        "-" if stall["p99"] is None else f"{stall['p99'] / 1e6:,.0f} ms",
        f"{peak:,.0f} MB",
    ]


def _missing_turns(calls: pl.DataFrame) -> int:
    """Turns that lack among those of the sessions that were drawn: a stream's turns count from 0 without a gap."""
    streams = calls.group_by("lane", "play", "session_id").agg(n=pl.len(), last=pl.col("turn").max())
    return int((streams["last"] + 1 - streams["n"]).sum())


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few lanes: shows that it runs, measures nothing")
    quick = parser.parse_args().quick
    lanes, seconds = (50, 2) if quick else (10_000, 60)
    print("| load | calls sent | lost | TTFT P50 | loop stall P99 | peak memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for ttft_us, itl_us in SHAPES:
        print(f"| {' | '.join(replay(lanes, seconds, ttft_us, itl_us))} |", flush=True)


if __name__ == "__main__":
    main()
