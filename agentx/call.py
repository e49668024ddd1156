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

    def row(self, status: str, **observed: Any) -> CallRow:
        """The run-table row of this turn with what was observed of it; the phase is the call's where not given."""
        observed.setdefault("phase", self.phase)
        return CallRow(
            **planned_columns(self.tree, self.stream, self.turn),
            play=self.play,
            lane=self.lane,
            status=status,
            due_ns=self.due_ns,
            **observed,
        )


def planned_row(
    tree: SessionTree, stream: int, turn: int, play: int, lane: int, status: str, **observed: Any
) -> CallRow:
    """The run-table row of a planned turn; `observed` are further columns."""
    return CallRow(**planned_columns(tree, stream, turn), play=play, lane=lane, status=status, **observed)


def planned_columns(tree: SessionTree, stream: int, turn: int) -> dict[str, Any]:
    """The columns of the run table that the corpus gives."""
    source = tree.streams[stream]
    return {
        "session_id": source.session_id,
        "turn": turn,
        "parent_session_id": None if source.parent == ROOT else tree.streams[source.parent].session_id,
        "root_session_id": tree.session_id,
        "planned_input_tokens": int(source.input_tokens[turn]),
        "planned_output_tokens": int(source.output_tokens[turn]),
        "think_ns": int(source.think_ns[turn]),
    }
