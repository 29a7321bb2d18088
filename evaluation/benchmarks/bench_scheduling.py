"""Scheduling with knowledge of the program on several executors, against placement without it or one executor.

    python -m evaluation scheduling [--json] [--quick] [--only multimodal,cnn]

Executors are local processes with one thread each, on real sockets; some are behind a slow link. If two executors
compute concurrently, this process competes with them on two cores. Every run checks that results equal those of local
PyTorch. The JSON has the keys of the cases; values that cannot be measured are null, and `not_measured` says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

import djinn
from djinn.testing import executor_figures
from evaluation.benchmarks.bench_placing import CASES as PLACING
from evaluation.benchmarks.links import CLIENT, Conditions, hidden_from, namespace, permitted
from evaluation.benchmarks.links import SERVER as FAR
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, main, median_of
from evaluation.benchmarks.scheduling_cnn import CNN
from evaluation.benchmarks.scheduling_fusion import CASES as FUSION
from evaluation.benchmarks.scheduling_memory import CASES as MEMORY
from evaluation.benchmarks.scheduling_predicted import CASES as PREDICTING
from evaluation.benchmarks.scheduling_prefill import CASES as PREFILL
from evaluation.benchmarks.scheduling_recompute import CASES as RECOMPUTING
from evaluation.served import served

REMOTE = "remote_accelerator:0"
GIGABIT = 1e9
TOKENS = 12
Run = Callable[[], object]


@contextmanager
def executors(count: int, policy: str, threads: int = 1, **settings: object) -> Iterator[None]:
    """Run this number of local executors as one device, placed by a policy."""
    djinn.shut_down()
    djinn.configure(executors=count, threads=threads, placement_policy=policy, **settings)
    try:
        djinn.init()
        yield
    finally:
        djinn.shut_down()
        djinn.configure()


@contextmanager
def executors_over(conditions: Conditions, policy: str, threads: int = 1) -> Iterator[None]:
    """Run two servers as one device: one local, one behind a link, which also connects the two."""
    if not permitted():
        raise CannotMeasureError("network namespaces are not permitted here")
    token = {"DJINN_TOKEN": "benchmark-" + "0" * 24}
    network = ["--store-gib", "0", "--insecure-plaintext-on-network", "--host"]
    with ExitStack() as stack:
        inside = stack.enter_context(namespace(conditions))
        near = stack.enter_context(served(*network, CLIENT, threads=threads, environment=token | hidden_from(inside)))
        far = stack.enter_context(served(*network, FAR, threads=threads, environment=token, prefix=inside))
        djinn.shut_down()
        djinn.configure(servers=[near.tcp, far.tcp], token=near.token, disable=("local",), placement_policy=policy)
        try:
            djinn.init()
            yield
        finally:
            djinn.shut_down()
            djinn.configure()


def between() -> int:
    """Return the bytes that executors have sent to each other."""
    return int(executor_figures().get("peer_bytes", 0))


def timed(run: Run, warm: int, times: int) -> float:
    for _ in range(warm):
        run()
    return median_of(run, times)


# --- decoding -------------------------------------------------------------------------------------------------


def small_llama(effort: Effort) -> Callable[[str], Callable[[], torch.Tensor]]:
    """Return greedy decoding of a small Llama on a device; each call is a whole generation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 64 if effort.small else 256
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2 if effort.small else 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 1000, (1, 32))

    def on(device: str) -> Callable[[], torch.Tensor]:
        moved = model.to(device)
        given = prompt.to(device)
        return lambda: moved.generate(given, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0).cpu()

    return on


def decoding(conditions: Conditions, effort: Effort) -> Outcome:
    """Return a token with round-robin placement, divided by one with the cache in place."""
    expected = small_llama(effort)("cpu")()
    seconds: dict[str, float] = {}
    moved: dict[str, float] = {}
    for policy in ("cost_based", "round_robin"):
        with executors_over(conditions, policy, effort.threads):
            generate = small_llama(effort)(REMOTE)
            assert torch.equal(generate(), expected)
            generate()
            before = between()
            seconds[policy] = median_of(generate, effort.times(3)) / TOKENS
            moved[policy] = (between() - before) / (effort.times(3) * TOKENS)
    figures = {
        "kv_bytes_ours": moved["cost_based"],
        "kv_bytes_blind": moved["round_robin"],
        "ours ms": seconds["cost_based"] * 1e3,
        "kv_time_ratio": seconds["round_robin"] / seconds["cost_based"],
        "blind ms": seconds["round_robin"] * 1e3,
    }
    return Outcome(seconds["cost_based"] / seconds["round_robin"], figures)


# --- two branches ---------------------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """An encoder for each of two modalities, and a head that combines them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.seeing, self.reading = (
            torch.nn.TransformerEncoder(
                torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True), layers
            )
            for _ in range(2)
        )
        self.patches = torch.nn.Conv2d(3, width, 16, 16)
        self.words = torch.nn.Embedding(1000, width)
        self.together = torch.nn.Linear(2 * width, 16)

    def forward(self, pictures: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.seeing(self.patches(pictures).flatten(2).transpose(1, 2)).mean(1)
        read = self.reading(self.words(tokens)).mean(1)
        return self.together(torch.cat([seen, read], -1))


@torch.no_grad()
def multimodal(effort: Effort) -> Outcome:
    """Return the latency on two executors divided by that on one."""
    torch.manual_seed(0)
    model = Branches(64 if effort.small else 384, 2 if effort.small else 6).eval()
    pictures, tokens = torch.randn(2, 3, 224, 224), torch.randint(0, 1000, (2, 196))
    expected = model(pictures, tokens)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(effort.rounds):
        for count in (1, 2):
            with executors(count, "cost_based" if count > 1 else "single", effort.threads):
                ours = model.to(REMOTE)
                torch.testing.assert_close(ours(pictures.to(REMOTE), tokens.to(REMOTE)).cpu(), expected)
                given = pictures.to(REMOTE), tokens.to(REMOTE)
                seconds[count].append(timed(lambda: ours(*given).cpu(), 3, effort.times(8)))  # noqa: B023
                model = ours.to("cpu")
    one, two = (statistics.median(seconds[count]) for count in (1, 2))
    return Outcome(two / one, {"one ms": one * 1e3, "two ms": two * 1e3, "multimodal_latency_ratio": two / one})


def convolutions(effort: Effort) -> torch.nn.Module:
    width, layers = (8, 4) if effort.small else (64, 12)
    stages: list[torch.nn.Module] = [torch.nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(layers):
        stages += [torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
    return torch.nn.Sequential(*stages, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10))


CASES = (
    Case(
        "decoding_gigabit",
        1 / 3,
        partial(decoding, Conditions(bits_per_second=GIGABIT)),
        keys=("kv_bytes_ours", "kv_bytes_blind", "kv_time_ratio"),
    ),
    Case("multimodal", 0.6, multimodal, keys=("multimodal_latency_ratio",)),
    *CNN,
    *PREFILL,
    *RECOMPUTING,
    *FUSION,
    *PLACING,
    *PREDICTING,
    *MEMORY,
)

if __name__ == "__main__":
    main("Scheduling: what knowledge of a program is worth on several executors", CASES)
