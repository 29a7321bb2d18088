"""Conversion to networkx graphs with facts of profile and plan, for tools that analyse, export or draw graphs.

Attributes are text, numbers and truth values only, because formats such as GraphML support no other types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

    from djinn_core.ir.graph import Graph, Node
    from djinn_core.ir.plan import OptimizationPlan
    from djinn_core.ir.profile import WorkloadProfile


def to_networkx(
    graph: Graph, profile: WorkloadProfile | None = None, plan: OptimizationPlan | None = None
) -> nx.DiGraph[int]:
    """Return a networkx graph with a node for each op by its id, and an edge for each dependence.

    Nodes have `op`, `operation`, `module`, `random` and `results` (dtype and shape of each); edges have `kind`.

    Args:
        graph: the graph.
        profile: adds `phase`, `modality`, `role` and `patterns` (names, separated by commas) to the nodes.
        plan: keeps only the nodes that run, replaces values as in `plan.replace`, and adds `order`, from 0.
    """
    import networkx as nx  # importing takes a quarter of a second, and few programs export graphs

    digraph: nx.DiGraph[int] = nx.DiGraph()
    digraph.add_nodes_from((node.id, _node_facts(graph, node)) for node in graph.nodes)
    digraph.add_edges_from((edge.source, edge.target, {"kind": edge.kind}) for edge in graph.edges)
    if profile is not None:
        for node, facts in digraph.nodes.items():
            names = dict.fromkeys(match.pattern for match in profile.patterns if node in match.nodes)
            facts["phase"], facts["modality"] = profile.phases[node].value, profile.modalities[node].value
            facts["role"], facts["patterns"] = profile.roles.get(node, ""), ",".join(names)
    if plan is not None:
        _keep_running(digraph, graph, plan)
    return digraph


def _keep_running(digraph: nx.DiGraph[int], graph: Graph, plan: OptimizationPlan) -> None:
    digraph.remove_edges_from(
        [(source, target) for source, target, kind in digraph.edges.data("kind") if kind == "data"]
    )
    running = {node: order for order, node in enumerate(plan.nodes)}
    digraph.remove_nodes_from([node for node in digraph if node not in running])
    for target, order in running.items():
        digraph.nodes[target]["order"] = order
        for value in graph.nodes[target].inputs:
            source = graph.producer(plan.replace.get(value, value))
            if source is not None and source.id != target and source.id in running:
                digraph.add_edge(source.id, target, kind="data")


def _node_facts(graph: Graph, node: Node) -> dict[str, Any]:
    metas = map(graph.meta, node.outputs)
    results = ", ".join(f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}" for meta in metas)
    return {
        "op": node.op,
        "operation": node.operation,
        "module": node.module,
        "random": node.random,
        "results": results,
    }
