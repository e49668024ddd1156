"""The client's own error: lanes against a deployment that says when it sent each event.

The run's own lanes, client and parser replay short calls against the echo deployment in another
process of this machine. What the client stamps minus what the echo says is the error of a figure:
its median is a bias, its P99 a budget (of fewer than a hundred calls, the worst). Two seconds before the
window tell what two seconds can: how this client does on this machine, now, with so many lanes and such prompts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agentx.answers import Answer
from agentx.echo import running_echo
from agentx.endpoint import Endpoint
from agentx.exchange import Exchange
from agentx.http import HttpClient
from agentx.lanes import Lanes, LaneSettings
from agentx.live import LiveDriver, LiveSettings
from agentx.prefix import CeilingTracker, PlayBlocks
from agentx.prompts import Filler, PromptBuilder
from agentx.redact import Redactor
from agentx.sse import StreamFacts
from agentx.stats import tail
from agentx.tokens import common_words
from agentx.turns import ROOT, CallRow, SessionTree, Stream
from agentx.units import NS_PER_S

CHECK_NS = 2 * NS_PER_S
TTFT_US = 50_000
ITL_US = 20_000
TOKENS = 16
"""A call of the check takes 350 ms: enough of them fit into two seconds, and none is back to back."""
BLOCK = 64
TURNS = 100

_STAMP = re.compile(rb'"sent_ns":"(\d+)"')


@dataclass(frozen=True, slots=True)
class ClientBudget:
    """The error of this client's TTFT and ITL, in nanoseconds."""

    n: int
    """Calls that were compared."""
    lanes: int
    input_tokens: int
    ttft_bias_ns: float
    """Median error."""
    ttft_p99_ns: float
    """Largest but for one in a hundred; the largest of fewer than a hundred calls."""
    itl_bias_ns: float
    itl_p99_ns: float

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(slots=True)
class Compared:
    """Arrivals by our clock against sending times by the echo's, call by call."""

    origin_ns: int
    ttft: list[int] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    def add(self, facts: StreamFacts, sent: list[int]) -> None:
        """Compare one call; one of another number of events than were sent is not."""
        came = [chunk + self.origin_ns for chunk in facts.chunk_ns]
        if len(came) != len(sent) or len(came) < 2:
            return
        self.ttft.append(came[0] - sent[0])
        self.itl.append(((came[-1] - came[0]) - (sent[-1] - sent[0])) / (len(came) - 1))

    @classmethod
    def joined(cls, parts: Sequence[Compared]) -> Compared:
        """What several clients compared."""
        return cls(
            min((part.origin_ns for part in parts), default=0),
            [error for part in parts for error in part.ttft],
            [error for part in parts for error in part.itl],
        )

    def budget(self, load: EchoLoad) -> ClientBudget | None:
        """The errors in a few numbers; None where nothing was compared."""
        if not self.ttft:
            return None
        ttft, itl = np.array(self.ttft, dtype=np.float64), np.array(self.itl)
        return ClientBudget(
            n=len(ttft),
            lanes=load.lanes,
            input_tokens=load.input_tokens,
            ttft_bias_ns=float(np.median(ttft)),
            ttft_p99_ns=tail(np.abs(ttft)),
            itl_bias_ns=float(np.median(itl)),
            itl_p99_ns=tail(np.abs(itl)),
        )


class _StampedAnswer(Answer):
    """An answer that also keeps what the echo says of its events."""

    def __init__(self, compared: Compared) -> None:
        super().__init__()
        self._compared = compared
        self._sent: list[int] = []

    def take(self, exchange: Exchange) -> None:
        self._sent += [int(stamp) for _, data in exchange.reads for stamp in _STAMP.findall(data)]
        super().take(exchange)

    def finish(self, exchange: Exchange) -> StreamFacts:
        facts = super().finish(exchange)
        if exchange.error_kind is None:
            self._compared.add(facts, self._sent)
        return facts


@dataclass(frozen=True, slots=True)
class EchoLoad:
    """Lanes that send calls of one shape to an echo deployment, back to back."""

    lanes: int
    input_tokens: int
    output_tokens: int
    ttft_us: int
    itl_us: int
    duration_ns: int

    def driver(self, url: str, record: Callable[[CallRow], None], compared: Compared | None = None) -> LiveDriver:
        """The live driver of this load against the echo at `url`; errors go to `compared`."""
        origin = time.monotonic_ns() if compared is None else compared.origin_ns
        endpoint = Endpoint.parse(f"{url}/echo/{self.ttft_us}/{self.itl_us}")
        settings = LaneSettings(self.lanes, self.duration_ns, 0, ramp_ns=self.duration_ns // 4)
        return LiveDriver(
            Lanes(_sessions(self.input_tokens, self.output_tokens), settings, record),
            [HttpClient(endpoint, lambda: time.monotonic_ns() - origin)],
            PromptBuilder(Filler(common_words()), model="echo", endpoint="chat", block_size=BLOCK),
            lambda tree, play: PlayBlocks(tree, play, block_size=BLOCK, scope="local", nonce="check", cache_bust=True),
            CeilingTracker(BLOCK, BLOCK),
            record,
            LiveSettings(grace_ns=NS_PER_S),
            redact=Redactor(),
            answer=Answer if compared is None else lambda: _StampedAnswer(compared),
        )


def check_load(lanes: int, input_tokens: int, check_ns: int = CHECK_NS) -> EchoLoad:
    """What a client is checked with: so many lanes, and prompts of this length."""
    return EchoLoad(lanes, input_tokens, TOKENS, TTFT_US, ITL_US, check_ns)


async def check_client(lanes: int, input_tokens: int, check_ns: int = CHECK_NS) -> ClientBudget | None:
    """The budget of this client with so many lanes and prompts of this length; None where no call completed.

    Raises DeploymentError where the echo deployment cannot be started.
    """
    load = check_load(lanes, input_tokens, check_ns)
    with running_echo() as url:
        compared = Compared(time.monotonic_ns())
        await load.driver(url, lambda row: None, compared).run()
    return compared.budget(load)


def _sessions(input_tokens: int, output_tokens: int) -> list[SessionTree]:
    """One long session; every lane plays it."""
    blocks = -(-input_tokens // BLOCK)
    ids: npt.NDArray[np.uint64] = np.arange(blocks, dtype=np.uint64)
    none: npt.NDArray[np.uint64] = ids[:0]
    stream = Stream(
        "check",
        ROOT,
        ROOT,
        ROOT,
        think_ns=[0] * TURNS,
        input_tokens=[input_tokens] * TURNS,
        output_tokens=[output_tokens] * TURNS,
        models=["echo"] * TURNS,
        keep_blocks=[0] + [blocks] * (TURNS - 1),
        new_ids=[ids] + [none] * (TURNS - 1),
    )
    return [SessionTree("check", 0, (stream,))]
