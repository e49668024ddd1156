"""A serve as a few queues: what the seed's law and limits say, and nothing more.

A request passes four stations. *Prefill*: one first-come-first-served queue that computes the prompt
tokens its prefix cache does not hold, at the pool's token rate. *Floor*: a fixed time (transfer and
the all-to-all). *Slot*: one of max_num_seqs x dp in-flight slots, first come first served. *Decode*:
k per output token. For one request alone, wall = input / rate + floor + k * output, which is the
published fit C0 + k * OSL at the fit's input length.

Why one prefill queue and not one per data-parallel lane: an eighth of the pool's rate would take 1.9 s
for the fit's 1024 tokens, longer than C0 itself; wide expert parallelism couples the lanes. The seed's
Table 3 agrees: a line through its TTFT P99 over concurrency meets the axis at 1.03 s, and C0 + k is 1.04 s.
Why one cache: the seed's cache hits of `small` at 16 lanes (36 and 37 %) are those of one cache that all
lanes share, where lanes with a cache each would lose the turns that land elsewhere.

The prefix cache holds as many blocks as the KV pools of all lanes, least recently used out first, and
serves a leading run of blocks, never the last token. Left out for now: chunked prefill, prefill that
slows down with context, routing, KV admission and preemption, decode that slows down with batch and
context. So ITL stays at k where a real serve's grows (the seed: 98 ms at 16 lanes of `small`, 523 ms
at 244K tokens), and one prefill rate serves all lengths.

The model keeps no clock: the caller says what time it is. Times are nanoseconds.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum

import numpy as np

from agentx.deployment import Deployment
from agentx.prefix import mix, salt_of
from agentx.turns import BlockIds
from agentx.units import seconds_to_ns

_PLACE = salt_of("place of a block in a prompt")
_PREFIX = salt_of("a prefix of blocks")


@dataclass(slots=True, eq=False)
class Request:
    """One request in the model; the times are filled in as it passes."""

    keys: list[int]
    """A key per full block, front to back, that stands for the block and everything before it."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    first_token_ns: int | None = None
    end_ns: int | None = None
    """Time of its last token, known once it is decoding."""


class Event(Enum):
    """What `advance` tells."""

    DECODING = "decoding"
    """First token and end are known from here on."""
    FINISHED = "finished"


class _Station(Enum):
    PREFILLED = 1
    READY = 2
    DONE = 3


def prefix_keys(keys: BlockIds) -> list[int]:
    """Keys of all prefixes of a prompt from the content keys of its blocks, shortest prefix first.

    A block's KV depends on all that comes before it, so the same content behind another prefix is
    another block. A prefix's key is the sum of its blocks' content keys, each mixed with its place.
    """
    places = mix(np.arange(len(keys), dtype=np.uint64), _PLACE)
    sums: list[int] = np.cumsum(mix(keys ^ places, _PREFIX), dtype=np.uint64).tolist()
    return sums


