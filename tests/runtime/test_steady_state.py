"""In the steady state of a growing loop nothing is found out again: counted, stage by stage."""

from __future__ import annotations

import random
from collections import Counter

import attrs
import pytest
import torch
from long_forms import long_or

import djinn
from djinn.hooks import Event, Observer, Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite, Substitution
from djinn.testing import ProgramBuilder
from djinn_client.runtime import client
from djinn_client.runtime.planning.plan_cache import PlanCache
from djinn_client.runtime.planning.plan_maker import growth_intolerant_plugins_in
from djinn_client.runtime.planning.session_planner import drop_plans
from djinn_client.runtime.planning.size_range import FACTOR, NARROW_FACTOR
from djinn_client.runtime.sending import submissions
from djinn_client.runtime.sending.submissions import framed
from djinn_core.ir.program import Program
from djinn_core.wire.messages import Submit

DEVICE = "remote_accelerator:0"
WORK = [
    "djinn_core.planning.pipeline.annotate",
    "djinn_core.planning.pipeline.estimate",
    "djinn_core.planning.pipeline.optimize",
    "djinn_core.planning.pipeline.place",
    "djinn_core.planning.pipeline.schedule",
    "djinn_client.runtime.planning.plan_maker.plan_program",
    "djinn_client.runtime.planning.plan_cache._new_structure",
    "djinn_client.runtime.planning.planner.make_template",
]

ONCE = ("submissions", "messages_sent", "messages_received", "round_trips", "templates_reused")


class Decoder(torch.nn.Module):
    """Several layers of attention with a growing cache."""

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


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
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


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "as_recorded"])
@torch.no_grad()
def test_growing_loop_reuses_plans_and_templates(embedded, monkeypatch, request, planned):
    if planned:
        request.getfixturevalue("plans_all")
    drop_plans(client.context)
    work = WORK if planned else WORK[-2:]
    model = Decoder().to(DEVICE)
    state = torch.rand(1, 1, 16, device=DEVICE)
    calls = count_calls(monkeypatch)
    djinn.reset_stats()
    for step in range(100):
        if step == 8:
            assert all(calls[name] for name in work), "a stage that never ran is not counted"
            calls.clear()
        state = model(state)
        state.sum().item()
    assert not calls
    counts = djinn.stats()
    assert not planned or counts["plans_reused"] > 0.95 * (counts["plans_made"] + counts["plans_reused"])


def test_known_step_takes_one_small_message_each_way(embedded):
    x = torch.randn(8, 8).to(DEVICE)

    def step() -> float:
        return (x + 1).sum().item()

    for _ in range(60):  # until fetches are predicted
        step()
    djinn.reset_stats()
    step()
    counts = djinn.stats()
    assert {name: counts[name] for name in ONCE} == dict.fromkeys(ONCE, 1)
    assert (counts["ops_inferred"], counts["templates_sent"], counts["plans_made"]) == (0, 0, 0)
    assert counts["bytes_sent"] <= 120  # 78 in a new process; numbers of handles and messages take more bytes later
    assert counts["bytes_received"] <= 180  # 139, of which some report the executor's free memory


class Tracer(Observer):
    """An observer with a trace context for each submission."""

    name = "tracer"

    def observe(self, event: Event) -> None: ...

    def __len__(self) -> int:
        return 0  # as of one that has no spans to show: it traces nevertheless

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        return f"00-{number:032x}-{number:016x}-01"


def test_known_template_carries_trace_context(embedded, monkeypatch):
    sent: list[Submit] = []
    monkeypatch.setattr(submissions, "framed", lambda message: sent.append(message) or framed(message))
    x = torch.ones(3, device=DEVICE)
    with client.observed_by(Tracer()):
        for _ in range(4):
            assert (x * 2 + 1).sum().item() == 9
    assert sent[-1].digest
    assert sent[-1].template is None
    assert [one.trace for one in sent] == [Tracer().trace_context("submission", 0, one.sequence) for one in sent]


def test_installed_plugins_tolerate_growth(embedded):
    """Plans of a program with an intolerant plugin cover fewer sizes."""
    assert growth_intolerant_plugins_in(*client.context.configured(), 1) == ()


def share_signatures(recorded: Program) -> Program:
    """Return the program with one signature for all calls of an op that differ only in sizes."""
    calls = tuple(
        attrs.evolve(c, signature=SIGNATURES.setdefault((c.op, len(c.operands)), c.signature)) for c in recorded.calls
    )
    return attrs.evolve(recorded, calls=calls)


def program(length: int, width: int = 8, number: float = 0.5) -> Program:
    """Return a program with a growing value through a layer, multiplied by a number."""
    builder = ProgramBuilder()
    given, weight = builder.input(1, length, width), builder.input(width, width)
    made = builder.op("aten::linear", given, weight, shape=(1, length, width))
    builder.op("aten::mul.Scalar", made, shape=(1, length, width), slots=(number,))
    return share_signatures(builder.program())


SIGNATURES: dict = {}


