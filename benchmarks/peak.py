"""A command's own peak memory.

The kernel counts what the parent of a process held when it started it as that process's own, so the command is
started by a small one in between.
"""

from __future__ import annotations

import sys

_RUN = """
import resource, subprocess, sys
with open(sys.argv[1], "w") as file:
    code = subprocess.run(sys.argv[2:]).returncode
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


def with_peak(command: list[str], file: str) -> list[str]:
    """The command, to be started so that its peak memory, in KiB, is in `file` when it has ended."""
    return [sys.executable, "-S", "-c", _RUN, file, *command]
