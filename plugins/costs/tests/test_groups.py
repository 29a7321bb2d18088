"""Placement of concurrent groups: each on its own device, the last with the inputs, if that is faster."""

from __future__ import annotations

import attrs
import pytest

from djinn.planning import CostEstimate, Costs
from djinn.testing import ProgramBuilder, placement_context
from djinn_costs.cost_based import CostBased


def place_two_chains(seconds, resident=False):
    """Return two chains of products, each with a weight, that are joined at the end, and the placement of their nodes."""
    builder = ProgramBuilder()
    weight, given = builder.input(64, 64), [builder.input(64, 64) for _ in range(2)]
    groups = []
    for turn in range(2):
        first = len(builder.calls)
        for _ in range(3):
            given[turn] = builder.op("aten::mm", given[turn], weight, shape=(64, 64))
        groups.append(tuple(range(first, len(builder.calls))))
    builder.op("aten::add.Tensor", *given, shape=(64, 64))
    graph = builder.graph()
    context = placement_context(graph, devices=3)
    names = [device.id for device in context.topology.devices]
    row = tuple(CostEstimate(0, 0, 0, seconds) for _ in graph.nodes)
    plan = attrs.evolve(context.plan, hints={"groups": tuple(groups)})
    homes = dict.fromkeys(graph.inputs, names[1]) if resident else {}
    context = attrs.evolve(context, plan=plan, costs=Costs(dict.fromkeys(names, row)), resident=homes)
    placement = CostBased().place(context)
    where = {d.node: names.index(d.device) for d in placement.decisions}
    return [{where[n] for n in group} for group in groups], placement, names, weight


@pytest.mark.parametrize(("resident", "main"), [(False, 0), (True, 1)])
def test_groups_have_own_devices(resident, main):
    where, placement, names, weight = place_two_chains(10e-3, resident)
    assert where[1] == {main}
    assert len(where[0]) == 1
    assert where[0] != where[1]
    assert placement.values[weight] == names[main]
    assert "group 1 of 2 that run at the same time" in placement.decisions[0].reason


def test_single_device_if_splitting_is_slower():
    where, placement, _, _ = place_two_chains(10e-6)
    assert where[0] == where[1]
    assert len(placement.devices) == 1
