"""Recompute or send: both ways forced, against the choice, over a slow and a fast link between executors.

Two networks on two executors use the result of a third network on the first: 4 MB made from 65 kB, in less time than
the second executor's own earlier work. At 100 Mbit/s sending takes ten times as long as computing, at 10 Gbit/s a
tenth. Then the fast link becomes slow during a session.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import attrs
import torch

import djinn
from djinn.hooks import Optimization, hookimpl
from djinn_client.runtime import client
from djinn_optimizations.recomputation import Recomputation
from evaluation.benchmarks.links import CLIENT, Conditions, change, hidden_from, namespace, permitted
from evaluation.benchmarks.links import SERVER as FAR
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, median_of
from evaluation.served import served

REMOTE = "remote_accelerator:0"
SLOW, FAST = 1e8, 1e10
LINKS = {"100 Mbit/s": SLOW, "10 Gbit/s": FAST}
PLUGINS = ("tcp", "pool", "pinned", "cleanup")
PINS = {"made*": "0", "left*": "0", "own*": "1", "right*": "1"}
ROUNDS, FOLLOWING = 3, 40
WARM = 3


class Forced:
    """The optimization, forced to recompute everything possible."""

    djinn_api_version = "2.0"

    @hookimpl
    def djinn_register_optimizations(self) -> list[Optimization]:
        return [Recomputation(lambda found, _: found[-1])]


WAYS: dict[str, tuple[object, ...]] = {"sent": (), "computed": (Forced(),), "chosen": ("recomputation",)}


class Right(torch.nn.Module):
    """Combines the results of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.look = torch.nn.Sequential(torch.nn.Conv2d(width, 4, 3), torch.nn.AdaptiveAvgPool2d(1))

    def forward(self, made: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        return self.look(made + mine)


class Towers(torch.nn.Module):
    """`left` uses the result of `made`; `right` uses it together with the result of `own`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def deep(layers: int) -> list[torch.nn.Module]:
            first = [torch.nn.Conv2d(width // 4, width, 3, padding=1), torch.nn.ReLU()]
            more = ((torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.ReLU()) for _ in range(layers))
            return first + [module for pair in more for module in pair]

        self.made = torch.nn.Sequential(torch.nn.Upsample(scale_factor=4), *deep(2))
        self.own = torch.nn.Sequential(*deep(3))
        self.left = torch.nn.Sequential(torch.nn.Conv2d(width, 4, 3), torch.nn.AdaptiveAvgPool2d(1))
        self.right = Right(width)

    def forward(self, small: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made, mine = self.made(small), self.own(own)
        return self.left(made), self.right(made, mine)


@attrs.frozen
class Servers:
    """One local server, and one behind a link."""

    urls: Sequence[str]
    token: str
    inside: list[str]

    @contextmanager
    def pooled(self, way: str) -> Iterator[None]:
        """Open a session over both, with values forced to be sent or recomputed."""
        djinn.shut_down()
        djinn.configure(
            plugins=[*PLUGINS, *WAYS[way]],
            servers=self.urls,
            token=self.token,
            disable=("local",),
            placement_policy="pinned",
            pins=PINS,
        )
        try:
            djinn.init()
            yield
        finally:
            djinn.shut_down()
            djinn.configure()


@contextmanager
def two_servers(bits_per_second: float, threads: int) -> Iterator[Servers]:
    if not permitted():
        raise CannotMeasureError("network namespaces are not permitted here")
    token = {"DJINN_TOKEN": "benchmark-" + "0" * 24}
    network = ["--store-gib", "0", "--insecure-plaintext-on-network", "--host"]
    with ExitStack() as stack:
        inside = stack.enter_context(namespace(Conditions(bits_per_second=bits_per_second)))
        near = stack.enter_context(served(*network, CLIENT, threads=threads, environment=token | hidden_from(inside)))
        far = stack.enter_context(served(*network, FAR, threads=threads, environment=token, prefix=inside))
        yield Servers((near.tcp, far.tcp), near.token, inside)


class Work:
    """The model and its inputs on both sides; each remote run is compared with local PyTorch."""

    def __init__(self, side: int) -> None:
        torch.manual_seed(0)
        self.model = Towers().eval()
        self.given = torch.randn(1, 8, side, side), torch.randn(1, 8, 4 * side, 4 * side)
        self.expected = torch.cat(self.model(*self.given))

    @contextmanager
    def moved(self) -> Iterator[Callable[[], None]]:
        """Yield a run while the model is remote."""
        ours, there = self.model.to(REMOTE), [g.to(REMOTE) for g in self.given]

        def run() -> None:
            assert torch.equal(torch.cat(ours(*there)).cpu(), self.expected)

        yield run
        self.model = ours.to("cpu")


def computes(run: Callable[[], None]) -> bool:
    """Return True if the latest plans recompute values, after a few runs."""
    with client.record_plans() as plans:
        for _ in range(WARM):
            run()
    return bool(plans and plans[-1].placement.replicas)


@torch.no_grad()
def recomputation(effort: Effort) -> Outcome:
    """Return the time of the chosen way divided by the other, where that is worst, and the adaptation to a link change."""
    work = Work(16 if effort.small else 45)
    figures: dict[str, float] = {}
    worst = 0.0
    for link, rate in LINKS.items():
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        with two_servers(rate, effort.threads) as servers:
            for turn in range(min(effort.rounds, ROUNDS)):
                for way in WAYS if turn % 2 else reversed(WAYS):
                    with servers.pooled(way), work.moved() as run:
                        again = computes(run)
                        if way == "chosen":
                            chosen = "computed" if again else "sent"
                        seconds[way].append(median_of(run, effort.times(8)))
        found = {way: statistics.median(times) for way, times in seconds.items()}
        figures |= {f"{way} at {link} ms": found[way] * 1e3 for way in WAYS}
        worst = max(worst, found[chosen] / min(found["sent"], found["computed"]))
    figures["runs to follow the link"] = float(following(work, effort))
    return Outcome(worst, figures | {"recompute_choices_right": float(worst == 1.0)})


def following(work: Work, effort: Effort) -> int:
    """Return the number of runs until sent values are recomputed after the link became slow."""
    with two_servers(FAST, effort.threads) as servers, servers.pooled("chosen"), work.moved() as run:
        for _ in range(WARM):
            run()
        change(SLOW, servers.inside)
        with client.record_plans() as plans:
            for runs in range(1, FOLLOWING):
                run()
                if plans and plans[-1].placement.replicas:
                    return runs
    return FOLLOWING


CASES = (Case("recomputation", 1.0, recomputation, keys=("recompute_choices_right",)),)
