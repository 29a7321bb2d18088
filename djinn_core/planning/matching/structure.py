"""Patterns whose shape is a graph and not a tree: found with networkx, near the ops that may take part.

`Structure` takes a directed graph whose nodes have an attribute `operations`, a set of ops. One node is the anchor: each op
of its set is a candidate, and only what lies within reach of it is searched, so the time grows with the graph and not with
its square. networkx is imported by who uses it: it takes a quarter of a second, and every process loads plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import PatternMatch
from djinn_core.planning.matching.terms import names_of

if TYPE_CHECKING:
    import networkx as nx

Roles = Mapping[Hashable, Node]
_NEIGHBOURS = 256  # nodes around a candidate that are searched


@attrs.define(eq=False, slots=False)
class Structure(Pattern):
    """A pattern that finds a subgraph.

    Attributes:
        name: unique among patterns.
        shape: the subgraph: an edge where one op's result flows into another, past views, casts and copies.
        anchor: the node of `shape` that is looked for first; choose the rarest op.
        confidence: of matches given 0.9, nine in ten are right.
        reason: a sentence; `{x}` stands for the op that plays the part `x`.
        check: what must hold of the nodes, by their part in `shape`.
        details: facts about a match.
        tolerates_growth: as in `Pattern`; True by default if there are neither `check` nor `details`.
    """

    name: str
    shape: nx.DiGraph
    anchor: Hashable
    confidence: float
    reason: str
    check: Callable[[Graph, Roles], bool] | None = None
    details: Callable[[Graph, Roles], Mapping[str, Any]] | None = None
    tolerates_growth: bool = attrs.field(
        default=attrs.Factory(lambda self: self.check is None and self.details is None, takes_self=True)
    )
    operations: frozenset[str] = attrs.field(
        init=False,
        default=attrs.Factory(lambda self: names_of(self.shape.nodes[self.anchor]["operations"]), takes_self=True),
    )

    @cached_property
    def _operations(self) -> dict[Hashable, frozenset[str]]:
        return {part: names_of(given["operations"]) for part, given in self.shape.nodes(data=True)}

    @cached_property
    def _reach(self) -> int:
        """Maximum number of steps from the anchor to any part."""
        import networkx as nx

        steps = nx.single_source_shortest_path_length(self.shape.to_undirected(as_view=True), self.anchor)
        return int(max(steps.values()))

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """At most one match for each candidate."""
        for roles in self.places(graph, candidates):
            yield self._match(graph, roles)

    def places(self, graph: Graph, candidates: Sequence[Node]) -> Iterator[Roles]:
        """For each candidate at most one way in which the subgraph lies around it: the node of each part."""
        for node in candidates:
            roles = next(self._places(graph, node), None)
            if roles is not None:
                yield roles

    def _places(self, graph: Graph, node: Node) -> Iterator[Roles]:
        import networkx as nx

        around = self._neighbourhood(graph, node)
        fits = nx.algorithms.isomorphism.DiGraphMatcher(around, self._anchored(), node_match=_may_play)
        for mapping in fits.subgraph_monomorphisms_iter():
            roles = {part: graph.nodes[n] for n, part in mapping.items()}
            if self.check is None or self.check(graph, roles):
                yield roles

    def _anchored(self) -> nx.DiGraph:
        import networkx as nx

        shape = nx.DiGraph(self.shape.edges)
        for part, names in self._operations.items():
            shape.add_node(part, names=names, anchor=part == self.anchor)
        return shape

    def _neighbourhood(self, graph: Graph, node: Node) -> nx.DiGraph:
        """Candidate nodes within reach of `node`."""
        import networkx as nx

        flow, wanted = graph.flow, frozenset().union(*self._operations.values())
        near, edge = {node.id}, [node.id]
        for _ in range(self._reach):
            steps = (n for i in edge for n in (*flow.operands(graph.nodes[i]), *flow.users(i)))
            edge = [n for n in dict.fromkeys(steps) if n >= 0 and n not in near and graph.nodes[n].operation in wanted]
            near.update(edge)
            if len(near) > _NEIGHBOURS:
                break
        around = nx.DiGraph()
        for i in sorted(near):
            around.add_node(i, operation=graph.nodes[i].operation, anchor=i == node.id)
        around.add_edges_from((s, i) for i in near for s in flow.operands(graph.nodes[i]) if s in near)
        return around

    def _match(self, graph: Graph, roles: Roles) -> PatternMatch:
        words = {str(part): f"{node.op} (node {node.id})" for part, node in roles.items()}
        return PatternMatch(
            pattern=self.name,
            nodes=tuple(sorted(node.id for node in roles.values())),
            confidence=self.confidence,
            reason=self.reason.format(**words),
            details=self.details(graph, roles) if self.details is not None else {},
        )


def _may_play(node: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    return node["operation"] in part["names"] and node["anchor"] == part["anchor"]


def structure(
    name: str, parts: Mapping[Hashable, Iterable[str]], edges: Iterable[tuple[Hashable, Hashable]], **rest: Any
) -> Structure:
    """A `Structure` of these parts, each with its ops, and edges between them; the first part is the anchor by default."""
    import networkx as nx

    shape = nx.DiGraph()
    for part, operations in parts.items():
        shape.add_node(part, operations=frozenset(operations))
    shape.add_edges_from(edges)
    rest.setdefault("anchor", next(iter(parts)))
    return Structure(name=name, shape=shape, **rest)
