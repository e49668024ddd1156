"""What the simulated deployment counts, under the names of vLLM's `/metrics`.

As in vLLM, a prompt counts when its first token is there, every output token counts when it is there, and
a call whose client went away counts its tokens but is no success.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentx.sim.model import Request, SimModel
from agentx.units import NS_PER_S

# The buckets of vLLM 0.32, in seconds.
_LONG = (2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, *_LONG, 160, 640, 2560)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, *_LONG)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_REASONS = ("stop", "length", "abort", "error")


class Counters:
    """Counters of one server over `model`; all of them are there from the start, at 0."""

    def __init__(self, model: SimModel) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        names = ("model_name", "engine")
        of = (model.deployment.model, "0")

        def counter(metric: str, text: str) -> Counter:
            return Counter(f"vllm:{metric}", text, names, registry=registry).labels(*of)

        def gauge(metric: str, text: str) -> Gauge:
            return Gauge(f"vllm:{metric}", text, names, registry=registry).labels(*of)

        def histogram(metric: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{metric}", text, names, registry=registry, buckets=buckets).labels(*of)

        self._running = gauge("num_requests_running", "Requests that hold a slot.")
        self._waiting = gauge("num_requests_waiting", "Requests that do not decode yet, prefill included.")
        self._usage = gauge("kv_cache_usage_perc", "Part of the KV pools that running requests fill; 1 is all.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens served from the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._generation = counter("generation_tokens", "Output tokens.")
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Time between output tokens.", _ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "Time of finished requests.", _E2E)
        success = Counter("vllm:request_success", "Finished requests.", (*names, "finished_reason"), registry=registry)
        self._success = {reason: success.labels(*of, reason) for reason in _REASONS}
        config = {
            "block_size": str(model.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            "num_gpu_blocks": str(model.cache.capacity),
        }
        info = Gauge("vllm:cache_config_info", "The prefix cache.", tuple(config), registry=registry)
        info.labels(**config).set(1)

    def first_token(self, request: Request, arrived_ns: int) -> None:
        """The first token is there, and with it the prompt is done."""
        assert request.first_token_ns is not None
        self._prompt.inc(request.input_tokens)
        self._queries.inc(request.input_tokens)
        self._hits.inc(request.cached_tokens)
        self._generation.inc()
        self._ttft.observe((request.first_token_ns - arrived_ns) / NS_PER_S)

    def next_token(self) -> None:
        """One more token is there."""
        self._generation.inc()
        self._itl.observe(self._model.k_ns / NS_PER_S)

    def finished(self, request: Request, arrived_ns: int) -> None:
        """The last token is there."""
        assert request.end_ns is not None
        self._e2e.observe((request.end_ns - arrived_ns) / NS_PER_S)
        self._success["length"].inc()

    def exposition(self, now_ns: int) -> bytes:
        """The Prometheus text of this moment."""
        self._running.set(len(self._model.running))
        self._waiting.set(self._model.waiting)
        self._usage.set(self._model.kv_usage(now_ns))
        return generate_latest(self._registry)
