"""Requests per second of other clients that are installed, beside agentx, in one run on one machine.

Each drives 64 calls at once of 512 tokens in and 1 out against the echo deployment (`agentx.echo`) in a
process of its own, with streaming and every record kept, as its command does by default; the figure is
what the client itself reports. A client that is not found is left out. Prints Markdown.

    python benchmarks/peers.py [--bin FOLDER]     FOLDER holds `aiperf` and `guidellm`; else they come from PATH
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import uvloop
from transport import ours

from agentx.echo import running_echo
from agentx.engines.tiny import tiny_folder
from agentx.selfcheck import EchoLoad

LANES, INPUT, SECONDS = 64, 512, 10
LIMIT_S = 240.0


def command(program: str, url: str, out: Path) -> list[str]:
    """The command line of a client for this load."""
    if program.endswith("aiperf"):
        words = f"profile -m echo --url {url} --endpoint-type chat --streaming --concurrency {LANES}"
        words += " --request-count 4000"
        words += f" --synthetic-input-tokens-mean {INPUT} --synthetic-input-tokens-stddev 0 --output-tokens-mean 1"
        words += f" --tokenizer {tiny_folder()} --ui none --artifact-dir {out}"
    else:
        words = f"run --backend kind=openai_http,target={url},model=echo --profile kind=concurrent,streams={LANES}"
        words += f" --constraint kind=max_duration,seconds={SECONDS} --disable-console"
        words += f" --data kind=synthetic_text,prompt_tokens={INPUT},output_tokens=1"
        words += f" --tokenizer kind=hf_auto,model={tiny_folder()} --output kind=json,path={out}/report.json"
    return [program, *words.split()]


def reported(program: str, out: Path) -> float:
    """Requests per second as the client reports them."""
    if program.endswith("aiperf"):
        made = json.loads((out / "profile_export_aiperf.json").read_text(encoding="utf-8"))
        return float(made["request_throughput"]["avg"])
    made = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return float(made["benchmarks"][0]["metrics"]["requests_per_second"]["successful"]["mean"])


def measure(program: str) -> float:
    """Requests per second of one client."""
    with running_echo() as url, tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            command(program, url, Path(folder)),
            check=True,
            capture_output=True,
            timeout=LIMIT_S,
            cwd=folder,
            env={**os.environ, **({} if program.endswith("aiperf") else {"HF_HUB_OFFLINE": "1"})},
        )
        return reported(program, Path(folder))


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default=None, help="folder of the other clients")
    where = parser.parse_args().bin
    with running_echo() as url:
        mine = uvloop.run(ours(url, EchoLoad(LANES, INPUT, 1, 0, 0, SECONDS * 10**9)))["requests"]
    print("| client | requests/s | agentx is |")
    print("| --- | ---: | ---: |")
    print(f"| agentx | {mine:,.0f} | |")
    for name in ("aiperf", "guidellm"):
        program = shutil.which(name, path=where)
        if program is not None:
            rate = measure(program)
            print(f"| {name} | {rate:,.0f} | {mine / rate:.0f} times faster |", flush=True)


if __name__ == "__main__":
    main()
