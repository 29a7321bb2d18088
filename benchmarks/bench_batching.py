"""Batches across sessions: tokens a second of eight sessions that decode with the same weights, with `djinn serve --batch-sessions` and without.

    python benchmarks/bench_batching.py [--json] [--quick] [--case tokens_gpt2]

Clients are processes with a session each. The model is as large as GPT-2-small, its weights are random and the server reads them, so that the
sessions share them. `gpt2` has GPT-2-small's 12 layers, `wide` four layers with the same number of weights, where clients have less to record.
Each client waits for each token and begins anew after some, with a prompt of another length than the others', so that caches differ.

`tokens`: tokens a second in turns over those in batches. `processor`: likewise the executor's processor time a token, which does not depend on
what else the machine does, nor on what clients cost. `alone`: time a token of one session with batching over without.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import torch
from bench_balance import REMOTE, Clients, clients, processor_seconds
from measuring import Case, Effort, Outcome, main
from serving import server, url_of

import djinn

SESSIONS = 8
SECONDS = 20.0  # of each turn
NEW = 64  # tokens after a prompt
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
MODELS: dict[str, dict[str, int]] = {"gpt2": {}, "wide": {"n_layer": 4, "n_embd": 1280, "n_head": 20}}


def model_of(config: dict[str, int], device: str) -> Any:
    """A model without weights, or with random ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        return GPT2LMHeadModel(GPT2Config(**config)).eval()


def decoding(settings: dict[str, Any], folder: str, config: dict[str, int], numbers: Iterator[int]) -> Callable[[], object]:
    """A step of a session: the next token."""
    from safetensors import safe_open

    djinn.configure(**settings)
    number = int.from_bytes(__import__("os").urandom(2)) % 13
    del numbers, safe_open
    model = model_of(config, "meta")
    model.load_state_dict(dict(djinn.open_weights(f"file:{folder}", device=0)), assign=True, strict=False)
    model.tie_weights()
    tokens = endless(model, 8 + number)
    return lambda: next(tokens)


def endless(model: Any, length: int) -> Iterator[int]:
    """Tokens of one text after the other."""
    prompt = (torch.arange(length)[None] % 50).to(REMOTE)
    while True:
        given, cache = prompt, None
        for _ in range(NEW):
            with torch.no_grad():
                found = model(given, past_key_values=cache, use_cache=True)
            given, cache = found.logits[:, -1:].argmax(-1), found.past_key_values
            yield int(given.item())
