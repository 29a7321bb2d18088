"""The order of the stages, stopping after any of them, and the second pass after placement."""

from __future__ import annotations

import json

import attrs
import pytest

from djinn.hooks import CostModel, Optimization
from djinn.testing import ProgramBuilder, random_graph, topology
from djinn_client.interception.recording.substitute import rewrite
from djinn_core.errors import ConfigurationError
from djinn_core.ir.plan import OptimizationResult, Rewrite
from djinn_core.ir.result import STAGES, without_later_stages
from djinn_core.ir.substitution import Substitution
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import PluginSetting
from djinn_profiler.explain.described import describe
from djinn_profiler.explain.text import explain
from djinn_profiler.plans.scheduler import Scheduler

FIELDS = dict(zip(STAGES, ("profile", "costs", "plan", "placement", "schedule"), strict=True))


@pytest.fixture(scope="module")
def registry():
    return load_registry(
        Selection(
            plugins=("attention", "kv_cache", "cleanup"),
            plugin_settings=(PluginSetting("cleanup", "on", "yes", "argument"),),
        ),
        builtins=builtin_plugins(),
    )


@pytest.mark.parametrize("until", STAGES)
def test_plan_stops_after_any_stage(until, registry):
    result = plan(random_graph(0), registry, Request(topology(), until=until))
    made = [stage for stage, field in FIELDS.items() if getattr(result, field) is not None]
    assert made == list(STAGES[: STAGES.index(until) + 1])
    text, described = explain(result), json.loads(json.dumps(describe(result)))
    for stage in STAGES:
        assert (stage in described) is (stage in made)
        assert any(line.split()[0] == stage for line in text.splitlines()) is (stage in made)
    whole = plan(random_graph(0), registry, Request(topology()))
    assert describe(without_later_stages(whole, until)).keys() == described.keys()


@pytest.mark.parametrize("field", ["placement_policy", "scheduler"])
def test_unknown_choice_names_available_ones(field, registry):
    with pytest.raises(ConfigurationError, match=r"'nonsense'; available: (single|sequential)"):
        plan(random_graph(0), registry, attrs.evolve(Request(topology()), **{field: "nonsense"}))


def test_misspelt_policy_is_suggested(registry):
    with pytest.raises(ConfigurationError, match="did you mean 'single'"):
        plan(random_graph(0), registry, Request(topology(), placement_policy="singel"))


@attrs.define
class WatchingOptimization(Optimization):
    """An optimization that records its calls and gives a hint once the placement is known."""

    name: str
    after_placement: bool
    passes: list = attrs.field(factory=list)
    exact: bool = True

    def optimize(self, context):
        self.passes.append(context.placement is not None)
        hints = {"moved": (1,)} if context.placement else {}
        return OptimizationResult(self.name, bool(hints), "watched", Rewrite(hints=hints))


def test_optimizations_run_again_after_placement(registry):
    once, twice = (
        WatchingOptimization("once", after_placement=False),
        WatchingOptimization("twice", after_placement=True),
    )
    watched = registry.evolve(optimizations=(once, twice))
    result = plan(random_graph(0), watched, Request(topology(2)))
    assert once.passes == [False]
    assert twice.passes == [False, True]
    assert result.plan.hints["moved"] == (1,)
    assert [r.optimization for r in result.plan.results] == ["once", "twice"]  # in the first pass it did nothing
    assert "moved 1" in explain(result)


def test_plan_explanation_gives_reasons(registry):
    text = explain(plan(random_graph(2, length=60), registry, Request(topology())))
    assert "common_subexpressions applied" in text
    assert "the first device" in text
    assert "program order; 1 groups in 1 stages" in text
    assert "matrix products" in text


