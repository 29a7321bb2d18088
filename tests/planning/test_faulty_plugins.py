"""Planning skips a faulty plugin and logs its name and fault once."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from djinn.hooks import CostModel, NodePriority, Optimization, Pattern, PlacementPolicy, Scheduler
from djinn.planning import CostEstimate, OptimizationResult, PatternMatch, Placement, PlacementDecision, Rewrite
from djinn.testing import ProgramBuilder, topology
from djinn_core.errors import InvalidStage
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import PluginSetting
from djinn_profiler.explain.described import describe
from djinn_profiler.explain.text import explain

SQUARE = (3, 3)
WARNING = "a plugin failed and is left out"


@pytest.fixture(scope="module")
def registry():
    return load_registry(
        Selection(plugins=("cleanup",), plugin_settings=(PluginSetting("cleanup", "on", "yes", "argument"),)),
        builtins=builtin_plugins(),
    )


@pytest.fixture
def graph():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    first = builder.op("aten::tanh", x, shape=SQUARE)
    builder.op("aten::neg", builder.op("aten::tanh", first, shape=SQUARE), shape=SQUARE)
    return builder.graph()


def raises(*_):
    raise ValueError("oops")


def match(**fields):
    return PatternMatch(**{"pattern": "faulty", "nodes": (0,), "confidence": 0.5, "reason": "it is", **fields})


def also_matched(**fields):
    """Return matches with equal confidence, so that planning sorts them by their nodes."""
    return lambda *_: [match(), match(**fields)]


@attrs.define
class Faulty(Pattern, CostModel, Optimization, PlacementPolicy, Scheduler):
    """A plugin object for any stage. Each method calls `does`."""

    does: object
    name: str = "faulty"
    operations: frozenset[str] = frozenset({"tanh", "neg"})

    def match(self, *given):
        return self.does(*given)

    estimate = optimize = place = priority = match


def place_all_on_first(context, **fields):
    decisions = tuple(PlacementDecision(n, context.topology.devices[0].id, "there") for n in context.plan.nodes)
    values = {v: context.topology.devices[0].id for n in context.graph.nodes for v in (*n.inputs, *n.outputs)}
    return Placement(**{"decisions": decisions, "values": values, **fields})


def prioritized(key=lambda node: node, reason="because", **fields):
    """Return a function that returns these priorities."""
    return lambda _: NodePriority(key, reason, **fields)


def refuses_fewer(context):
    """Place values beyond a device's memory; raise for a topology with one device."""
    if len(context.topology.devices) > 1:
        return place_all_on_first(context)
    raise KeyError("the device that it likes")


def clear_mapping(mapping):
    mapping.clear()


