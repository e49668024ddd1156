"""One lane: the session tree it plays, and where each of its streams stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from agentx.turns import SessionTree
from agentx.units import NS_PER_S

FIRST_BACKOFF_NS = NS_PER_S
"""Wait after a lane's second failure in a row; doubled with each further one."""
LONGEST_BACKOFF_NS = 30 * NS_PER_S


@dataclass(slots=True)
class Progress:
    """Where one stream of a playing tree stands."""

    next_turn: int = 0
    ended_ns: int = 0
    """End of its latest turn."""
    blocked: bool = False
    """Its next turn is reached but waits for subagents."""
    done: bool = False


@dataclass(slots=True)
class Lane:
    """A lane; it has a tree to play, or has nothing left to do."""

    number: int
    drawn: int = 0
    play: int = 0
    tree: SessionTree | None = None
    streams: list[Progress] = field(default_factory=list)
    in_flight: int = 0
    failures: int = 0
    aborted: str = ""
    """Why the rest of the tree is not played; empty while it is."""
    start_turn: int = 0
    """Root turn at which its first session starts."""
    epoch: int = 0
    """Counts trees, so that pending turns of an earlier tree are known as stale."""

    def take_up(self, tree: SessionTree | None, play: int) -> None:
        """Begin with a tree, or with none."""
        self.epoch += 1
        self.aborted = ""
        self.play = play
        self.tree = tree
        self.streams = [] if tree is None else [Progress() for _ in tree.streams]

    @property
    def playing(self) -> SessionTree:
        """The tree of a lane that has one."""
        assert self.tree is not None
        return self.tree

    @property
    def over(self) -> bool:
        """Nothing of its tree is in flight or to come."""
        return self.in_flight == 0 and (bool(self.aborted) or all(progress.done for progress in self.streams))

    def waits(self, stream: int, turn: int) -> bool:
        """True while a subagent that this turn joins is not done."""
        streams = self.playing.streams
        return len(streams) > 1 and any(
            child.parent == stream and child.join_turn == turn and not self.streams[number].done
            for number, child in enumerate(streams)
            if number
        )

    def spawned(self, stream: int, turn: int) -> list[int]:
        """The subagents that the end of this turn starts (ROOT: that begin with the stream), less those done."""
        streams = self.playing.streams
        if len(streams) == 1:
            return []
        return [
            number
            for number, child in enumerate(streams)
            if number and child.parent == stream and child.spawn_turn == turn and not self.streams[number].done
        ]

    def pass_before(self, warmup_turn: int) -> Iterator[tuple[int, int]]:
        """Pass over what lies before the start, (stream, turn) by turn.

        That is root turns, and subagents spawned by them or by the warm-up turn.
        """
        yield from ((0, turn) for turn in range(warmup_turn))
        self.streams[0].next_turn = warmup_turn
        for number, stream in enumerate(self.playing.streams):
            if number == 0:
                continue
            parent_passed = self.streams[stream.parent].done
            if parent_passed or (stream.parent == 0 and stream.spawn_turn <= warmup_turn):
                yield from ((number, turn) for turn in range(stream.n_turns))
                self.streams[number].next_turn = stream.n_turns
                self.streams[number].done = True

    def unplayed(self) -> Iterator[tuple[int, int]]:
        """(stream, turn) of every turn that was not taken."""
        for number, (stream, progress) in enumerate(zip(self.playing.streams, self.streams, strict=True)):
            yield from ((number, turn) for turn in range(progress.next_turn, stream.n_turns))

    def backoff_ns(self) -> int:
        """How much longer it waits after failures in a row."""
        if self.failures < 2:
            return 0
        return min(FIRST_BACKOFF_NS << min(self.failures - 2, 10), LONGEST_BACKOFF_NS)
