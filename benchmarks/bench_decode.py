"""GPT-2-small greedy decoding on a server process of its own, against local eager with the same threads, in one run.

    python benchmarks/bench_decode.py [--json] [--rounds 5] [--tokens 32]

A token's time is the difference between a long and a short generation, divided by the tokens between them; local and
remote take turns, medians count. Random weights: the work is the same as with trained ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import djinn

DEVICE = "remote_accelerator:0"
PROMPT = 16
SHORT = 4


def seconds(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds to generate `tokens` tokens."""
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0).cpu()
    return time.perf_counter() - start


def per_token(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> float:
    """Milliseconds a token in the steady state."""
    return (seconds(model, prompt, SHORT + tokens) - seconds(model, prompt, SHORT)) / tokens * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    djinn.configure(threads=1)
    torch.manual_seed(0)
    local = GPT2LMHeadModel(GPT2Config()).eval()
    remote = GPT2LMHeadModel(local.config).eval()
    remote.load_state_dict(local.state_dict())
    remote.to(DEVICE)
    here = torch.randint(0, local.config.vocab_size, (1, PROMPT))
    there = here.to(DEVICE)
    for model, prompt in ((local, here), (remote, there)):
        per_token(model, prompt, options.tokens)  # plans, templates, caches
    times: dict[str, list[float]] = {"local": [], "remote": []}
    for round_ in range(options.rounds):
        pairs = [("local", local, here), ("remote", remote, there)]
        for name, model, prompt in pairs if round_ % 2 else reversed(pairs):
            times[name].append(per_token(model, prompt, options.tokens))
    djinn.reset_stats()
    seconds(remote, there, options.tokens)
    counts = djinn.stats()
    result = {
        "local_ms": statistics.median(times["local"]),
        "remote_ms": statistics.median(times["remote"]),
        "decode_ratio": statistics.median(times["remote"]) / statistics.median(times["local"]),
        "round_trips_a_token": counts["round_trips"] / options.tokens,
        "bytes_sent_a_token": counts["bytes_sent"] / options.tokens,
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24}{value:12.3f}")


if __name__ == "__main__":
    main()
