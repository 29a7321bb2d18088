"""Choice between recomputation and transfer, by the links between devices. Results do not change."""

from __future__ import annotations

import attrs
import pytest

from djinn.planning import CostEstimate, Costs, Link, NetworkTopology, Placement, PlacementDecision, Stream
from djinn.testing import (
    ProgramBuilder,
    optimization_context,
)
from djinn_optimizations.recomputation import Recomputation

WIDE = (1000, 1000)
MBIT, GBIT = 1e6 / 8, 1e9 / 8


def two_towers(rate, trunk=30e-3, own=40e-3, *, write=False, alike=True):
    """Return the context of a graph whose 4 MB value both devices read, that value's node, and the second device.

    The first device computes the value in `trunk` seconds.
    """
    builder = ProgramBuilder()
    small, other = builder.input(10, 10), builder.input(10, 10)
    wide = builder.op("aten::expand_copy", small, shape=WIDE)
    if write:
        builder.inplace("aten::mul_.Scalar", wide, slots=(2.0,))
    busy = builder.op("aten::tanh", other, shape=WIDE)
    left = builder.op("aten::relu", wide, shape=WIDE)
    right = builder.op("aten::add.Tensor", wide, busy, shape=WIDE)
    builder.drop(wide, busy)
    graph = builder.graph()
    context = optimization_context(graph, devices=2)
    first, second = context.topology.devices
    one, two = first.id, second.id
    seconds = dict(zip((n.id for n in graph.nodes), (trunk, *([1e-3] if write else []), own, 1e-3, 1e-3), strict=True))
    row = tuple(CostEstimate(1.0, 1, 1, seconds[n.id]) for n in graph.nodes)
    devices = (first, second if alike else attrs.evolve(second, kind="cuda"))
    network = NetworkTopology(devices, (Link(one, two, rate, 1e-4), Link(two, one, rate, 1e-4)))
    homes = {small: one, other: two, wide: one, busy: two, left: one, right: two}
    made = {v: n.id for n in graph.nodes for v in n.outputs}
    where = {n.id: homes[n.outputs[0]] if n.outputs else one for n in graph.nodes}
    decisions = tuple(PlacementDecision(n, d, "a test") for n, d in where.items())
    placement = Placement(decisions, homes, "a test")
    resident = {small: one, other: two}
    context = attrs.evolve(context, topology=network, costs=Costs({one: row, two: row}), placement=placement)
    return attrs.evolve(context, resident=resident), made[wide], two


def test_slow_link_prefers_recomputation():
    context, trunk, second = two_towers(100 * MBIT)
    result = Recomputation().optimize(context)
    assert result.applied
    assert [(r.node, r.device) for r in result.rewrite.replicas] == [(trunk, second)]
    assert "30.0 ms of computing against 320 ms for 4.00 MB" in result.reason


def test_first_upload_time_is_ignored():
    context = two_towers(100 * MBIT)[0]
    slow = Link("client", "server/cpu:0", 1.0, 0.0)  # 400 bytes take 400 seconds
    network = attrs.evolve(context.topology, links=(*context.topology.links, slow))
    assert Recomputation().optimize(attrs.evolve(context, resident={}, topology=network)).applied


def test_fast_link_prefers_transfer():
    result = Recomputation().optimize(two_towers(10 * GBIT)[0])
    assert not result.applied
    assert "sent: 4.00 MB in 3.30 ms against 30.0 ms of computing again" in result.reason


def test_waiting_device_recomputes():
    assert not Recomputation().optimize(two_towers(2 * GBIT)[0]).applied
    assert Recomputation().optimize(two_towers(2 * GBIT, own=1e-6)[0]).applied


def test_expensive_recomputation_is_refused():
    assert not Recomputation().optimize(two_towers(10 * GBIT, own=1e-6)[0]).applied


def test_recomputation_in_stream_is_judged_by_interval():
    context = two_towers(2 * GBIT, own=5e-3)[0]  # with the trunk, the second device would be busy for longer
    assert Recomputation().optimize(context).applied
    assert not Recomputation().optimize(attrs.evolve(context, stream=Stream(3, "server/cpu:0"))).applied


@pytest.mark.parametrize("how", [{"write": True}, {"alike": False}])
def test_written_or_inexact_values_are_sent(how):
    result = Recomputation().optimize(two_towers(100 * MBIT, **how)[0])
    assert not result.applied
