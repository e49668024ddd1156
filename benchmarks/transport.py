"""How fast and how true the client is, beside the floor of the same run.

A truthful deployment (`agentx.echo`) runs in a process of its own. The floor is the least that any
client in Python must do: one asyncio protocol per connection, the HTTP parser in C, and each event's
JSON parsed and counted; no schedule, no times, no record. Both run in turn, several rounds, and the
ratio is taken within a round: the machine is shared and noisy. Other clients are not run here.

    python benchmarks/transport.py            about two minutes
    python benchmarks/transport.py --quick    a few seconds, for the tests
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httptools
import orjson
import uvloop
from peak import with_peak

from agentx.echo import running_echo
from agentx.runs import RunWriter
from agentx.selfcheck import Compared, EchoLoad

S = 10**9
ROOT = Path(__file__).resolve().parent.parent


class FloorConnection(asyncio.Protocol):
    """Sends one request again and again and counts the events that come."""

    def __init__(self, request: bytes, counts: dict[str, int], until: float) -> None:
        self.request = request
        self.counts = counts
        self.until = until
        self.tail = b""
        self.parser = httptools.HttpResponseParser(self)
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.tail += body

    def count(self) -> None:
        """Parse the events of the answer that is whole."""
        for line in self.tail.split(b"\n"):
            if line.startswith(b"data: {"):
                choices = orjson.loads(line[6:])["choices"]
                self.counts["chunks"] += bool(choices and choices[0]["delta"])
        self.tail = b""

    def on_message_complete(self) -> None:
        self.counts["requests"] += 1
        self.count()
        if time.monotonic() < self.until:
            self.transport.write(self.request)
        elif not self.done.done():
            self.transport.close()
            self.done.set_result(None)


async def floor(url: str, load: EchoLoad) -> dict[str, float]:
    """Requests and chunks per second of the bare loop."""
    body = b'{"messages":[{"content":"%s"}],"max_tokens":%d}' % (b" word" * load.input_tokens, load.output_tokens)
    host, port = url.removeprefix("http://").split(":")
    path = f"/echo/{load.ttft_us}/{load.itl_us}/v1/chat/completions"
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    counts = {"requests": 0, "chunks": 0}
    start = time.monotonic()
    until = start + load.duration_ns / S
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: FloorConnection(request, counts, until), host, int(port))
        for _ in range(load.lanes)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in made))
    took = time.monotonic() - start
    return {name: count / took for name, count in counts.items()}


async def ours(url: str, load: EchoLoad) -> dict[str, float]:
    """Requests and chunks per second of agentx with every row written to a run folder."""
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder) / "run", {})
        counts = {"requests": 0, "chunks": 0}

        def record(row) -> None:  # type: ignore[no-untyped-def]
            writer.add(row)
            if row.status == "ok":
                counts["requests"] += 1
                counts["chunks"] += len(row.chunk_ns or ())

        start = time.monotonic()
        await load.driver(url, record).run()
        took = time.monotonic() - start
        writer.finish({"reason": "window"})
    return {name: count / took for name, count in counts.items()}


def paired(name: str, load: EchoLoad, unit: str, rounds: int) -> list[str]:
    """A table row: the floor, agentx, and their ratio round by round."""
    floors, found, ratios = [], [], []
    for _ in range(rounds):
        with running_echo() as url:
            below = uvloop.run(floor(url, load))[unit]
            above = uvloop.run(ours(url, load))[unit]
        floors.append(below)
        found.append(above)
        ratios.append(above / below)
    return [
        name,
        f"{statistics.median(floors):,.0f} {unit}/s",
        f"{statistics.median(found):,.0f} {unit}/s",
        f"{statistics.median(ratios):.0%} ({min(ratios):.0%} to {max(ratios):.0%})",
    ]


def truth(lanes: int, ttft_us: int, itl_us: int, tokens: int, seconds: float) -> list[list[str]]:
    """Table rows of the client's error against what the echo says."""
    load = EchoLoad(lanes, 512, tokens, ttft_us, itl_us, int(seconds * S))

    async def go(url: str) -> Compared:
        compared = Compared(time.monotonic_ns())
        await load.driver(url, lambda row: None, compared).run()
        return compared

    with running_echo() as url:
        budget = uvloop.run(go(url)).budget(load)
    if budget is None:
        return [[f"error at {lanes} lanes", "-", "no call completed", "-"]]
    shape = f"{lanes} lanes, TTFT {ttft_us / 1000:g} ms, ITL {itl_us / 1000:g} ms (n {budget.n:,})"
    return [
        [
            f"TTFT error, {shape}",
            "-",
            f"P50 {budget.ttft_bias_ns / 1e6:.3f} ms",
            f"P99 {budget.ttft_p99_ns / 1e6:.2f} ms",
        ],
        [f"ITL error, {shape}", "-", f"P50 {budget.itl_bias_ns / 1e6:.3f} ms", f"P99 {budget.itl_p99_ns / 1e6:.3f} ms"],
    ]


def whole_command(lanes: int, seconds: int, tries: int) -> list[list[str]]:
    """Table rows of `agentx replay` of `small`: the time to its first request, and the memory of one replay."""
    words = ["replay", "--profile", "small", "--concurrency", str(lanes), "-o", "run"]
    words += ["--no-self-check", "--no-canary", "--start", "none"]
    with running_echo() as url:
        words += ["--url", f"{url}/echo/20000/1000", "--duration"]
        agentx = [sys.executable, "-m", "agentx", *words]
        firsts = sorted(_first_request(["0.1s"], agentx) for _ in range(tries))
        with tempfile.TemporaryDirectory() as folder:
            _first_request([f"{seconds}s"], with_peak(agentx, f"{folder}/peak"))
            peak = int((Path(folder) / "peak").read_text()) / 1024
    shown = f"{statistics.median(firsts):.2f} s"
    return [
        [
            "command to the first requests on the wire, `small`, corpus made and gated",
            "-",
            shown,
            f"{firsts[0]:.2f} to {firsts[-1]:.2f} s in {tries} tries",
        ],
        [f"peak memory, `small`, {lanes} lanes (largest process)", "-", f"{peak:,.0f} MB", "-"],
    ]


def _first_request(more: list[str], command: list[str]) -> float:
    """Seconds from a command's start to its first request, in a folder without a corpus."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic_ns()
        process = subprocess.Popen(
            [*command, *more],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        first = next(time.monotonic_ns() - started for line in process.stderr if "context window" in line)
        process.stderr.read()
        process.wait()
    return first / S


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny loads: shows that it runs, measures nothing")
    quick = parser.parse_args().quick
    rounds, seconds = (1, 0.3) if quick else (3, 5.0)
    lanes = (lambda n: max(2, n // 16)) if quick else (lambda n: n)
    duration = int(seconds * S)
    rows = [
        paired("requests, 64 lanes, 512 in, 1 out", EchoLoad(lanes(64), 512, 1, 0, 0, duration), "requests", rounds),
        paired("chunks in bursts, 64 lanes, 512 out", EchoLoad(lanes(64), 512, 512, 0, 0, duration), "chunks", rounds),
        paired(
            "chunks one by one, 512 lanes, 5 ms apart",
            EchoLoad(lanes(512), 16, 100, 1000, 5000, duration),
            "chunks",
            rounds,
        ),
        *truth(lanes(256), 200_000, 20_000, 16 if quick else 64, 1.5 if quick else 12.0),
        *whole_command(lanes(64), 1 if quick else 10, 1 if quick else 7),
    ]
    print("| what | floor | agentx | ratio or P99 |")
    print("| --- | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
