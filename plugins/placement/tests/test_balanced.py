from __future__ import annotations

import attrs

from djinn.planning import storage_of
from djinn.testing import ProgramBuilder, placement_context
from djinn_placement.balanced import Balanced


def chain_graph(layers=8, width=16):
    builder = ProgramBuilder()
    x, weights = builder.input(1, width), []
    for _ in range(layers):
        weights.append(builder.input(width, width))
        x = builder.op("aten::mm", x, weights[-1], shape=(1, width))
    return builder.graph(), weights


def test_balanced_segments_are_proportional_to_memory():
    graph, weights = chain_graph()
    context = placement_context(graph, devices=2)
    small, large = context.topology.devices
    topology = attrs.evolve(context.topology, devices=(small, attrs.evolve(large, memory=3 * small.memory)))
    placement = Balanced().place(attrs.evolve(context, topology=topology))
    homes = [placement.values[w] for w in weights]
    assert homes == [small.id] * 2 + [large.id] * 6
    assert len({storage_of(w) for w in weights}) == 8


def test_balanced_placement_follows_resident_values():
    graph, weights = chain_graph(4)
    context = placement_context(graph, devices=2)
    first, second = (d.id for d in context.topology.devices)
    resident = dict(zip(weights, [second, second, first, first], strict=True))
    placement = Balanced().place(attrs.evolve(context, resident=resident))
    assert [d.device for d in placement.decisions] == [second, second, first, first]
