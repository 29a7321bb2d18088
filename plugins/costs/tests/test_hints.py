"""Reactions of `cost_based` to hints of patterns, and their reasons."""

from __future__ import annotations

import attrs
import pytest

from djinn.planning import CostEstimate, Costs, DeviceCapabilities, Link, NetworkTopology
from djinn.testing import ProgramBuilder, placement_context
from djinn_costs.cost_based import CostBased

MS = 1e-3
ROWS, WIDTH = 8, 64


def devices(*memory):
    return tuple(DeviceCapabilities(f"s/cpu:{n}", "cpu", memory=m, memory_free=m) for n, m in enumerate(memory))


def place_graph(graph, there, hints, stream=None, bandwidth=1e9, slow=(), homes=None):
    """Return the placement and the uses by hint. A product takes a millisecond, or ten on devices in `slow`."""
    rows = {
        device.id: tuple(
            CostEstimate(0, 0, 0, (10 * MS if number in slow else MS) if node.operation == "mm" else 1e-6)
            for node in graph.nodes
        )
        for number, device in enumerate(there)
    }
    topology = NetworkTopology(there, (Link("*", "*", bandwidth, 1e-4),))
    context = attrs.evolve(placement_context(graph), topology=topology, costs=Costs(rows))
    context = attrs.evolve(context, plan=attrs.evolve(context.plan, hints=hints))
    context = attrs.evolve(context, stream=stream or context.stream, resident=homes or {})
    placement = CostBased().place(context)
    return placement, {use.hint: use for use in placement.uses}


def embedding_graph(rows):
    """Return a graph of a large embedding table and products of its rows, and the table's value id."""
    builder = ProgramBuilder()
    table, ids = builder.input(rows, WIDTH), builder.input(ROWS)
    x = builder.op("aten::embedding", table, ids, shape=(ROWS, WIDTH))
    for _ in range(8):
        x = builder.op("aten::mm", x, builder.input(WIDTH, WIDTH), shape=(ROWS, WIDTH))
    return builder.graph(), table


def test_dense_work_leaves_the_device_of_a_large_table():
    graph, table = embedding_graph(1 << 14)  # 4 MB, more than a hundredth of a device
    there, homes = devices(1 << 27, 1 << 27), {table: "s/cpu:1"}
    plain, _ = place_graph(graph, there, {}, slow=(1,), homes=homes)
    given, uses = place_graph(graph, there, {"tables": (table,)}, slow=(1,), homes=homes)
    assert [d.device for d in plain.decisions] == ["s/cpu:1"] * 9
    assert [d.device for d in given.decisions] == ["s/cpu:1"] + ["s/cpu:0"] * 8
    assert given.values[table] == "s/cpu:1"
    assert "ids go to them" in uses["tables"].decision


def test_small_table_stays_with_dense_work():
    graph, table = embedding_graph(16)
    given, uses = place_graph(graph, devices(1 << 22, 1 << 30), {"tables": (table,)})
    assert len({d.device for d in given.decisions}) == 1
    assert "each table is smaller than a hundredth" in uses["tables"].decision


def branch_graph(count):
    """Return a graph of two chains of products that are joined at the end."""
    builder, nodes, ends = ProgramBuilder(), [], []
    for _ in range(2):
        x, first = builder.input(ROWS, WIDTH), len(builder.calls)
        for _ in range(count):
            x = builder.op("aten::mm", x, builder.input(WIDTH, WIDTH), shape=(ROWS, WIDTH))
        nodes.append(tuple(range(first, len(builder.calls))))
        ends.append(x)
    builder.op("aten::cat", *ends, shape=(2 * ROWS, WIDTH))
    return builder.graph(), tuple(nodes)


def test_branches_have_own_devices_with_predicted_gain():
    graph, branches = branch_graph(8)
    placement, uses = place_graph(graph, devices(1 << 30, 1 << 30), {"branches": branches})
    where = {d.node: d.device for d in placement.decisions}
    assert [len({where[n] for n in nodes}) for nodes in branches] == [1, 1]
    assert where[branches[0][0]] != where[branches[1][0]]
    use = uses["branches"]
    assert (use.seconds_before, use.seconds_after) == (pytest.approx(16 * MS, rel=0.1), pytest.approx(8 * MS, rel=0.1))


@pytest.mark.parametrize("there", [devices(1 << 30), devices(1 << 30, 1 << 30)], ids=["one device", "two"])
def test_branches_without_gain_stay_together(there):
    graph, branches = branch_graph(1)
    placement, uses = place_graph(graph, there, {"branches": branches}, bandwidth=1e4)
    assert len(placement.devices) == 1
    assert uses["branches"].decision.startswith("not used")
    assert uses["branches"].seconds_before is None


def test_gain_of_branches_that_fit_no_single_device_is_over_parts():
    builder, nodes = ProgramBuilder(), ([], [])
    ends = [builder.input(ROWS, WIDTH), builder.input(ROWS, WIDTH)]
    for step in range(16):  # interleaved: each half of the program has ops of both branches
        nodes[step % 2].append(len(builder.calls))
        ends[step % 2] = builder.op("aten::mm", ends[step % 2], builder.input(WIDTH, WIDTH), shape=(ROWS, WIDTH))
    builder.op("aten::cat", *ends, shape=(2 * ROWS, WIDTH))
    graph, branches = builder.graph(), tuple(map(tuple, nodes))
    memory = sum(graph.meta(v).nbytes for v in graph.inputs) * 3 // 4
    _, uses = place_graph(graph, devices(memory, memory), {"branches": branches})
    use = uses["branches"]
    assert (use.seconds_before, use.seconds_after) == (pytest.approx(16 * MS, rel=0.1), pytest.approx(8 * MS, rel=0.1))
