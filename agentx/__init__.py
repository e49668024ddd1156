"""agentx: agentic LLM traffic, made, proved, replayed and reported."""

__version__ = "0.1.0"
