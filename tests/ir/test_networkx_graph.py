"""Graphs in networkx form: every op and dependence, what the profile knows, and only what a plan runs."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
import torch

import djinn
from djinn.planning import OptimizationPlan, to_networkx
from djinn_core.ir.graph import Graph


@pytest.fixture
def graph() -> Graph:
    with torch.device("meta"):
        x = torch.zeros(2, 3)
    with djinn.capture() as captured:
        first = x.relu()
        second = x.relu()
        first.add_(1)
        total = second @ first.T
    del first, second
    assert total.shape == (2, 2)
    return captured.graph


def test_networkx_nodes_and_edges_match_graph(graph: Graph) -> None:
    made = to_networkx(graph)
    assert [(node, facts["op"]) for node, facts in made.nodes.items()] == [(n.id, n.op) for n in graph.nodes]
    assert {(a, b, kind) for a, b, kind in made.edges.data("kind")} == {
        (e.source, e.target, e.kind) for e in graph.edges
    }
    assert made.nodes[0]["results"] == "float32[2, 3]"
    assert list(nx.topological_sort(made))


def test_profile_adds_networkx_node_attributes(graph: Graph) -> None:
    result = djinn.plan(graph, until="annotate")
    made = to_networkx(graph, result.profile)
    assert [facts["phase"] for facts in made.nodes.values()] == [phase.value for phase in result.profile.phases]
    assert {"modality", "role", "patterns"} <= made.nodes[0].keys()


def test_networkx_graph_of_plan_has_running_nodes_and_replacements(graph: Graph) -> None:
    second = graph.nodes[1]
    kept = tuple(node.id for node in graph.nodes if node.id != second.id)
    plan = OptimizationPlan(kept, {second.outputs[0]: graph.nodes[0].outputs[0]})
    made = to_networkx(graph, plan=plan)
    assert [facts["order"] for _, facts in sorted(made.nodes.items())] == list(range(len(kept)))
    product = graph.nodes[-1].id
    assert not to_networkx(graph).has_edge(0, product) or to_networkx(graph).edges[0, product]["kind"] == "order"
    assert made.edges[0, product]["kind"] == "data"


def test_networkx_graph_exports_to_graphml(graph: Graph, tmp_path: Path) -> None:
    result = djinn.plan(graph, until="optimize")
    for number, made in enumerate(
        (to_networkx(graph), to_networkx(graph, result.profile), to_networkx(graph, plan=result.plan))
    ):
        nx.write_graphml(made, tmp_path / f"{number}.graphml")
        read = nx.read_graphml(tmp_path / f"{number}.graphml", node_type=int)
        assert dict(read.nodes.data()) == dict(made.nodes.data())
