"""Models on a server process of its own over loopback TCP, against local eager PyTorch with as many threads.

    python benchmarks/bench_models.py [--json] [--rounds 5] [--only decode,train]

Local and remote take turns; medians count. `alone` is the local time before there was a server, to show that the
reference does not suffer from it. Random weights: the work is the same as with trained ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator

import attrs
import torch
from serving import connected

REMOTE = "remote_accelerator:0"
Run = Callable[[], None]


@attrs.frozen
class Case:
    """Something to time: `start` puts a model on a device and returns what to call, `times` how often a round calls it."""

    name: str
    bar: float
    times: int
    start: Callable[[str], Run]


def gpt2(**config: object) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**config))


def decode(tokens: int = 24, **config: object) -> Callable[[str], Run]:
    """A token of greedy decoding with a growing cache; prefill and the end of `generate` are not in it."""

    def start(device: str) -> Run:
        model = gpt2(**config).eval().to(device)
        given = torch.arange(16)[None].to(device)
        step = _steps(model, given, tokens)
        return lambda: next(step)

    return start


@torch.no_grad()
def _steps(model: torch.nn.Module, given: torch.Tensor, tokens: int) -> Iterator[None]:
    while True:
        out = model(given, use_cache=True)
        for _ in range(tokens):
            token = out.logits[:, -1:].argmax(-1)
            token.item()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            yield


def compiled_decode(device: str) -> Run:
    """A token with a static cache under `torch.compile(backend="djinn")`; locally eager."""
    from transformers import StaticCache

    model = gpt2(n_layer=4, n_embd=64, n_head=4, vocab_size=1000).eval().to(device)
    cache = StaticCache(config=model.config, max_cache_len=64)
    run = torch.compile(model, backend="djinn", dynamic=False) if device != "cpu" else model
    token = torch.tensor([[3]], device=device)

    @torch.no_grad()
    def step() -> None:
        if cache.get_seq_length() >= 60:
            cache.reset()
        run(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1).item()

    return step


def train(device: str) -> Run:
    """A training step of GPT-2-small: AdamW, batch 4 x 128."""
    model = gpt2().train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given = torch.randint(0, 50257, (4, 128), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(given, labels=given).loss
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def forward(make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]) -> Callable[[str], Run]:
    """A forward pass, result and all."""

    def start(device: str) -> Run:
        torch.manual_seed(0)
        model, inputs = make()
        model = model.eval().to(device)

        @torch.no_grad()
        def step() -> None:
            out = model(**{name: value.to(device) for name, value in inputs.items()})
            out[0].sum().item()

        return step

    return start


def resnet50() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()), {"pixel_values": torch.randn(8, 3, 224, 224)}


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), {"input_ids": torch.randint(0, 30000, (1, 128))}


TOY = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
CASES = (
    Case("decode", 1.05, 24, decode()),
    Case("toy_decode", 5.0, 48, decode(48, **TOY)),
    Case("toy_decode_compiled", 2.0, 48, compiled_decode),
    Case("train", 1.02, 2, train),
    Case("resnet50", 1.03, 3, forward(resnet50)),
    Case("bert", 1.03, 8, forward(bert)),
)


def milliseconds(run: Run, times: int) -> float:
    """The median time of a call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e3


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Medians over rounds, and of the ratios within a round."""
    here = case.start("cpu")
    for _ in range(3):
        here()
    alone = milliseconds(here, case.times)
    with connected():
        there = case.start(REMOTE)
        for _ in range(max(8, case.times // 4)):  # plans, templates, pieces
            there()
        local: list[float] = []
        remote: list[float] = []
        for turn in range(rounds):
            order = [(here, local), (there, remote)]
            for run, times in order if turn % 2 else reversed(order):
                times.append(milliseconds(run, case.times))
    ratios = [b / a for a, b in zip(local, remote, strict=True)]
    return {
        "alone_ms": alone,
        "local_ms": statistics.median(local),
        "remote_ms": statistics.median(remote),
        "ratio": statistics.median(ratios),
        "bar": case.bar,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else [case.name for case in CASES]
    found = {case.name: measure(copy.copy(case), options.rounds) for case in CASES if case.name in names}
    if options.json:
        print(json.dumps({f"{name}_ratio": values["ratio"] for name, values in found.items()}))
        return
    print(f"{'':22}{'alone ms':>10}{'local ms':>10}{'remote ms':>10}{'ratio':>8}{'bar':>8}")
    for name, values in found.items():
        figures = (values[key] for key in ("alone_ms", "local_ms", "remote_ms"))
        print(f"{name:22}{''.join(f'{v:10.2f}' for v in figures)}{values['ratio']:8.2f}{values['bar']:8.2f}")


if __name__ == "__main__":
    main()
