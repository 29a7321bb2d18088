"""Computing a value again or sending it: both ways forced, beside what is chosen, over a slow and a fast link between executors.

Two networks stand on two executors and use what a third one makes on the first of them: 4 MB that come of 70 kB in about as many
milliseconds as the second has work of its own. At 100 Mbit/s sending takes ten times as long as computing, at 10 Gbit/s a tenth.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from links import CLIENT, Conditions, namespace, permitted
from links import SERVER as FAR
from measuring import CannotMeasureError, Case, Effort, Outcome, median_of
from serving import server, url_of

import djinn
from djinn.hooks import Optimization, hookimpl
from djinn_recomputation import Recomputation

REMOTE = "remote_accelerator:0"
LINKS = {"100 Mbit/s": 1e8, "10 Gbit/s": 1e10}
EQUAL = 1.05  # times so close are as good as each other
PLUGINS = ("tcp", "pinned", "cleanup")
PINS = {"made*": "0", "left*": "0", "own*": "1", "right*": "1"}


class Forced:
    """The optimization, computing again whatever can be."""

    djinn_api_version = 1

    @hookimpl
    def djinn_register_optimizations(self) -> list[Optimization]:
        return [Recomputation(lambda found, _: found[-1])]


WAYS = {"sent": (), "computed": (Forced(),), "chosen": ("recomputation",)}


class Towers(torch.nn.Module):
    """What `made` makes is used by `left`, and by `right` together with what `own` makes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def deep(layers: int) -> list[torch.nn.Module]:
            pairs = ((torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.ReLU()) for _ in range(layers))
            return [module for pair in pairs for module in pair]

        first = torch.nn.Conv2d(width // 4, width, 3, padding=1)
        self.made = torch.nn.Sequential(torch.nn.Upsample(scale_factor=4), first, torch.nn.ReLU(), *deep(2))
        self.own = torch.nn.Sequential(torch.nn.Conv2d(width // 4, width, 3, padding=1), torch.nn.ReLU(), *deep(3))
        self.left, self.right = (
            torch.nn.Sequential(torch.nn.Conv2d(width, 4, 3), torch.nn.AdaptiveAvgPool2d(1)) for _ in range(2)
        )

    def forward(self, small: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.made(small)
        mine = self.own(own)
        return self.left(made), self.right(made + mine)


@contextmanager
def two_servers(conditions: Conditions, threads: int) -> Iterator[tuple[Sequence[str], str]]:
    """One here, one at the other end of a link: their URLs and their token."""
    if not permitted():
        raise CannotMeasureError("network namespaces are not permitted here")
    token = {"DJINN_TOKEN": "benchmark-" + "0" * 24}
    network = ["--store-gib", "0", "--insecure-plaintext-on-network", "--host"]
    with ExitStack() as stack:
        inside = stack.enter_context(namespace(conditions))
        near = stack.enter_context(server(*network, CLIENT, threads=threads, environment=token))
        far = stack.enter_context(server(*network, FAR, threads=threads, environment=token, prefix=inside))
        yield (url_of(near), url_of(far)), near.token


@torch.no_grad()
def seconds_by_way(conditions: Conditions, effort: Effort) -> dict[str, float]:
    """The median time of a run, by way."""
    torch.manual_seed(0)
    side = 16 if effort.small else 45
    model = Towers().eval()
    given = torch.randn(1, 8, side, side), torch.randn(1, 8, 4 * side, 4 * side)
    expected = model(*given)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with two_servers(conditions, effort.threads) as (urls, token):
        for turn in range(effort.rounds):
            for way in WAYS if turn % 2 else reversed(WAYS):
                djinn.configure(
                    plugins=[*PLUGINS, *WAYS[way]],
                    servers=urls,
                    token=token,
                    disable=("local",),
                    placement_policy="pinned",
                    pins=PINS,
                )
                try:
                    ours, there = model.to(REMOTE), [g.to(REMOTE) for g in given]
                    for _ in range(3):
                        for mine, other in zip(ours(*there), expected, strict=True):
                            assert torch.equal(mine.cpu(), other)
                    found[way].append(median_of(lambda: torch.cat(ours(*there)).cpu(), effort.times(8)))  # noqa: B023
                    model = ours.to("cpu")
                finally:
                    djinn.configure()
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def recomputation(effort: Effort) -> Outcome:
    """The chosen way over the better one, where that is worst."""
    figures: dict[str, float] = {}
    worst = 0.0
    for link, rate in LINKS.items():
        seconds = seconds_by_way(Conditions(bits_per_second=rate), effort)
        figures |= {f"{way} at {link} ms": seconds[way] * 1e3 for way in WAYS}
        worst = max(worst, seconds["chosen"] / min(seconds["sent"], seconds["computed"]))
    return Outcome(worst, figures | {"recompute_choices_right": float(worst <= EQUAL)})


CASES = (Case("recomputation", EQUAL, recomputation, keys=("recompute_choices_right",)),)
