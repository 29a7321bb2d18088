"""Graphs in networkx form, with what is known of each node: for tools that analyse, export or draw graphs.

Attributes are text, numbers and truth values only, since formats such as GraphML hold no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

    from djinn_core.ir.graph import Graph, Node
    from djinn_core.ir.plan import OptimizationPlan
    from djinn_core.ir.profile import WorkloadProfile


def graph_to_networkx(graph: Graph) -> nx.DiGraph[int]:
    """A node for each op by its id, an edge for each dependence.

    Nodes have `op`, `operation`, `module`, `random` and `results` (dtype and shape of each); edges have `kind`.
    """
    import networkx as nx  # a quarter of a second, and few programs export graphs

    made: nx.DiGraph[int] = nx.DiGraph()
    made.add_nodes_from((node.id, _of_node(graph, node)) for node in graph.nodes)
    made.add_edges_from((edge.source, edge.target, {"kind": edge.kind}) for edge in graph.edges)
    return made


def profile_to_networkx(profile: WorkloadProfile, graph: Graph) -> nx.DiGraph[int]:
    """The graph, whose nodes also have `phase`, `modality`, `role` and `patterns` (names, separated by commas)."""
    made = graph_to_networkx(graph)
    patterns: dict[int, list[str]] = {}
    for match in profile.patterns:
        for node in match.nodes:
            patterns.setdefault(node, []).append(match.pattern)
    for node, facts in made.nodes.items():
        facts["phase"] = profile.phases[node].value
        facts["modality"] = profile.modalities[node].value
        facts["role"] = profile.roles.get(node, "")
        facts["patterns"] = ",".join(dict.fromkeys(patterns.get(node, ())))
    return made


def plan_to_networkx(plan: OptimizationPlan, graph: Graph) -> nx.DiGraph[int]:
    """The graph of the nodes that run, which read the values that stand for others; nodes also have `order`, from 0."""
    made = graph_to_networkx(graph)
    made.remove_edges_from([(source, target) for source, target, kind in made.edges.data("kind") if kind == "data"])
    running = {node: order for order, node in enumerate(plan.nodes)}
    made.remove_nodes_from([node for node in made if node not in running])
    for node, facts in made.nodes.items():
        facts["order"] = running[node]
    made.add_edges_from(
        (source, target, {"kind": "data"}) for source, target in _data_edges(plan, graph) if source in made
    )
    return made


def _data_edges(plan: OptimizationPlan, graph: Graph) -> Iterator[tuple[int, int]]:
    nodes = {node.id: node for node in graph.nodes}
    for target in plan.nodes:
        for value in nodes[target].inputs:
            source = graph.producer(plan.replace.get(value, value))
            if source is not None and source.id != target:
                yield source.id, target


def _of_node(graph: Graph, node: Node) -> dict[str, Any]:
    metas = map(graph.meta, node.outputs)
    results = ", ".join(f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}" for meta in metas)
    return {
        "op": node.op,
        "operation": node.operation,
        "module": node.module,
        "random": node.random,
        "results": results,
    }
