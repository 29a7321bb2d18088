"""The graph of a program: edges that order whatever could tell, and hashes that are the same everywhere."""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict

import pytest
import torch

from djinn.testing import ProgramBuilder, random_graph, random_inputs, replay
from djinn_core.ir.graph import Graph

SQUARE = (3, 3)


def edge_pairs(graph: Graph) -> set[tuple[int, int, str]]:
    return {(e.source, e.target, e.kind) for e in graph.edges}


def test_data_edge_from_producer_to_user():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    y = builder.op("aten::tanh", x, shape=SQUARE)
    builder.op("aten::mm", x, y, shape=SQUARE)
    assert edge_pairs(builder.graph()) == {(0, 1, "data")}


def test_view_user_depends_on_view_op():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    view = builder.view("aten::t", x, shape=SQUARE)
    builder.op("aten::tanh", view, shape=SQUARE)
    builder.op("aten::tanh", x, shape=SQUARE)
    assert edge_pairs(builder.graph()) == {(0, 1, "data")}


def test_view_user_depends_on_base_producer():
    builder = ProgramBuilder()
    made = builder.op("aten::tanh", builder.input(*SQUARE), shape=SQUARE)
    view = builder.view("aten::t", made, shape=SQUARE)
    builder.op("aten::tanh", view, shape=SQUARE)
    assert edge_pairs(builder.graph()) == {(0, 1, "data"), (0, 2, "data"), (1, 2, "data")}


def test_write_through_view_orders_readers_of_base():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    view = builder.view("aten::t", x, shape=SQUARE)  # 0
    builder.op("aten::tanh", x, shape=SQUARE)  # 1 reads before the write
    builder.inplace("aten::mul_.Scalar", view, slots=(2.0,))  # 2
    builder.op("aten::tanh", x, shape=SQUARE)  # 3 reads after it
    assert edge_pairs(builder.graph()) == {(0, 2, "data"), (1, 2, "order"), (2, 3, "data")}


def test_random_ops_are_ordered_among_themselves():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    builder.op("aten::rand_like", x, shape=SQUARE, random=True)
    builder.op("aten::tanh", x, shape=SQUARE)
    builder.op("aten::rand_like", x, shape=SQUARE, random=True)
    assert edge_pairs(builder.graph()) == {(0, 2, "data")}


@pytest.mark.parametrize("seed", range(50))
def test_topological_orders_give_same_values(seed: int):
    graph = random_graph(seed, length=30)
    inputs = random_inputs(graph)
    expected, got = replay(graph, inputs), replay(graph, inputs, other_order(graph, seed))
    assert expected.keys() == got.keys()
    for value, tensor in expected.items():
        torch.testing.assert_close(got[value], tensor, rtol=0, atol=0, equal_nan=True)


def other_order(graph: Graph, seed: int) -> list[int]:
    """Return another topological order of the nodes: latest first for odd seeds, otherwise random."""
    chance, waits, follow = random.Random(seed), defaultdict(int), defaultdict(list)
    for edge in graph.edges:
        waits[edge.target] += 1
        follow[edge.source].append(edge.target)
    ready, order = [n.id for n in graph.nodes if not waits[n.id]], []
    while ready:
        order.append(ready.pop(-1 if seed % 2 else chance.randrange(len(ready))))
        for node in follow[order[-1]]:
            waits[node] -= 1
            if not waits[node]:
                ready.append(node)
    assert len(order) == len(graph.nodes)
    return order


def test_topology_hash_ignores_sizes():
    def build(side: int, op: str = "aten::tanh", slot: float = 1.0) -> Graph:
        builder = ProgramBuilder()
        x = builder.op(op, builder.input(side, side), shape=(side, side))
        builder.op("aten::mul.Scalar", x, shape=(side, side), slots=(slot,))
        return builder.graph()

    base = build(3)
    assert build(3).topology_hash == base.topology_hash
    assert build(3).shape_hash == base.shape_hash
    assert build(3, slot=2.0).topology_hash == base.topology_hash
    assert build(4).topology_hash == base.topology_hash
    assert build(4).shape_hash != base.shape_hash
    assert build(3, op="aten::relu").topology_hash != base.topology_hash


def test_topology_hash_includes_shared_memory():
    def build(shared: bool) -> Graph:
        builder = ProgramBuilder()
        x = builder.input(*SQUARE)
        y = builder.view("aten::alias", x, shape=SQUARE) if shared else builder.op("aten::alias", x, shape=SQUARE)
        builder.inplace("aten::mul_.Scalar", y, slots=(2.0,))
        return builder.graph()

    assert build(shared=True).topology_hash != build(shared=False).topology_hash


def test_graph_hashes_are_equal_across_processes(python, plain_environment):
    hashes = "print(g.topology_hash, g.shape_hash, hash('a'))"
    source = f"from djinn.testing import random_graph; g = random_graph(7); {hashes}"
    *elsewhere, seed = python.run("-c", source, env=plain_environment).stdout.split()
    assert seed != str(hash("a")), "sets have the same order there"
    graph = random_graph(7)
    assert elsewhere == [graph.topology_hash, graph.shape_hash]


@pytest.fixture
def without_garbage_collection():
    """Disable garbage collection, whose duration depends on objects of earlier tests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_graph_construction_time_is_linear(without_garbage_collection):
    def construction_seconds(count: int) -> float:
        builder = ProgramBuilder()
        x, weight = builder.input(*SQUARE), builder.input(*SQUARE)
        for i in range(count):
            x = builder.op("aten::mm", x, weight, shape=SQUARE)
            if i % 3 == 0:
                builder.inplace("aten::add_.Tensor", x, weight)
        graph = builder.graph()
        start = time.process_time()
        assert len(graph.edges) >= count - 1
        assert graph.topology_hash
        return time.process_time() - start

    def seconds(count: int) -> float:
        return min(construction_seconds(count) for _ in range(3))

    assert seconds(8_000) < 10 * seconds(1_000) * 1.6  # quadratic would be 64 times as much
