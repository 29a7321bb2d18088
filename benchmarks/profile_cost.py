"""Cost of `djinn.profile()`: decode steps and training steps with and without it, in turns.

    python benchmarks/profile_cost.py [--turns 8] [--tokens 60] [--steps 60]

The embedded executor of this machine; a toy model of Llama's kind, and a small network with AdamW. The last line is a JSON object. `..._ratio`:
median time of a step with a profile over that without one; `..._processor_ratio`: the same of the client's processor time, which other work
on the machine disturbs less; `..._ops_ratio`: time with `ops=True`. `off_ns`: nanoseconds of the attribute tests that a submission costs without
a profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import djinn

REMOTE = "remote_accelerator:0"
KINDS = ("without", "profile", "ops")


def decoding(tokens: int) -> Callable[[], object]:
    """Tokens of a toy model of Llama's kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **sizes)).eval().to(REMOTE)
    ids = torch.randint(0, 2000, (1, 16), device=REMOTE)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return lambda: model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **given).tolist()


def training(steps: int) -> Callable[[], object]:
    """Steps of a small network, each with a wait."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64, device=REMOTE)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()

    return run


def measure(run: Callable[[], object], turns: int) -> dict[str, tuple[float, float]]:
    """Median seconds and processor seconds of a run, by kind; in turns of changing order."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(3):
        run()
    for turn in range(turns):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            block: Any = nullcontext() if kind == "without" else djinn.profile(ops=kind == "ops")
            with block:
                began, processor = time.perf_counter(), time.process_time()
                run()
                found[kind].append((time.perf_counter() - began, time.process_time() - processor))
    return {
        kind: (statistics.median(s for s, _ in runs), statistics.median(p for _, p in runs))
        for kind, runs in found.items()
    }


def main() -> None:
    """Print a table, and the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    djinn.configure(threads=1)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    print(f"{'':10} {'ms a step':>10} {'profile':>9} {'processor':>10} {'ops=True':>9}")
    for name, make, count in (("decode", decoding, options.tokens), ("train", training, options.steps)):
        with torch.inference_mode(name == "decode"):
            found = measure(make(count), options.turns)
        plain, ratio = found["without"][0] / count, {k: v[0] / found["without"][0] for k, v in found.items()}
        processor = found["profile"][1] / found["without"][1]
        print(f"{name:10} {plain * 1e3:10.2f} {ratio['profile']:9.3f} {processor:10.3f} {ratio['ops']:9.3f}")
        figures |= {f"{name}_ms": plain * 1e3, f"{name}_ratio": ratio["profile"], f"{name}_processor_ratio": processor}
        figures[f"{name}_ops_ratio"] = ratio["ops"]
    # Where nothing is recorded, a submission looks at an attribute in four places: two of `port`, two of the observers.
    figures["off_ns"] = (
        4
        * timeit.timeit("port.timeline", "from djinn_core.interception.runtime_interface import port", number=10**6)
        * 1e3
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
