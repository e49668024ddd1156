"""Block ids of generated sessions, hashed by several processes.

Hashing is nearly all the work of writing a generated corpus out, and one Python process hashes on one
core. The workers run `digests.py` alone: they read their share as JSON and answer with digests in an
agreed order, so which process hashes what changes nothing in the result. They are not
`multiprocessing`, so a script that calls agentx needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from agentx import digests, reference
from agentx.errors import AgentxError

if TYPE_CHECKING:
    from agentx.turns import BlockIds

WORTH_IT = 300_000
"""Blocks below which one process is as fast: a tenth of a second of hashing."""
MOST_WORKERS = 4
"""Bounds the processes on large machines: beyond, rendering the text is the limit."""
_AHEAD = 2
"""Sessions read ahead of each worker."""

Counts = Sequence[tuple[int, Sequence[int]]]
"""Per session: its index in the corpus and the number of new blocks of each turn."""


def new_ids(seed: int, counts: Counts, workers: int | None = None) -> Iterator[list[BlockIds]]:
    """Per session, the new ids of each turn; in processes of their own where that is faster.

    `workers` overrides how many; fewer than 2 hash in this process.
    """
    if workers is None:
        workers = min(_cores(), MOST_WORKERS) if sum(sum(turns) for _, turns in counts) >= WORTH_IT else 1
    if workers < 2 or not sys.executable or not Path(digests.__file__).is_file():
        for session, turns in counts:
            yield [reference.new_block_ids(seed, session, turn, count) for turn, count in enumerate(turns)]
        return
    with ExitStack() as stack:
        processes = [_start(stack, seed, counts[number::workers]) for number in range(workers)]
        # A reader per process, so that each one's answers are read in order and none has to wait.
        readers = [stack.enter_context(ThreadPoolExecutor(1)) for _ in processes]
        ahead = workers * _AHEAD
        waiting: deque[Future[bytes]] = deque()
        for place in range(len(counts) + ahead):
            if place < len(counts):
                size = digests.DIGEST_BYTES * sum(counts[place][1])
                waiting.append(readers[place % workers].submit(_read, processes[place % workers], size))
            if ahead <= place:
                yield _split(waiting.popleft().result(), counts[place - ahead][1])


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(stack: ExitStack, seed: int, counts: Counts) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", digests.__file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(_stop, process)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"seed": seed, "counts": list(counts)}).encode())
    process.stdin.close()
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.stdout is not None
    process.stdout.close()
    process.wait()


def _read(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    data = process.stdout.read(size)
    if len(data) < size:
        raise AgentxError(f"a hashing process ended early, exit code {process.wait()}", "run it again")
    return data


def _split(answer: bytes, turns: Sequence[int]) -> list[BlockIds]:
    view = memoryview(answer)
    ends = accumulate((digests.DIGEST_BYTES * count for count in turns), initial=0)
    return [reference.digests_to_ids(view[start:end]) for start, end in pairwise(ends)]
