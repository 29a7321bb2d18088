"""In the steady state of a growing loop nothing is found out anew: counted, stage by stage."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
import torch

import djinn
from djinn.testing import ProgramBuilder
from djinn_core.ir.program import Program
from djinn_core.pipeline import tolerate_growth
from djinn_core.runtime import client
from djinn_core.runtime.planning.plans import PlansByStructure

DEVICE = "remote_accelerator:0"
WORK = [
    "djinn_core.pipeline.annotate",
    "djinn_core.pipeline.estimate",
    "djinn_core.pipeline.optimize",
    "djinn_core.pipeline.place",
    "djinn_core.pipeline.schedule",
    "djinn_core.runtime.planning.session_plans.plan_program",
    "djinn_core.runtime.planning.plans.structure_of",
    "djinn_core.runtime.planning.planner.make_template",
]


class Decoder(torch.nn.Module):
    """Attention with a growing cache, some layers of it."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(layers))
        self.cache = [[torch.rand(1, 2, 8, 8, device=DEVICE) for _ in "kv"] for _ in range(layers)]

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        for layer, cache in zip(self.layers, self.cache, strict=True):
            query, *fresh = layer(state).view(1, 1, 3, 2, 8).permute(2, 0, 3, 1, 4)
            cache[:] = [torch.cat([old, new], -2) for old, new in zip(cache, fresh, strict=True)]
            mixed = torch.nn.functional.scaled_dot_product_attention(query, *cache)
            state = state + mixed.transpose(1, 2).reshape(1, 1, 16)
        return state


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        module, _, function = name.rpartition(".")
        real = getattr(__import__(module, fromlist=[function]), function)

        def run(*args, **kwargs):
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(name, run)

    for name in WORK:
        count(name)
    return calls


@torch.no_grad()
def test_a_growing_loop_finds_nothing_out_anew(embedded, monkeypatch):
    model = Decoder().to(DEVICE)
    state = torch.rand(1, 1, 16, device=DEVICE)
    calls = counted(monkeypatch)
    djinn.reset_stats()
    for step in range(100):
        if step == 8:
            assert all(calls[name] for name in WORK), "a stage that never ran is not counted"
            calls.clear()
        state = model(state)
        state.sum().item()
    assert not calls
    counts = djinn.stats()
    assert counts["plans_reused"] > 0.95 * (counts["plans_made"] + counts["plans_reused"])


def test_all_that_is_installed_tolerates_growth(embedded):
    """One that does not would have every step of every loop planned anew."""
    assert tolerate_growth(client.registry())


def program(length: int, width: int = 8, number: float = 0.5) -> Program:
    """A growing value through a layer, and times a number."""
    builder = ProgramBuilder()
    given, weight = builder.input(1, length, width), builder.input(width, width)
    made = builder.op("aten::linear", given, weight, shape=(1, length, width))
    builder.op("aten::mul.Scalar", made, shape=(1, length, width), slots=(number,))
    recorded = builder.program()
    calls = tuple(
        attrs.evolve(c, signature=SIGNATURES.setdefault(c.op, c.signature)) for c in recorded.calls
    )  # recorded programs share a signature between calls that differ in sizes only
    return attrs.evolve(recorded, calls=calls)


SIGNATURES: dict = {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (program(length=11), True),
        (program(length=100), True),
        (program(length=130), False),
        (program(length=10, number=0.25), True),
        (program(length=10, number=-0.5), False),
        (program(length=10, number=1.0), False),
        (program(length=10, width=9), False),
    ],
)
def test_what_counts_where_all_plugins_tolerate_growth_and_where_not(other, found):
    tolerant, exact = PlansByStructure[str](), PlansByStructure[str](exact=True)
    for plans in (tolerant, exact):
        plans.find(program(length=10))[0].append("first")
    assert bool(tolerant.find(other)[0]) is found
    assert exact.find(other)[0] == []
    assert exact.find(program(length=10))[0] == ["first"]