PATTERNS = {
    "raises": raises,
    "returns None": lambda *_: None,
    "returns a number": lambda *_: 3,
    "returns what is no match": lambda *_: [SimpleNamespace(nodes=(0,), residency={}, confidence=0.5, pattern="a")],
    "raises when it is listed": lambda *_: (raises() for _ in range(1)),
    "nodes are text": also_matched(nodes=("a",)),
    "nodes are None": also_matched(nodes=None),
    "nodes are elsewhere": also_matched(nodes=(7,)),
    "the name is None": also_matched(pattern=None),
    "the confidence is text": also_matched(confidence="high"),
    "the reason is None": also_matched(reason=None),
    "hints are None": also_matched(hints=None),
    "hints are a list": also_matched(hints=[1]),
    "the phase is text": also_matched(phase="llm_decode"),
    "the modality is text": also_matched(modality="text"),
    "residency is text": also_matched(residency={1: "weight"}),
    "residency is None": also_matched(residency=None),
    "details are None": also_matched(details=None),
    "writes into the graph": lambda graph, _: clear_mapping(graph.by_op),
}
COST_MODELS = {
    "raises": raises,
    "returns a number": lambda *_: 3.0,
    "returns what is no estimate": lambda *_: SimpleNamespace(
        flops=1, operations=1, bytes_read=1, bytes_written=1, seconds=1.0, workspace=0
    ),
    "seconds are text": lambda *_: CostEstimate(1.0, 1, 1, "fast"),
    "seconds are nan": lambda *_: CostEstimate(1.0, 1, 1, float("nan")),
    "workspace is None": lambda *_: CostEstimate(1.0, 1, 1, 1.0, workspace=None),
    "the model is None": lambda *_: CostEstimate(1.0, 1, 1, 1.0, model=7),
}
OPTIMIZATIONS = {
    "raises": raises,
    "returns None": lambda _: None,
    "returns what is no result": lambda _: SimpleNamespace(applied=True, rewrite=Rewrite(), optimization="faulty"),
    "the rewrite is None": lambda _: OptimizationResult("faulty", True, "so", None),
    "the reason is None": lambda _: OptimizationResult("faulty", False, None),
    "drops text": lambda _: OptimizationResult("faulty", True, "so", Rewrite(drop=frozenset({"a"}))),
    "drops None": lambda _: OptimizationResult("faulty", True, "so", Rewrite(drop=None)),
    "hints are None": lambda _: OptimizationResult("faulty", True, "so", Rewrite(hints=None)),
    "replaces by text": lambda _: OptimizationResult("faulty", True, "so", Rewrite(replace={1: "a"})),
    "replaces in a circle": lambda _: OptimizationResult("faulty", True, "so", Rewrite(replace={1: 2, 2: 1})),
    "slots are numbers": lambda _: OptimizationResult("faulty", True, "so", Rewrite(equal_slots=(1,))),
    "slots are texts": lambda _: OptimizationResult("faulty", True, "so", Rewrite(equal_slots=(("a", "b"),))),
    "substitutes text": lambda _: OptimizationResult("faulty", True, "so", Rewrite(substitutions=("a",))),
    "replicas are None": lambda _: OptimizationResult("faulty", True, "so", Rewrite(replicas=None)),
    "writes into its context": lambda context: clear_mapping(context.resident),
}
POLICIES = {
    "raises": raises,
    "returns None": lambda _: None,
    "returns what is no placement": lambda context: SimpleNamespace(
        **attrs.asdict(place_all_on_first(context), recurse=False)
    ),
    "places nothing": lambda context: place_all_on_first(context, decisions=()),
    "decisions are text": lambda context: place_all_on_first(context, decisions=("a",)),
    "values are None": lambda context: place_all_on_first(context, values=None),
    "values are texts": lambda context: place_all_on_first(context, values={"a": "b"}),
    "copies are None": lambda context: place_all_on_first(context, copies=None),
    "copies are texts": lambda context: place_all_on_first(context, copies={1: "ab"}),
    "replicas are texts": lambda context: place_all_on_first(context, replicas=("a",)),
    "pins None": lambda context: place_all_on_first(context, fixed_nodes=None),
    "the policy is None": lambda context: place_all_on_first(context, policy=None),
    "writes into its context": lambda context: clear_mapping(context.resident),
    "raises in the second round": refuses_fewer,
}
SCHEDULERS = {
    "raises": raises,
    "returns None": lambda _: None,
    "returns a function": lambda _: lambda node: node,
    "returns what is no priority": lambda _: SimpleNamespace(key=lambda node: node, reason="", strict=False),
    "the key is None": prioritized(None),
    "the key raises": prioritized(raises),
    "keys cannot be compared": prioritized(lambda node: object()),
    "strict keys cannot be compared": prioritized(lambda node: node or "a", strict=True),
    "the reason is None": prioritized(reason=None),
    "group priorities raise": prioritized(group_priority=raises),
    "the group priority is a number": prioritized(group_priority=3),
    "writes into its context": lambda context: clear_mapping(context.resident),
}
KINDS = {
    "pattern": ("patterns", PATTERNS),
    "cost model": ("cost_models", COST_MODELS),
    "optimization": ("optimizations", OPTIMIZATIONS),
    "placement policy": ("placement_policies", POLICIES),
    "scheduler": ("schedulers", SCHEDULERS),
}
CASES = [(kind, fault) for kind, (_, faults) in KINDS.items() for fault in faults]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_planning_names_and_skips_a_faulty_plugin(registry, graph, caplog, kind, fault):
    member, faults = KINDS[kind]
    limits = {"0/cpu:0": 1} if fault == "raises in the second round" else {}
    devices = topology(2)
    limits = {devices.devices[0].id: 1} if limits else {}
    request = Request(devices, memory_limits=limits)
    chosen = {"placement policy": {"placement_policy": "faulty"}, "scheduler": {"scheduler": "faulty"}}.get(kind, {})
    without = plan(graph, registry, request)
    faulty = registry.evolve(**{member: (Faulty(faults[fault]), *getattr(registry, member))})
    caplog.clear()
    result = plan(graph, faulty, attrs.evolve(request, **chosen))
    named = [r for r in caplog.records if WARNING in r.getMessage()]
    assert len(named) == 1
    text = named[0].getMessage() + str(vars(named[0]))
    assert f"{kind} 'faulty'" in text
    assert "test_faulty_plugins" in text
    assert result.schedule.steps == without.schedule.steps
    assert result.placement.values == without.placement.values
    assert result.plan.nodes == without.plan.nodes
    assert result.profile.patterns == without.profile.patterns
    assert explain(result)
    assert describe(result)


def test_pattern_match_converts_a_list_of_nodes(registry, graph, caplog):
    given = registry.evolve(patterns=(Faulty(also_matched(nodes=[0])),))
    found = plan(graph, given, Request(topology())).profile.patterns
    assert [one.nodes for one in found] == [(0,), (0,)]
    assert not [r for r in caplog.records if WARNING in r.getMessage()]


def test_dynamic_scheduler_without_a_fitting_order_is_not_logged_as_failed(graph, caplog):
    dynamic = load_registry(Selection(plugins=("dynamic",)), builtins=builtin_plugins())
    devices = topology(1)
    with pytest.raises(InvalidStage):
        plan(graph, dynamic, Request(devices, memory_limits={devices.devices[0].id: 40}, scheduler="dynamic"))
    assert not [r for r in caplog.records if WARNING in r.getMessage()]
