"""The one row that flows through agentx: the planned turn, and the same turn as it was observed.

A corpus is a table of planned turns (`CORPUS_SCHEMA`), sorted by session, stream and turn. A
*stream* is a sequence of turns that follow each other: the root of a session, or one of its
subagents. A *session tree* is a root stream with every subagent below it. A run is the same turns
with the columns of what was observed (`CALLS_SCHEMA`).

Times are int64 nanoseconds, lengths are tokens, block ids are unsigned 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BlockIds = npt.NDArray[np.uint64]

ROOT = -1
"""`parent`, `spawn_turn` or `join_turn` of a stream that has none."""

CORPUS_SCHEMA = pa.schema(
    [
        # Which turn: session_id is the stream's own id, root_session_id the id of its tree.
        pa.field("root_session_id", pa.string(), nullable=False),
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("parent_session_id", pa.string()),
        pa.field("turn", pa.int32(), nullable=False),
        # Place of a subagent stream in its parent: the parent turn whose end starts it (-1: the
        # parent's start), the parent turn that waits for it (-1: none, it runs in the background).
        pa.field("spawn_turn", pa.int32(), nullable=False),
        pa.field("join_turn", pa.int32(), nullable=False),
        # The recorded start since the session's start and the recorded service time.
        pa.field("t_ns", pa.int64(), nullable=False),
        pa.field("api_ns", pa.int64(), nullable=False),
        # The pause before this turn: after the previous turn's end; for a subagent's first turn
        # after its spawn.
        pa.field("think_ns", pa.int64(), nullable=False),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("model", pa.string()),
        # Block ids of the prompt: the first keep_blocks ids of the stream's previous turn, then
        # new_blocks more, either listed in new_ids or, where that is null, made by the manifest's
        # id rule.
        pa.field("keep_blocks", pa.int32(), nullable=False),
        pa.field("new_blocks", pa.int32(), nullable=False),
        pa.field("new_ids", pa.list_(pa.uint64())),
    ]
)


@dataclass(frozen=True, slots=True)
class Stream:
    """A sequence of turns in one session tree; the arrays have one element per turn."""

    session_id: str
    parent: int
    """Position of the parent stream in the tree's `streams`; ROOT for the root."""
    spawn_turn: int
    join_turn: int
    think_ns: Sequence[int]
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    models: Sequence[str]
    keep_blocks: Sequence[int]
    new_ids: Sequence[BlockIds]
    """Per turn: the ids that follow the kept ones."""

    @property
    def n_turns(self) -> int:
        """Number of turns."""
        return len(self.input_tokens)

    def block_ids(self) -> Iterator[BlockIds]:
        """The full block ids of each turn, front to back."""
        previous: BlockIds = np.empty(0, dtype=np.uint64)
        for keep, new in zip(self.keep_blocks, self.new_ids, strict=True):
            previous = np.concatenate((previous[:keep], new))
            yield previous


@dataclass(frozen=True, slots=True)
class SessionTree:
    """A root stream and every subagent below it; `streams[0]` is the root, parents come first."""

    session_id: str
    index: int
    """Position in the corpus, from 0."""
    streams: tuple[Stream, ...]

    @property
    def n_turns(self) -> int:
        """Turns of all streams."""
        return sum(stream.n_turns for stream in self.streams)

    def peak_tokens(self) -> int:
        """Largest input + max(output, 1) of any turn: what the served window must hold."""
        return max(
            tokens_in + max(tokens_out, 1)
            for stream in self.streams
            for tokens_in, tokens_out in zip(stream.input_tokens, stream.output_tokens, strict=True)
        )


CALLS_SCHEMA = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("play", pa.int32(), nullable=False),
        pa.field("lane", pa.int32(), nullable=False),
        pa.field("parent_session_id", pa.string()),
        pa.field("root_session_id", pa.string(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error_kind", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("http_status", pa.int32()),
        pa.field("planned_input_tokens", pa.int32(), nullable=False),
        pa.field("planned_output_tokens", pa.int32(), nullable=False),
        pa.field("think_ns", pa.int64(), nullable=False),
        pa.field("due_ns", pa.int64()),
        pa.field("sent_ns", pa.int64()),
        pa.field("uploaded_ns", pa.int64()),
        pa.field("headers_ns", pa.int64()),
        pa.field("first_token_ns", pa.int64()),
        pa.field("first_content_ns", pa.int64()),
        pa.field("last_token_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        pa.field("chunk_ns", pa.list_(pa.int64())),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("reasoning_tokens", pa.int32()),
        pa.field("finish_reason", pa.string()),
        pa.field("response_model", pa.string()),
        pa.field("ceiling_cached_tokens", pa.int32()),
        pa.field("endpoint", pa.string()),
        # Beyond the contract: what the transport did for this call.
        pa.field("connection_reused", pa.bool_()),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("last_sent_ns", pa.int64()),
        pa.field("content_encoding", pa.string()),
    ]
)

PHASES = ("warmup", "measure", "drain")
STATUSES = ("ok", "error", "truncated", "empty", "cancelled", "overflow", "skipped")
FAILED = ("error", "truncated", "empty")
"""What the error rate counts; a refusal for the context is `overflow`, what we cut is `cancelled`."""


@dataclass(slots=True)
class CallRow:
    """One planned turn and what became of it: a row of the run table, in the schema's order."""

    session_id: str
    turn: int
    play: int
    lane: int
    """-1 for a turn dropped before any lane reached it."""
    parent_session_id: str | None
    root_session_id: str
    phase: str
    status: str
    error_kind: str | None = None
    error_message: str | None = None
    http_status: int | None = None
    planned_input_tokens: int = 0
    planned_output_tokens: int = 0
    think_ns: int = 0
    due_ns: int | None = None
    sent_ns: int | None = None
    uploaded_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    first_content_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None
    chunk_ns: list[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | None = None
    response_model: str | None = None
    ceiling_cached_tokens: int | None = None
    endpoint: str | None = None
    connection_reused: bool | None = None
    attempts: int = 0
    last_sent_ns: int | None = None
    content_encoding: str | None = None


_values = attrgetter(*(field.name for field in fields(CallRow)))


def calls_batch(rows: Sequence[CallRow]) -> pa.RecordBatch:
    """The rows as one Arrow batch in CALLS_SCHEMA."""
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=CALLS_SCHEMA)
    columns = zip(*map(_values, rows), strict=True)
    arrays: list[pa.Array[Any]] = [
        pa.array(column, type=field.type) for column, field in zip(columns, CALLS_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=CALLS_SCHEMA)
