"""Models on a server process over loopback TCP, against local eager PyTorch with as many threads.

    python -m evaluation.benchmarks.bench_models [--json] [--quick] [--rounds 5] [--case decode,train]

Local and remote runs alternate; medians count. `alone` is the smaller local time before the server started and after it
ended, which shows the influence of the server on the reference. Weights are random: the work is the same as with
trained ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from attrs import evolve

from evaluation.benchmarks.measuring import Case, Effort, Outcome, Run, compare, main, median_of
from evaluation.benchmarks.serving import connected

REMOTE = "remote_accelerator:0"
Start = Callable[[str], Run]


def gpt2(**config: object) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**config))


def decode(tokens: int = 24, **config: object) -> Start:
    """Decode greedily with a growing cache, without prefill and the end of `generate`."""

    def start(device: str) -> Run:
        model = gpt2(**config).eval().to(device)
        inputs = torch.arange(16)[None].to(device)
        step = _steps(model, inputs, tokens)
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


def own_loop(tokens: int = 24, **config: object) -> Start:
    """Decode in a typical hand-written loop: top-50 sampling, concatenation, and a blocking check for the end token."""

    def start(device: str) -> Run:
        model = gpt2(**config).eval().to(device)
        inputs = torch.arange(16)[None].to(device)
        loop = _sampled(model, inputs, tokens)
        return lambda: next(loop)

    return start


@torch.no_grad()
def _sampled(model: torch.nn.Module, given: torch.Tensor, tokens: int) -> Iterator[None]:
    end = -1  # an end token that never occurs
    while True:
        text, cache, unread = given, None, given
        for _ in range(tokens):
            out = model(unread, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best, places = torch.topk(out.logits[:, -1, :] / 0.8, 50)
            choice = torch.multinomial(torch.softmax(best, -1), 1)
            unread = torch.gather(places, -1, choice)
            text = torch.cat((text, unread), 1)
            if unread.item() == end:
                break
            yield


def generate(tokens: int = 24, **config: object) -> Start:
    """Generate greedily, including prefill."""

    def start(device: str) -> Run:
        model = gpt2(**config).eval().to(device)
        inputs = torch.arange(16)[None].to(device)
        return lambda: model.generate(
            inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        ).cpu()

    return start


def compiled_decode(device: str) -> Run:
    """Return a decode step with a static cache: under `torch.compile(backend="djinn")` remotely, eager locally."""
    from transformers import StaticCache

    model = gpt2(n_layer=4, n_embd=64, n_head=4, vocab_size=1000).eval().to(device)
    cache = StaticCache(config=model.config, max_cache_len=64)
    run = torch.compile(model, backend="djinn", dynamic=False) if device != "cpu" else model
    token = torch.tensor([[3]], device=device)
    tokens = itertools.count()

    @torch.no_grad()
    def step() -> None:
        if (
            next(tokens) % 60 == 59
        ):  # counted here, because the cache's length is a tensor, and reading it is a round trip
            cache.reset()
        run(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1).item()

    return step


def train(device: str) -> Run:
    """Train GPT-2-small: AdamW, batch 4 x 128."""
    model = gpt2().train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randint(0, 50257, (4, 128), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def forward(make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]) -> Start:
    """Run a forward pass and fetch the result."""

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
WARM_CALLS = 14  # for plans, templates and work ahead


def measure(start: Start, times: int, effort: Effort) -> Outcome:
    """Return the remote time of a step divided by its local time, from alternating rounds.

    `start`: moves a model to a device, and returns the step. `times`: number of calls per round.
    """
    here = start("cpu")
    for _ in range(3):
        here()
    before = median_of(here, effort.times(times))
    with connected(threads=effort.threads):
        there = start(REMOTE)
        for _ in range(2 if effort.small else WARM_CALLS):
            there()
        compared = compare(here, there, effort, times, alone=before)
    after = median_of(here, effort.times(times))
    return evolve(compared, alone=min(before, after)).outcome()


def case(name: str, bar: float | None, times: int, start: Start) -> Case:
    """Return a case of this script."""
    return Case(name, bar, partial(measure, start, times))


CASES = (
    case("decode", 1.05, 24, decode()),
    case("own_loop", 1.05, 24, own_loop()),
    case("generate", 1.00, 2, generate()),
    case("toy_decode", 3.0, 48, decode(48, **TOY)),
    case("toy_own_loop", None, 48, own_loop(48, **TOY)),
    case("toy_decode_compiled", 1.3, 48, compiled_decode),
    case("train", 1.02, 2, train),
    case("resnet50", 1.02, 3, forward(resnet50)),
    case("bert", 1.02, 8, forward(bert)),
)

if __name__ == "__main__":
    main("Models, over loopback TCP against local eager PyTorch", CASES)
