"""A convolutional network on two executors: a stream of batches, and one large batch.

On two cores, the client's work for a batch (about 3 ms) competes with the executors. Besides the chosen placement, the
stream is timed in two stages, which the policy `pinned` forces.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import djinn
from evaluation.benchmarks.measuring import Case, Effort, Outcome, median_of

REMOTE = "remote_accelerator:0"
BATCHES = 12
WAYS = {"one": (1, "single"), "two": (2, "cost_based"), "stages": (2, "pinned")}


def convolutions(effort: Effort) -> torch.nn.Module:
    """Return a network in evaluation whose layers take about the same time."""
    torch.manual_seed(0)
    width, layers = (24, 2) if effort.small else (64, 12)
    stages: list[torch.nn.Module] = [torch.nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(layers):
        stages += [torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10)]
    return torch.nn.Sequential(*stages, *head).eval()


def in_halves(model: torch.nn.Module) -> dict[str, str]:
    """Return pins for the children of a model: the first half on one executor, the rest on the other."""
    names = [name for name, _ in model.named_children()]
    return {name: "0" if turn < len(names) // 2 else "1" for turn, name in enumerate(names)}


@contextmanager
def placed(way: str, model: torch.nn.Module, threads: int, **settings: Any) -> Iterator[torch.nn.Module]:
    """Move the model to local executors for the block."""
    count, policy = WAYS[way]
    pins = in_halves(model) if policy == "pinned" else {}
    djinn.shut_down()
    djinn.configure(executors=count, threads=threads, placement_policy=policy, pins=pins, **settings)
    try:
        yield model.to(REMOTE)
        model.to("cpu")
    finally:
        djinn.shut_down()
        djinn.configure()


@torch.no_grad()
def stream(model: torch.nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results of batches without waiting for each."""
    made = [model(batch.to(REMOTE)).to("cpu", non_blocking=True) for batch in batches]
    return [one + 0 for one in made]


@torch.no_grad()
def at_once(model: torch.nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results of one large batch."""
    return list(model(torch.cat(list(batches)).to(REMOTE)).cpu().split(len(batches[0])))


def timed(
    ways: Sequence[str],
    run: Callable[[torch.nn.Module, Sequence[torch.Tensor]], list[torch.Tensor]],
    count: int,
    effort: Effort,
    **settings: Any,
) -> dict[str, float]:
    """Return median seconds of a run in each way, alternating. Every way must give the results of local PyTorch."""
    model = convolutions(effort)
    batches = [torch.randn(4, 3, 64, 64) for _ in range(count)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(effort.rounds):
        for way in ways if turn % 2 else reversed(ways):
            with placed(way, model, effort.threads, **settings) as ours:
                for _ in range(3):  # until plans are made and copies are in place
                    for mine, other in zip(run(ours, batches), expected, strict=True):
                        torch.testing.assert_close(mine, other)
                found[way].append(median_of(partial(run, ours, batches), effort.times(4)))
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def cnn(effort: Effort) -> Outcome:
    """Return the throughput of one executor divided by that of two, for a stream of batches."""
    took = timed(tuple(WAYS), stream, BATCHES, effort)
    figures = {f"{way} ms": seconds * 1e3 for way, seconds in took.items()}
    return Outcome(took["two"] / took["one"], figures | {"cnn_pipeline_speedup": took["one"] / took["two"]})


def large_batch(effort: Effort) -> Outcome:
    """Return the time of one batch on two executors divided by one. Batch norms are folded on both sides."""
    took = timed(("one", "two"), at_once, 4, effort, exact=False)
    figures = {f"{way} ms": seconds * 1e3 for way, seconds in took.items()}
    return Outcome(took["two"] / took["one"], figures | {"cnn_large_batch_ratio": took["two"] / took["one"]})


class Transitions(torch.nn.Module):
    """Transitions between the blocks of a DenseNet, and an averaged head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rows = [width * 2**n for n in range(3)]
        between = [[torch.nn.Conv2d(r, 2 * r, 1), torch.nn.AvgPool2d(2), torch.nn.ReLU()] for r in rows]
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.ReLU(inplace=True), torch.nn.MaxPool2d(2)
        )
        self.layers = torch.nn.Sequential(*[layer for three in between for layer in three])
        self.head = torch.nn.Sequential(
            torch.nn.Conv2d(8 * width, 1000, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.layers(self.stem(pictures)))
        return made


@torch.no_grad()
def pool_first(effort: Effort) -> Outcome:
    """Return a forward pass with poolings moved forward, divided by the original, on one executor."""
    torch.manual_seed(0)
    model = Transitions(8 if effort.small else 64).eval()
    batch = torch.randn(4, 3, 112, 112)
    expected = model(batch)
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(effort.rounds):
        for exact in (True, False) if turn % 2 else (False, True):
            with placed("one", model, effort.threads, exact=exact) as ours:
                given = batch.to(REMOTE)
                torch.testing.assert_close(ours(given).cpu(), expected)
                ours(given).cpu()
                found[exact].append(median_of(lambda: ours(given).cpu(), effort.times(8)))  # noqa: B023
    plain, first = (statistics.median(found[exact]) for exact in (True, False))
    return Outcome(first / plain, {"plain ms": plain * 1e3, "first ms": first * 1e3, "pool_first_ratio": first / plain})


CNN = (
    Case("cnn", 1 / 1.8, cnn, keys=("cnn_pipeline_speedup",)),
    Case("cnn_large_batch", 0.6, large_batch, keys=("cnn_large_batch_ratio",)),
    Case("pool_first", 1.0, pool_first, keys=("pool_first_ratio",)),
)
