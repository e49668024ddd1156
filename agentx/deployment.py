"""Deployment files: the constants of a serve, each with its source, as the simulation and the sizing read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from agentx.errors import InputError
from agentx.resources import data_folder
from agentx.yaml12 import Strict, nearest_hint, parse_model, read_yaml


def _integral(value: object) -> object:
    """A whole number written as a float (`1e6`) is that whole number; text and truth values are none."""
    if isinstance(value, bool | str):
        raise ValueError(f"a number is needed, it is {value!r}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_integral), Field(ge=1, le=10**12)]
Positive = Annotated[float, BeforeValidator(_integral), Field(gt=0)]


class Deployment(Strict):
    """A serve in numbers."""

    name: str
    model: str
    description: str = ""
    max_model_len: Count
    """Longest prompt and output together, in tokens."""
    dp: Count
    """Data-parallel lanes: independent replicas of the attention."""
    max_num_seqs: Count
    """In-flight sequence slots of one engine (data-parallel lane)."""
    kv_pool_tokens: Count
    """Tokens that one data-parallel lane's KV pool holds."""
    kv_pool_bytes: Count | None = None
    kv_bytes_per_token: Count
    block_size: Count = 64
    """Tokens in the prefix cache's unit."""
    c0_s: Positive
    """Floor of one request in seconds, from the fit wall = C0 + k * OSL."""
    k_s: Positive
    """Seconds per output token, from the same fit."""
    fit_input_tokens: Count
    """Input length that the fit was measured at: its prefill is part of C0."""
    prefill_tok_s: Positive
    """Prompt tokens per second that the prefill pool computes, taken as one queue."""

    @property
    def slots(self) -> int:
        """In-flight sequences of the whole deployment."""
        return self.max_num_seqs * self.dp

    @property
    def floor_s(self) -> float:
        """The part of C0 that is not the prefill of the fit's own prompt."""
        return self.c0_s - self.fit_input_tokens / self.prefill_tok_s


def deployment_names() -> list[str]:
    """The shipped deployments' names."""
    return sorted(path.stem for path in (data_folder("profiles") / "deployments").glob("*.yaml"))


def load_deployment(name_or_path: str | Path) -> Deployment:
    """The deployment of a shipped name (`mi325x`) or of a YAML file; raises InputError or FaultsError."""
    name = str(name_or_path)
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise InputError(f"deployment {name}: no such file", "check the path")
    else:
        path = data_folder("profiles") / "deployments" / f"{name}.yaml"
        if not path.is_file():
            raise InputError(f"deployment {name!r} is not known", nearest_hint(name, deployment_names(), "deployment"))
    found = parse_model(Deployment, {"name": path.stem, **read_yaml(path)}, str(path))
    if found.floor_s <= 0:
        raise InputError(
            f"{path}: prefill of {found.fit_input_tokens} tokens at {found.prefill_tok_s:g} tokens/s takes "
            f"{found.fit_input_tokens / found.prefill_tok_s:.3g} s, more than c0_s {found.c0_s:g}",
            "raise prefill_tok_s or c0_s",
        )
    return found