def test_skipped_inexact_optimization_is_named(registry):
    rounds = WatchingOptimization("rounds", after_placement=False, exact=False)
    with_it = registry.evolve(optimizations=(*registry.optimizations, rounds))
    text = explain(plan(random_graph(0), with_it, Request(topology())))
    assert "rounds not applied: its results may round otherwise; djinn.configure(exact=False) allows that" in text
    assert rounds.passes == []
    assert "may round otherwise" not in explain(plan(random_graph(0), with_it, Request(topology(), exact=False)))
    assert rounds.passes == [False]


@attrs.define
class FailingPlugin(CostModel):
    """A plugin object of each kind that raises."""

    name: str = "fails"

    def estimate(self, graph, node, device):
        raise ArithmeticError("no estimate")


def test_failing_cost_model_keeps_schedule_correct(registry, caplog):
    graph = random_graph(4)
    scheduler = Scheduler(topology(), registry.evolve(cost_models=(FailingPlugin(), *registry.cost_models)))
    made = scheduler.create_schedule(graph)
    assert made.scheduler == "sequential"
    assert sorted(n for g in made.groups for n in g.nodes)
    assert len([r for r in caplog.records if "'fails'" in r.getMessage()]) == 1
    assert scheduler.get_stats()["cost_aware"] == 1


class BrokenRegistry:
    """A registry without the lists that planning needs."""

    def __getattr__(self, name):
        raise LookupError(f"no {name} here")


def test_planning_falls_back_to_basic_and_minimal_schedule(caplog):
    graph = random_graph(5)
    basic = Scheduler(topology(), BrokenRegistry())
    made = basic.create_schedule(graph)
    assert "LookupError: no rows here" in made.reasons[0]
    assert made.scheduler == "sequential"
    assert basic.get_stats()["basic"] == 1
    nothing = Scheduler(attrs.evolve(topology(), devices=()), BrokenRegistry())
    made = nothing.create_schedule(graph)
    assert made.scheduler == "minimal"
    assert [n for g in made.groups for n in g.nodes] == [n.id for n in graph.nodes]
    assert len([r for r in caplog.records if "a scheduling method failed" in r.getMessage()]) == 3


def test_scheduler_caches_and_counts(registry):
    graph, scheduler = random_graph(6), Scheduler(topology(), registry)
    first = scheduler.create_schedule(graph)
    assert scheduler.create_schedule(graph) is first
    counts = scheduler.get_stats()
    assert (counts["hits"], counts["misses"], counts["cost_aware"]) == (1, 1, 1)


def test_scheduler_accepts_given_plan(registry):
    graph = random_graph(2, length=60)
    result = plan(graph, registry, Request(topology(), until="optimize"))
    assert len(result.plan.nodes) < len(graph.nodes)
    made = Scheduler(topology(), registry).create_schedule(graph, result.plan)
    assert sorted(n for g in made.groups for n in g.nodes) == list(result.plan.nodes)
    assert made.replace == result.plan.replace


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (
            lambda given: [given[0].double()],
            "returns a torch.float64 tensor of shape (4, 4) instead of a torch.float32",
        ),
        (lambda given: [given[0] / 0 if given[0].sum() > 0 else given[0]], "needs data"),
        (lambda given: [given[1]], "its code raised IndexError: list index out of range"),
    ],
)
def test_failed_substitution_gives_reason(registry, compute, why):
    builder = ProgramBuilder()
    builder.op("aten::relu", builder.input(4, 4), shape=(4, 4))
    graph = builder.graph()

    class SubstitutingOptimization(Optimization):
        name = "substituting"

        def optimize(self, context):
            (node,) = context.graph.nodes
            change = Rewrite(substitutions=(Substitution(frozenset({0}), node.inputs, node.outputs, compute),))
            return OptimizationResult(self.name, True, "so", change)

    plugins = registry.evolve(optimizations=(SubstitutingOptimization(),))
    (result,) = plan(graph, plugins, Request(topology(), until="optimize", rewrite=rewrite)).plan.results
    assert not result.applied
    assert result.reason.startswith("its substitution cannot be recorded: ")
    assert why in result.reason
