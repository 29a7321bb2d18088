"""Nodes that run on two devices: every device has right values, nothing is sent that is made there, nonsense is refused."""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from djinn.errors import InvalidStage
from djinn.planning import DataResidency, PlacementDecision, Receive, Rewrite, Run, Send, simulate
from djinn.testing import (
    ProgramBuilder,
    placement_context,
    random_graph,
    random_inputs,
    replay,
    replay_schedule,
    scheduling_context,
)
from djinn_core.ir.replicas import repeatable, with_replicas
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.stages.schedule import build_schedule
from djinn_core.planning.stages.verify import check_placement
from djinn_core.planning.stages.verify_rewrite import check_rewrite
from djinn_core.planning.stages.verify_schedule import check_schedule

_PROFILE = placement_context(random_graph(0)).profile


def replicate(context, chosen):
    """Return the context with replicas of some nodes, given as pairs of node and device."""
    replicas = tuple(PlacementDecision(node, device, "a test wants it") for node, device in chosen)
    plan = attrs.evolve(context.plan, replicas=replicas)
    profile = attrs.evolve(_PROFILE, residency=dict.fromkeys(context.graph.inputs[1:], DataResidency.PERSISTENT_WEIGHT))
    return attrs.evolve(context, plan=plan, placement=with_replicas(context.graph, context.placement, plan, profile))


@pytest.mark.parametrize("seed", range(24))
def test_replicated_nodes_keep_values(seed):
    chance = random.Random(seed)
    context = scheduling_context(random_graph(seed), devices=3)
    graph, placement = context.graph, context.placement
    home = {d.node: d.device for d in placement.decisions}
    chosen = [
        (node.id, device.id)
        for node in graph.nodes
        for device in context.topology.devices
        if repeatable(node) and device.id != home[node.id] and chance.random() < 0.4
    ]
    resident = {v: placement.values[v] for v in graph.inputs if chance.random() < 0.5}
    context = attrs.evolve(replicate(context, chosen), resident=resident, fetch=graph.outputs)
    made = build_schedule(context, Sequential())
    check_schedule(context, made, "replicas")
    inputs = random_inputs(graph)
    _, fetched = replay_schedule(graph, made, inputs, resident)
    expected = replay(graph, inputs)
    for value in graph.outputs:
        assert torch.equal(fetched[value], expected[value])
    simulate(context, made)


def diamond():
    """Return a context whose first value is used on two devices, the second device, and that value."""
    builder = ProgramBuilder()
    small, weight = builder.input(3, 3), builder.input(3, 3)
    wide = builder.op("aten::mm", small, weight, shape=(3, 3))
    left = builder.op("aten::tanh", wide, shape=(3, 3))
    right = builder.op("aten::relu", wide, shape=(3, 3))
    builder.drop(wide)
    context = scheduling_context(builder.graph(), devices=2)
    one, other = (d.id for d in context.topology.devices)
    homes = {small: one, weight: one, wide: one, left: one, right: other}
    decisions = tuple(PlacementDecision(n, d, "a test") for n, d in enumerate((one, one, other)))
    placement = attrs.evolve(context.placement, decisions=decisions, values=homes)
    return attrs.evolve(context, placement=placement, resident={small: one, weight: one}), other, wide


def test_replicated_results_are_not_sent():
    context, other, wide = diamond()
    assert any(isinstance(s, Receive) and s.value == wide for s in build_schedule(context, Sequential()).steps[other])
    context = replicate(context, [(0, other)])
    made = build_schedule(context, Sequential())
    check_schedule(context, made, "x")
    steps = made.steps[other]
    assert [s.value for s in steps if isinstance(s, Receive)] == list(context.graph.inputs)
    assert [n for s in steps if isinstance(s, Run) for n in s.nodes] == [0, 2]
    small, weight = context.graph.inputs
    assert context.placement.copies == {weight: (other,)}
    assert not any(isinstance(s, Send) and s.value == wide for steps in made.steps.values() for s in steps)
    freed = [v for s in steps if hasattr(s, "values") for v in s.values]
    assert freed == [small, wide]  # the weight stays


def test_invalid_replica_is_refused():
    context, other, _ = diamond()
    plain = build_schedule(context, Sequential())
    context = replicate(context, [(0, other)])
    with pytest.raises(InvalidStage, match="replicas never run"):
        check_schedule(context, plain, "x")
    made = build_schedule(context, Sequential())
    there = tuple(s for s in made.steps[other] if not isinstance(s, Receive))
    with pytest.raises(InvalidStage, match="never received"):
        check_schedule(context, attrs.evolve(made, steps={**made.steps, other: there}), "x")


@pytest.mark.parametrize(
    ("node", "device", "message"),
    [
        (0, "server/cpu:1", None),
        (0, "server/cpu:0", "runs already"),
        (0, "server/cpu:9", "not a device"),
        (1, "server/cpu:1", "writes, draws random numbers, has an effect"),
        (2, "server/cpu:1", "writes, draws random numbers, has an effect"),
        (3, "server/cpu:1", "reads beyond its operand"),
    ],
)
def test_only_deterministic_nodes_are_replicated(node, device, message):
    builder = ProgramBuilder()
    x = builder.input(3, 3)
    y = builder.op("aten::tanh", x, shape=(3, 3))
    builder.inplace("aten::mul_.Scalar", y, slots=(2.0,))
    builder.op("aten::rand_like", x, shape=(3, 3), random=True)
    builder.view("aten::as_strided", x, shape=(3, 3))
    graph = builder.graph()
    context = placement_context(graph, devices=2)
    first = context.topology.devices[0].id
    replica = PlacementDecision(node, device, "a test")
    plan = attrs.evolve(context.plan, replicas=(replica,))
    placement = with_replicas(graph, SingleDevice().place(context), plan, context.profile)
    assert placement.devices == (first,)
    if message is None:
        check_placement(context, placement, "x")
        check_rewrite(graph, context.plan, Rewrite(replicas=(replica,)), frozenset(), "x")
        return
    with pytest.raises(InvalidStage, match=message):
        check_placement(context, placement, "x")
    if "effect" in message:
        with pytest.raises(InvalidStage, match=message):
            check_rewrite(graph, context.plan, Rewrite(replicas=(replica,)), frozenset(), "x")