class BlockCache:
    """A prefix cache of bounded size, least recently used out first."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def leading(self, keys: list[int]) -> int:
        """Blocks of the leading run that is held."""
        count = 0
        for key in keys:
            if key not in self._held:
                break
            count += 1
        return count

    def keep(self, keys: list[int]) -> None:
        """Hold these blocks; the front ones count as used last, so that a prompt is lost from its end."""
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self.capacity:
            self._held.popitem(last=False)


class SimModel:
    """The serve of one deployment file; `block_size` is the cache's unit in tokens."""

    def __init__(self, deployment: Deployment, block_size: int) -> None:
        self.deployment = deployment
        self.block_size = block_size
        self.cache = BlockCache(deployment.kv_pool_tokens * deployment.dp // block_size)
        self._floor_ns = seconds_to_ns(deployment.floor_s)
        self._k_ns = seconds_to_ns(deployment.k_s)
        self._present: dict[Request, None] = {}
        """Requests that are neither finished nor cancelled."""
        self._queue: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._ready: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        """Requests that hold a slot."""
        self._events: list[tuple[int, int, _Station, Request]] = []
        self._count = 0

    @property
    def waiting(self) -> int:
        """Requests that are not decoding yet: in the queue, in prefill, on their way, or without a slot."""
        return len(self._present) - len(self.running)

    @property
    def k_ns(self) -> int:
        """Time of one output token."""
        return self._k_ns

    def kv_usage(self, now_ns: int) -> float:
        """Part of the KV pools that running requests fill, prompts and what they have put out so far."""
        held = 0
        for request in self.running:
            assert request.first_token_ns is not None
            done = (now_ns - request.first_token_ns) // self._k_ns + 1
            held += request.input_tokens + min(max(done, 0), request.output_tokens)
        return held / (self.deployment.kv_pool_tokens * self.deployment.dp)

    def refusal(self, input_tokens: int, output_tokens: int) -> str | None:
        """Why a request of these lengths is refused; None where it is taken."""
        limit = self.deployment.max_model_len
        if input_tokens + output_tokens <= limit:
            return None
        return (
            f"This model's maximum context length is {limit} tokens. However, you requested {output_tokens} output "
            f"tokens and your prompt contains {input_tokens} input tokens."
        )

    def submit(self, now_ns: int, request: Request) -> None:
        """A request arrives."""
        self._present[request] = None
        self._queue.append(request)
        self._start_prefill(now_ns)

    def cancel(self, now_ns: int, request: Request) -> list[tuple[Event, Request]]:
        """The client went away; what its slot, now free, lets happen. A prefill under way is finished first."""
        if request not in self._present:
            return []
        del self._present[request]
        if request in self.running:
            del self.running[request]
            return self._admit(now_ns)
        for line in (self._queue, self._ready):
            if request in line:
                line.remove(request)
        return []

    def next_event_ns(self) -> int | None:
        """When something happens next; None while nothing is under way."""
        return self._events[0][0] if self._events else None

    def advance(self, now_ns: int) -> list[tuple[Event, Request]]:
        """Let everything happen that is due by `now_ns`; what came of it, in order."""
        happened: list[tuple[Event, Request]] = []
        while self._events and self._events[0][0] <= now_ns:
            time_ns, _, station, request = heapq.heappop(self._events)
            if station is _Station.PREFILLED:
                self.cache.keep(request.keys)
                self._prefilling = None
                self._at(time_ns + self._floor_ns, _Station.READY, request)
                self._start_prefill(time_ns)
            elif request not in self._present:
                continue
            elif station is _Station.READY:
                self._ready.append(request)
                happened += self._admit(time_ns)
            else:
                del self._present[request]
                del self.running[request]
                happened.append((Event.FINISHED, request))
                happened += self._admit(time_ns)
        return happened

    def _start_prefill(self, now_ns: int) -> None:
        if self._prefilling is not None or not self._queue:
            return
        request = self._prefilling = self._queue.popleft()
        most = (request.input_tokens - 1) // self.block_size
        request.cached_tokens = min(self.cache.leading(request.keys), most) * self.block_size
        todo = request.input_tokens - request.cached_tokens
        self._at(now_ns + seconds_to_ns(todo / self.deployment.prefill_tok_s), _Station.PREFILLED, request)

    def _admit(self, now_ns: int) -> list[tuple[Event, Request]]:
        admitted = []
        while self._ready and len(self.running) < self.deployment.slots:
            request = self._ready.popleft()
            self.running[request] = None
            request.first_token_ns = now_ns + self._k_ns
            request.end_ns = now_ns + self._k_ns * request.output_tokens
            self._at(request.end_ns, _Station.DONE, request)
            admitted.append((Event.DECODING, request))
        return admitted

    def _at(self, time_ns: int, station: _Station, request: Request) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_ns, self._count, station, request))
