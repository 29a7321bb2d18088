"""Prefill of a long prompt on two executors against one: chunks of rows run concurrently, keys and values are sent on.

Every run has a new prompt of the same length. Logits must match local PyTorch within tolerances, and tokens generated
from the caches must be equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import djinn
from djinn.testing import executor_figures
from evaluation.benchmarks.measuring import Case, Effort, Outcome, median_of

REMOTE = "remote_accelerator:0"
TOKENS = 4
WAYS = {"one": (1, "single"), "two": (2, "cost_based")}


def llama(effort: Effort) -> torch.nn.Module:
    """Return a language model whose prefill takes hundreds of milliseconds on one thread."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 256 if effort.small else 512
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2 if effort.small else 6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


@contextmanager
def placed(way: str, model: torch.nn.Module, threads: int) -> Iterator[torch.nn.Module]:
    """Move the model to local executors, with inexact optimizations allowed."""
    count, policy = WAYS[way]
    djinn.shut_down()
    djinn.configure(executors=count, threads=threads, placement_policy=policy, exact=False)
    try:
        yield model.to(REMOTE)
        model.to("cpu")
    finally:
        djinn.shut_down()
        djinn.configure()


def between() -> int:
    """Return the bytes that executors have sent to each other."""
    return int(executor_figures().get("peer_bytes", 0))


@torch.no_grad()
def prefill(effort: Effort) -> Outcome:
    """Return the time to the last token's logits on two executors, divided by one."""
    length = 256 if effort.small else 768
    model = llama(effort)
    prompts = iter([torch.randint(1, 1000, (1, length)) for _ in range(200)])
    first = next(prompts)
    logits = model(first, use_cache=True, logits_to_keep=1).logits
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(first, **options)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    moved = 0
    for turn in range(effort.rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            with placed(way, model, effort.threads) as ours:

                def forward(prompt: torch.Tensor) -> torch.Tensor:
                    return ours(prompt.to(REMOTE), use_cache=True, logits_to_keep=1).logits.cpu()

                torch.testing.assert_close(forward(first), logits, rtol=1e-4, atol=1e-4)
                assert torch.equal(ours.generate(first.to(REMOTE), **options).cpu(), tokens)
                forward(next(prompts))
                before = between() if way == "two" else 0
                forward(next(prompts))
                moved = between() - before if way == "two" else moved
                seconds[way].append(median_of(lambda: forward(next(prompts)), effort.times(6)))
    one, two = (statistics.median(seconds[way]) for way in WAYS)
    figures = {"one ms": one * 1e3, "two ms": two * 1e3, "sent MB": moved / 1e6, "prefill_latency_ratio": two / one}
    return Outcome(two / one, figures)


CASES = (Case("prefill", 0.65, prefill, keys=("prefill_latency_ratio",)),)

if __name__ == "__main__":
    from evaluation.benchmarks.measuring import main

    main("A long prompt on two executors", CASES)
