"""File descriptors: enough for every lane's connections, or a clear refusal before the start."""

from __future__ import annotations

import resource

from agentx.corpus import Sessions
from agentx.errors import InputError

RESERVE = 64
"""Descriptors for everything that is no connection: files, libraries, the loop."""


def connections_per_lane(sessions: Sessions) -> int:
    """Connections to have room for: the root's, and as many again where sessions have subagents."""
    return 1 if sessions.turns.table["parent_session_id"].null_count == sessions.turns.table.num_rows else 2


def make_room(connections: int) -> None:
    """Raise the soft limit to what so many connections need.

    Raises InputError, with both numbers, where the hard limit is below that.
    """
    needed = connections + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"{connections} connections need {needed} file descriptors, this process may have {hard}",
            f"raise the limit (ulimit -Hn {needed}), or use fewer lanes",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