@pytest.mark.parametrize(
    ("other", "wide", "narrow"),
    [
        ({"length": 11}, True, True),
        ({"length": 40}, True, True),
        ({"length": 41}, True, False),
        ({"length": 3}, True, True),
        ({"length": 2}, True, False),
        ({"length": 160}, True, False),
        ({"length": 161}, False, False),
        ({"length": 10, "number": 0.25}, True, True),
        ({"length": 10, "number": -0.5}, False, False),
        ({"length": 10, "number": 1.0}, False, False),
        ({"length": 10, "width": 9}, False, False),
    ],
)
def test_plan_covers_range_of_sizes(other, wide, narrow):
    for factor, found in ((FACTOR, wide), (NARROW_FACTOR, narrow)):
        plans = PlanCache[str](factor)
        plans.find(program(length=10))[0].append("first")
        assert bool(plans.find(program(**other))[0]) is found
        assert plans.find(program(length=10))[0] == ["first"]


def test_only_size_scalars_have_ranges():
    def view_with_size(length: int, dim: int) -> Program:
        builder = ProgramBuilder()
        given = builder.input(4, 64)
        part = builder.op("aten::slice.Tensor", given, shape=(4, length), slots=(dim, 0, length, 1))
        builder.op("aten::relu", part, shape=(4, length))
        return builder.program()

    plans = PlanCache[str]()
    plans.find(share_signatures(view_with_size(10, 1)))[0].append("first")
    assert plans.find(share_signatures(view_with_size(12, 1)))[0] == ["first"]
    assert plans.find(share_signatures(view_with_size(12, 0)))[0] == []


@pytest.mark.usefixtures("plans_all")
def test_many_sizes_share_few_plans(embedded):
    """Encoders get sequences of random length. The number of plans equals the number of size ranges."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    draw = random.Random(0)

    def steps(count: int) -> int:
        before = djinn.stats()["plans_made"]
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.randn(draw.randint(2, 9), draw.randint(5, 119), 16, device=DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()
        return djinn.stats()["plans_made"] - before

    steps(long_or(30, 60))
    assert steps(long_or(25, 60)) <= 3


class SilentOptimization(Optimization):
    """An optimization that does nothing and does not declare `tolerates_growth`."""

    name = "innocent"

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        return OptimizationResult(self.name, applied=False, reason="there is nothing to do")


class DropsUnreachedBound(SilentOptimization):
    """An optimization that drops an upper bound that a program of ones never reaches. It declares nothing."""

    name = "drops"

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        found = [n for n in context.graph.nodes if n.operation == "clamp" and n.slots[-1] >= 1]
        if not found:
            return OptimizationResult(self.name, applied=False, reason="every bound may be reached")
        replace = {n.outputs[0]: n.inputs[0] for n in found if n.outputs[0] not in context.kept}
        return OptimizationResult(self.name, bool(replace), "1", Rewrite(frozenset(n.id for n in found), replace))


@pytest.fixture
def session_with_optimization():
    """Return a function that opens a session with one optimization, which the executor need not import."""

    def begin(one: SilentOptimization, executors: int = 1) -> str:
        djinn.shut_down()
        djinn.configure(plugins=["pool"], executors=executors)
        client.context.registry = client.registry().evolve(optimizations=(one,))
        return DEVICE

    yield begin
    djinn.shut_down()


def test_undeclared_plugin_sees_representative_sizes(session_with_optimization):
    device = session_with_optimization(SilentOptimization())
    draw, weight = random.Random(0), torch.rand(8, 8, device=device)

    def steps(count: int) -> int:
        before = djinn.stats()["plans_made"]
        for _ in range(count):
            given = torch.ones(draw.randint(5, 119), 8, device=device)
            assert (given @ weight * draw.random()).sum().item() >= 0
        return djinn.stats()["plans_made"] - before

    steps(40)
    assert steps(40) <= 1
    assert "optimization 'innocent'" in growth_intolerant_plugins_in(*client.context.configured(), 1)


@pytest.mark.parametrize("executors", [1, 2])
def test_rewrite_of_undeclared_plugin_is_size_specific(session_with_optimization, executors):
    device = session_with_optimization(DropsUnreachedBound(), executors)
    for size in (5, 6, 7, 8, 9, 10):
        for bound in (9.5, 0.5, 9.5, 0.25):
            # No part of an assertion: pytest keeps what an assertion computes, and what is kept is not dropped.
            total = (torch.ones(size, 3, device=device).clamp(max=bound) + 1).sum().item()
            assert total == size * 3 * (min(bound, 1) + 1)


class FusesSum(SilentOptimization):
    """An optimization that replaces `x + x` by `2 * x` for the sizes that it saw."""

    name = "fuses"

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        made = [
            Substitution(frozenset({n.id}), (n.inputs[0],), n.outputs, lambda given: [given[0] * 2])
            for n in context.graph.nodes
            if n.operation == "add" and n.inputs[0] == n.inputs[-1]
        ]
        return OptimizationResult(self.name, bool(made), "twice", Rewrite(substitutions=tuple(made)))


def test_substitutions_stop_if_sizes_keep_changing(session_with_optimization):
    device = session_with_optimization(FusesSum())
    djinn.reset_stats()
    for size in range(5, 60):
        given = torch.ones(size, 3, device=device)
        assert (given + given).sum().item() == size * 6
    assert djinn.stats()["plans_made"] <= 10
    assert djinn.stats()["plans_for_sizes, optimization 'fuses'"] > 0
