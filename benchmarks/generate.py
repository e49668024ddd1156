"""Generating a corpus against a straightforward generator, paired in one run; prints Markdown.

    python benchmarks/generate.py [--profile conformance_512k] [--repeats 3] [--quick]

The straightforward generator is one thread that hashes every new block, builds the lists and dumps
the JSON with `json.dump`; the targets are judged against it. It runs once more with `json.dumps`,
which uses the encoder in C and is the quickest of the straightforward ways. Its files are not synced
to the disk, ours are. Every measurement is a process of its own and takes the time of the work alone,
without imports; peak memory counts the helper processes. All ways must give the same bytes: the joined
SHA-256 of the weka files is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from agentx import reference

BASELINES = ("json.dump", "json.dumps")
WAYS = (*BASELINES, "parquet", "weka")
TARGETS = {"parquet": 50.0, "weka": 3.0}
MEMORY_LIMIT_MB = 400


def straightforward(p: reference.Parameters, model: str, folder: Path, one_text: bool) -> None:
    """Write the files that the reference's description asks for, followed word by word."""

    def fitted(triple: tuple[float, float, float]) -> tuple[float, float]:
        mu = math.log(triple[0])
        sigma = ((math.log(triple[1]) - mu) / 1.2816 + (math.log(triple[2]) - mu) / 2.3263) / 2
        return mu, sigma

    def drawn(fit: tuple[float, float], clamp: tuple[float, float]) -> int:
        value = math.exp(fit[0] + fit[1] * rng.gauss(0, 1))
        return int(min(max(value, clamp[0]), clamp[1]))

    isl, osl, delay = fitted(p.isl), fitted(p.osl), fitted(p.delay)
    rng = random.Random(p.seed)
    for i in range(p.sessions):
        requests: list[dict[str, Any]] = []
        ids: list[int] = []
        t = 0.0
        for k in range(rng.choices(p.turn_values, weights=p.turn_weights)[0]):
            tokens_in = drawn(isl, p.isl_clamp)
            tokens_out = drawn(osl, p.osl_clamp)
            total = max(1, tokens_in // p.block_size)
            new = total
            if k > 0:
                u = rng.uniform(*p.cache_hit)
                new = max(1, total - min(len(ids), int(total * u)))
            ids = ids[: total - new]
            for b in range(new):
                digest = hashlib.blake2b(f"{p.seed}:{i}:{k}:{b}".encode(), digest_size=8).digest()
                ids.append(int.from_bytes(digest, "big") & (2**63 - 1))
            think = round(float(drawn(delay, p.delay_clamp)), 2) if k > 0 else 0.0
            t += think
            requests.append(
                {
                    "t": round(t, 3),
                    "type": "n",
                    "model": model,
                    "in": tokens_in,
                    "out": tokens_out,
                    "hash_ids": list(ids),
                    "api_time": 0.0,
                    "think_time": think,
                    "stop": "stop",
                }
            )
        session = {
            "id": hashlib.blake2b(f"{p.id_prefix}-{p.seed}-{i:05d}".encode(), digest_size=18).hexdigest(),
            "models": [model],
            "block_size": p.block_size,
            "hash_id_scope": "local",
            "requests": requests,
        }
        with (folder / f"session_{i:05d}.json").open("w", encoding="utf-8") as file:
            if one_text:
                file.write(json.dumps(session))
            else:
                json.dump(session, file)


def measure(way: str, profile_name: str) -> dict[str, Any]:
    """Seconds, peak memory and digest of one way in this process."""
    from agentx.corpus.export import joined_sha256, write_weka
    from agentx.generate import as_corpus, generate, generate_corpus, generated_profile, reference_parameters
    from agentx.profile import load_profile

    profile = generated_profile(load_profile(profile_name))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = PeakMemory()
        started = time.perf_counter()
        if way in BASELINES:
            straightforward(reference_parameters(profile), profile.model_tag, folder, way == "json.dumps")
        elif way == "parquet":
            generate_corpus(profile, folder / "corpus")
        else:
            write_weka(as_corpus(*generate(profile)), folder)
        seconds = time.perf_counter() - started
        peak_mb = memory.stop()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        digest = joined_sha256(folder) if way != "parquet" else None
    return {"seconds": seconds, "peak_mb": peak_mb, "bytes": size, "digest": digest}


class PeakMemory:
    """Peak memory of this process plus the largest sum seen of its children's own peaks, in MB (Linux)."""

    def __init__(self) -> None:
        self._children_kb = 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
            self._children_kb = max(self._children_kb, sum(map(high_water_kb, children)))

    def stop(self) -> float:
        """The sum in MB."""
        self._done.set()
        self._watcher.join()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + self._children_kb) / 1024


def high_water_kb(pid: str) -> int:
    """Peak resident memory of a process since it started its program; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def in_own_process(way: str, profile: str) -> dict[str, Any]:
    """The measurement of one way in a fresh process."""
    command = [sys.executable, __file__, "--profile", profile, "--way", way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def ratios(rounds: list[dict[str, Any]], base: str, way: str) -> tuple[float, str]:
    """How many times faster `way` is than `base`: the median over the rounds, and it with lowest and highest."""
    found = [round_[base]["seconds"] / round_[way]["seconds"] for round_ in rounds]
    median = statistics.median(found)
    return median, f"{median:.1f} ({min(found):.1f} to {max(found):.1f})"


def compare(profile: str, repeats: int, judge: bool) -> int:
    """Print the table; 1 where a target is missed, else 0."""
    rounds = [{way: in_own_process(way, profile) for way in WAYS} for _ in range(repeats)]
    digests = {round_[way]["digest"] for round_ in rounds for way in (*BASELINES, "weka")}
    if len(digests) != 1:
        print(f"the ways give different bytes: {digests}", file=sys.stderr)
        return 1
    print(f"### Generating `{profile}` (medians of {repeats} paired rounds; joined SHA-256 `{digests.pop()}`)\n")
    print("| way | seconds | times faster than json.dump | than json.dumps | peak MB | bytes on disk |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    missed = []
    for way in WAYS:
        seconds = statistics.median(round_[way]["seconds"] for round_ in rounds)
        peak = max(round_[way]["peak_mb"] for round_ in rounds)
        loose, strict = (ratios(rounds, base, way) for base in BASELINES)
        print(f"| {way} | {seconds:.3f} | {loose[1]} | {strict[1]} | {peak:.0f} | {rounds[0][way]['bytes']:,} |")
        if way in TARGETS and (loose[0] < TARGETS[way] or peak > MEMORY_LIMIT_MB):
            missed.append(way)
    if judge and missed:
        print(f"target missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """The exit code of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="conformance_512k")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="profile small, one round, no targets: for the tests")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.profile)))
        return 0
    if options.quick:
        return compare("small", 1, judge=False)
    return compare(options.profile, options.repeats, judge=True)


if __name__ == "__main__":
    sys.exit(main())
