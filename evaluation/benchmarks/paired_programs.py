"""Programs that `paired.py` measures. Reads program names from standard input, and prints `done` after each run.

Uses only the public names of `djinn`, because the checkout may be older or newer than this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

import djinn

DEVICE = "remote_accelerator:0"
PREPARING_RUNS = 3
Run = Callable[[], object]


def record() -> Run:
    """Record 24 Adam steps over 64 parameters, then wait once."""
    parameters = [nn.Parameter(torch.ones(8, 8, device=DEVICE)) for _ in range(64)]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones(8, 8, device=DEVICE)

    def run() -> None:
        for _ in range(24):
            optimizer.step()
        djinn.synchronize()

    return run


def decode() -> Run:
    """Decode 24 tokens of a small GPT-2 and wait for each token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=64, vocab_size=1000)).eval().to(DEVICE)
    prompt = torch.arange(1, 9)[None].to(DEVICE)

    @torch.no_grad()
    def run() -> None:
        output = model(prompt, use_cache=True)
        for _ in range(24):
            token = output.logits[:, -1:].argmax(-1)
            token.item()
            output = model(token, past_key_values=output.past_key_values, use_cache=True)

    return run


def wait() -> Run:
    """Wait 100 times for the result of two ops."""
    value = torch.zeros(8, device=DEVICE)

    def run() -> None:
        for _ in range(100):
            value.add_(1).sum().item()

    return run


def train() -> Run:
    """Train a small network for 16 steps and read each loss."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = torch.randn(16, 64).to(DEVICE), torch.randint(8, (16,)).to(DEVICE)

    def run() -> None:
        for _ in range(16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    return run


def main() -> None:
    """Use the device once, then run the programs that standard input names."""
    torch.manual_seed(0)
    torch.ones(4, device=DEVICE).sum().item()
    print("done", flush=True)
    runs: dict[str, Run] = {}
    programs = {function.__name__: function for function in (record, decode, wait, train)}
    for line in sys.stdin:
        name = line.strip()
        if name not in runs:
            runs[name] = programs[name]()
            for _ in range(PREPARING_RUNS):
                runs[name]()
        runs[name]()
        print("done", flush=True)


if __name__ == "__main__":
    main()
