from __future__ import annotations

from djinn.testing import placement_context, sample_graphs
from djinn_placement.round_robin import RoundRobin


def test_round_robin_alternates_devices():
    context = placement_context(sample_graphs()["perceptron"], devices=2)
    placement = RoundRobin().place(context)
    first, second = (d.id for d in context.topology.devices)
    # x, w1, their product, the ReLU, w2, the last product
    assert list(placement.values.values()).count(first) == list(placement.values.values()).count(second) == 3
    assert [d.device for d in placement.decisions] == [first, second, second]
