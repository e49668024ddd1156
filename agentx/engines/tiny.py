"""A real engine that runs anywhere: llama.cpp's own HTTP server with a tiny model of random weights.

It says nothing sensible, but it schedules, caches and streams as it does for any model: what a client
measures against it is real. The model is a two-layer Qwen2 of vocabulary 8192 with a byte-level
tokenizer trained on the standard library's sources. It is made once and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from agentx import store
from agentx.errors import DeploymentError, InputError

MODEL_NAME = "tiny"
VERSION = 1
"""Part of the cached model's name: raise it when the recipe changes."""

VOCABULARY = 8192
HIDDEN = 64
FEED_FORWARD = 128
LAYERS = 2
HEADS = 2
KV_HEADS = 1
HEAD_SIZE = 32
CONTEXT = 131072
DEVIATION = 0.02
SEED = 20261201
TRAINING_BYTES = 3_000_000
"""Bytes of Python sources that the tokenizer is trained on."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML."""

START_S = 60.0


def tiny_folder() -> Path:
    """The folder of the model and its tokenizer, made if it is not there.

    Raises InputError where the extra `engine` is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentx" / f"tiny-{VERSION}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "model.gguf").is_file():
        with store.atomic_folder(folder, lambda _: True) as made:
            _write_tokenizer(made / "tokenizer.json")
            _write_model(made / "model.gguf", made / "tokenizer.json")
    return folder


def serve_tiny(port: int, *, host: str = "127.0.0.1", slots: int, context: int, ready: Callable[[str], None]) -> None:
    """Serve the tiny model until SIGINT or SIGTERM; `ready` is told the base URL.

    `context` is the window of one slot in tokens. Raises InputError where it cannot listen.
    """
    params_type, server_type = _xllamacpp()
    if context > CONTEXT:
        raise InputError(f"--context {context} is over the model's {CONTEXT} tokens", f"give at most {CONTEXT}")
    params = params_type()
    params.model.path = str(tiny_folder() / "model.gguf")
    params.model_alias = {MODEL_NAME}
    params.hostnames = [host]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cache_prompt = True
    params.kv_unified = False
    params.warmup = False
    params.ui = False
    params.fit_params = False
    params.n_batch = 2048
    params.n_ubatch = 512
    params.n_threads_http = slots + 4
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # more spin, and starve small machines
    params.verbosity = -1
    over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        server = server_type(params)
    except RuntimeError as error:
        raise InputError(f"the engine cannot listen on {host}:{port}: {error}", "choose another --port") from error
    ready(server.listening_address)
    while not over.wait(0.2):
        pass
    os._exit(0)  # the engine's own threads may still be busy with a call; nothing of ours is open


@contextlib.contextmanager
def running_tiny(*, slots: int = 1, context: int = 32768) -> Iterator[str]:
    """The base URL of a tiny engine in a process of its own, ended with the block."""
    command = [sys.executable, "-m", "agentx", "serve", "--tiny", "--port", "0"]
    command += ["--slots", str(slots), "--context", str(context)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        url = ""
        for line in process.stdout:
            if line.startswith("serving "):
                url = line.rpartition(" on ")[2].strip()
                break
        watchdog.cancel()
        if not url:
            raise DeploymentError(f"the tiny engine did not start within {START_S:g} s", "run agentx serve --tiny")
        _wait_healthy(url)
        yield url
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def _wait_healthy(url: str) -> None:
    for _ in range(300):
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"{url}/health", timeout=5),
        ):
            return
        threading.Event().wait(0.1)
    raise DeploymentError(f"{url}/health did not answer in time", "run agentx serve --tiny")


def _xllamacpp() -> tuple[Any, Any]:
    try:
        from xllamacpp import CommonParams, Server
    except ImportError as error:
        raise InputError("the tiny engine is not installed", "in the checkout: pip install '.[engine]'") from error
    return CommonParams, Server


# Making the model


def _write_tokenizer(path: Path) -> None:
    """A byte-level BPE trained on the standard library, with ChatML's special tokens first."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise InputError("the tiny engine is not installed", "in the checkout: pip install '.[engine]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer=trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise InputError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, {VOCABULARY} are needed", "is the Python complete?"
        )
    store.atomic_write_bytes(path, tokenizer.to_str().encode())


def _sources() -> Iterator[str]:
    left = TRAINING_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _write_model(path: Path, tokenizer_path: Path) -> None:
    import gguf

    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_name(MODEL_NAME)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in _weights():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(SEED)

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * DEVIATION).astype(np.float32)

    ones, width = np.ones(HIDDEN, dtype=np.float32), KV_HEADS * HEAD_SIZE
    yield "token_embd.weight", random(VOCABULARY, HIDDEN)
    yield "output_norm.weight", ones
    yield "output.weight", random(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", ones
        yield f"{block}.attn_q.weight", random(HEADS * HEAD_SIZE, HIDDEN)
        yield f"{block}.attn_q.bias", random(HEADS * HEAD_SIZE)
        yield f"{block}.attn_k.weight", random(width, HIDDEN)
        yield f"{block}.attn_k.bias", random(width)
        yield f"{block}.attn_v.weight", random(width, HIDDEN)
        yield f"{block}.attn_v.bias", random(width)
        yield f"{block}.attn_output.weight", random(HIDDEN, HEADS * HEAD_SIZE)
        yield f"{block}.ffn_norm.weight", ones
        yield f"{block}.ffn_gate.weight", random(FEED_FORWARD, HIDDEN)
        yield f"{block}.ffn_up.weight", random(FEED_FORWARD, HIDDEN)
        yield f"{block}.ffn_down.weight", random(HIDDEN, FEED_FORWARD)
