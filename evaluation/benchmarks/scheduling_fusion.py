"""Fewer ops for the same work: batch norms folded, decoding with fused projections, against the original.

Times are the executor's own: recording a token of a small Llama takes the client longer than the executor computes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import djinn
from evaluation.benchmarks.measuring import Case, Effort, Outcome

REMOTE = "remote_accelerator:0"
TOKENS = 48
Run = Callable[[torch.nn.Module], torch.Tensor]


@contextmanager
def placed(model: torch.nn.Module, threads: int, exact: bool) -> Iterator[torch.nn.Module]:
    """Move the model to one executor. `adaptive` is off, because it would disable slower optimizations during the measurement."""
    djinn.shut_down()
    djinn.configure(executors=1, threads=threads, exact=exact, disable=("adaptive",))
    try:
        yield model.to(REMOTE)
        model.to("cpu")
    finally:
        djinn.shut_down()
        djinn.configure()


def executed(run: Callable[[], object], times: int) -> float:
    """Return the executor's median seconds of a run."""
    found = []
    for _ in range(times):
        before = djinn.stats()["server_execute_us"]
        run()
        found.append((djinn.stats()["server_execute_us"] - before) / 1e6)
    return statistics.median(found)


@torch.no_grad()
def ratio(model: torch.nn.Module, run: Run, effort: Effort, times: int) -> tuple[float, float]:
    """Return the seconds without and with inexact optimizations; results must match local PyTorch."""
    expected = run(model)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(effort.rounds):
        for exact in (True, False) if turn % 2 else (False, True):
            with placed(model, effort.threads, exact) as ours:
                for _ in range(3):
                    torch.testing.assert_close(run(ours).cpu(), expected)
                seconds[exact].append(executed(lambda: run(ours).cpu(), effort.times(times)))
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def folding(effort: Effort) -> tuple[float, float]:
    """Return times of a convolutional network with batch norms."""
    torch.manual_seed(0)
    width, layers = (8, 2) if effort.small else (64, 12)
    stages: list[torch.nn.Module] = [torch.nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(layers):
        stages += [torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*stages, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10))
    batch = torch.randn(4, 3, 64, 64)
    return ratio(model.eval(), lambda on: on(batch.to(next(on.parameters()).device)), effort, 10)


def projections(effort: Effort) -> tuple[float, float]:
    """Return times of greedy decoding: query, key and value, and gate and up, of one row and small weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2 if effort.small else 8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model, prompt = LlamaForCausalLM(config).eval(), torch.randint(1, 512, (1, 8))
    tokens = 6 if effort.small else TOKENS

    def generate(on: torch.nn.Module) -> torch.Tensor:
        given = prompt.to(next(on.parameters()).device)
        return on.generate(given, max_new_tokens=tokens, do_sample=False, pad_token_id=0)  # type: ignore[operator, no-any-return]

    return ratio(model, generate, effort, 4)


def fusion(effort: Effort) -> Outcome:
    """Return the worse of the two."""
    unfolded, folded = folding(effort)
    apart, fused = projections(effort)
    figures = {
        "plain ms": unfolded * 1e3,
        "folded ms": folded * 1e3,
        "norms_folded_ratio": folded / unfolded,
        "decoding ms": apart * 1e3,
        "fused ms": fused * 1e3,
        "projections_fused_ratio": fused / apart,
        "fusion_time_ratio": max(folded / unfolded, fused / apart),
    }
    return Outcome(figures["fusion_time_ratio"], figures)


CASES = (Case("fusion", 1.0, fusion, keys=("fusion_time_ratio",)),)

if __name__ == "__main__":
    from evaluation.benchmarks.measuring import main

    main("Fewer ops for the same work", CASES)
