"""Memory budgets of an executor with a limit: how far the share of a kind of value is from what a program really holds of it.

    python -m evaluation.benchmarks.bench_budgets [--json] [--quick] [--case generation]

After each token, or training step, the program compares the executor's budget for KV caches, or for optimizer states, with the bytes
of its own cache or optimizer over all that its steps use. A value is the largest relative difference at any point.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import djinn
from djinn.testing import executor_figures
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.benchmarks.serving import connected
from evaluation.served import served

LIMIT_GIB = 0.125
START_SECONDS = 300.0
REMOTE = "remote_accelerator:0"
KINDS = ("weights", "caches", "activations", "states")
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
)  # fmt: skip


def difference(kind: str, held: int) -> float:
    """Relative difference between the budget of a kind and the share that `held` bytes of it have in what the phase uses."""
    figures = executor_figures()
    others = sum(figures[f"used_{name}"] for name in KINDS if name != kind)
    budget = figures[f"budget_{kind}"] / (figures["memory_limit"] - figures["memory_reserve"])
    return abs(budget / (held / (held + others)) - 1.0)


def generating(conversations: int, tokens: int) -> Iterator[float]:
    """The differences of KV caches at each token of conversations that begin anew."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval().to(REMOTE)
    for number in range(conversations):
        ids, cache = torch.randint(1, 512, (4, 20 + 30 * number)).to(REMOTE), DynamicCache(config=CONFIG)
        with torch.no_grad():
            for _ in range(tokens):
                ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                ids.cpu()
                yield difference("caches", sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))


def training(steps: int) -> Iterator[float]:
    """The differences of optimizer states after each step but the first, in which Adam makes them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(3)]).to(REMOTE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 24, 128).to(REMOTE)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        loss.item()
        states = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.device.type != "cpu")
        if step:
            yield difference("states", states)


def of_generation(effort: Effort) -> Outcome:
    """Two conversations of one session."""
    with connected("--memory-gib", str(LIMIT_GIB)):
        found = list(generating(2, effort.times(64)))
    return Outcome(max(found), {"points": len(found)})


def of_training(effort: Effort) -> Outcome:
    """One training."""
    with connected("--memory-gib", str(LIMIT_GIB)):
        found = list(training(effort.times(24)))
    return Outcome(max(found), {"points": len(found)})


def client(settings: dict[str, Any], train: bool, count: int, begun: Any, found: Any) -> None:
    """A client that works beside another one."""
    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(**settings)
    begun.wait(START_SECONDS)
    found.put(list(training(count) if train else generating(2, count)))
    djinn.shut_down()


def of_two_sessions(effort: Effort) -> Outcome:
    """A generation and a training on one executor at a time."""
    spawning, count = multiprocessing.get_context("spawn"), effort.times(64)  # autograd does not fork
    environment = {"DJINN_TOKEN": os.urandom(16).hex()}
    options = ("--store-gib", "0", "--memory-gib", str(LIMIT_GIB))
    begun, found = spawning.Barrier(2), spawning.Queue()
    with served(*options, environment=environment) as serving:
        settings = {"servers": [serving.tcp], "token": environment["DJINN_TOKEN"], "disable": ("local",)}
        children = [
            spawning.Process(target=client, args=(settings, train, count, begun, found), daemon=True)
            for train in (False, True)
        ]
        for child in children:
            child.start()
        points = [one for _ in children for one in found.get(timeout=START_SECONDS)]
        for child in children:
            child.join(START_SECONDS)
    return Outcome(max(points), {"points": len(points)})


CASES = (
    Case("generation", 0.1, of_generation),
    Case("training", 0.1, of_training),
    Case("two_sessions", 0.1, of_two_sessions),
)

if __name__ == "__main__":
    main("Memory budgets and what programs hold", CASES)
