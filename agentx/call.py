"""One planned turn on its way: what the lanes hand to a driver, and its row of the run table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentx.turns import ROOT, CallRow, SessionTree


@dataclass(frozen=True, slots=True)
class Call:
    """One turn that a lane sends."""

    lane: int
    play: int
    tree: SessionTree
    stream: int
    turn: int
    phase: str
    due_ns: int

    @property
    def session_id(self) -> str:
        """The id of the stream this turn belongs to."""
        return self.tree.streams[self.stream].session_id

    @property
    def input_tokens(self) -> int:
        """Planned prompt length."""
        return int(self.tree.streams[self.stream].input_tokens[self.turn])

    @property
    def output_tokens(self) -> int:
        """Planned output length, as in the corpus (0 occurs)."""
        return int(self.tree.streams[self.stream].output_tokens[self.turn])

    @property
    def model(self) -> str:
        """The recorded model of this turn."""
        return self.tree.streams[self.stream].models[self.turn]

    def row(self, status: str, phase: str | None = None, **observed: Any) -> CallRow:
        """The run-table row of this turn with what was observed of it; the phase is the call's where not given."""
        row = planned_row(self.tree, self.stream, self.turn, self.play, self.lane, status, phase or self.phase)
        row.due_ns = self.due_ns
        for name, value in observed.items():
            setattr(row, name, value)
        return row


def planned_row(
    tree: SessionTree,
    stream: int,
    turn: int,
    play: int,
    lane: int,
    status: str,
    phase: str,
    error_kind: str | None = None,
) -> CallRow:
    """The run-table row of a planned turn, with the columns that the corpus gives."""
    source = tree.streams[stream]
    row = CallRow(
        source.session_id,
        turn,
        play,
        lane,
        None if source.parent == ROOT else tree.streams[source.parent].session_id,
        tree.session_id,
        phase,
        status,
        error_kind,
    )
    row.planned_input_tokens = int(source.input_tokens[turn])
    row.planned_output_tokens = int(source.output_tokens[turn])
    row.think_ns = int(source.think_ns[turn])
    return row
