"""agentx: agentic LLM traffic, made, proved, replayed and reported.

The pipeline as functions; each is documented where it lives and imported on first use:

    load_profile -> generate_corpus -> run_gate -> replay_sim or replay_live -> make_report
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agentx.corpus import Corpus, export_weka, load_corpus
    from agentx.deployment import load_deployment
    from agentx.errors import AgentxError
    from agentx.gate import run_gate
    from agentx.generate import generate_corpus
    from agentx.profile import load_profile
    from agentx.replay import ReplayOptions, replay_sim
    from agentx.replay_live import replay_live
    from agentx.report import make_report, write_report
    from agentx.runs import Run, load_run
    from agentx.target import LiveTarget

_HOMES = {
    "AgentxError": "errors",
    "Corpus": "corpus",
    "LiveTarget": "target",
    "ReplayOptions": "replay",
    "Run": "runs",
    "export_weka": "corpus",
    "generate_corpus": "generate",
    "load_corpus": "corpus",
    "load_deployment": "deployment",
    "load_profile": "profile",
    "load_run": "runs",
    "make_report": "report",
    "replay_live": "replay_live",
    "replay_sim": "replay",
    "run_gate": "gate",
    "write_report": "report",
}

__all__ = [
    "AgentxError",
    "Corpus",
    "LiveTarget",
    "ReplayOptions",
    "Run",
    "export_weka",
    "generate_corpus",
    "load_corpus",
    "load_deployment",
    "load_profile",
    "load_run",
    "make_report",
    "replay_live",
    "replay_sim",
    "run_gate",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """A public function or class, imported from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'agentx' has no attribute {name!r}")
    return getattr(import_module(f"agentx.{_HOMES[name]}"), name)
