"""Matches of a search, partial or complete, and the graph positions that conditions inspect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.values import TensorMeta


@attrs.frozen
class MatchedNode:
    """A node in its graph. Conditions receive it as their argument."""

    graph: Graph
    node: Node

    @property
    def result(self) -> TensorMeta:
        """Metadata of the first result. For an in-place op: metadata of the written operand."""
        node = self.node
        return self.graph.meta((*node.outputs, *node.writes, *node.inputs)[0])

    @property
    def operands(self) -> tuple[TensorMeta, ...]:
        """Metadata of the tensors that the node reads."""
        return tuple([self.graph.meta(v) for v in self.node.inputs])


@attrs.frozen
class Match:
    """A match: its covered nodes and named sources. During a search the match is partial.

    Attributes:
        graph: the searched graph.
        nodes: ids of the covered nodes, including views and casts between them, as an ordered set.
        names: sources by their names in the term; `ir.flow` defines sources.
    """

    graph: Graph
    nodes: dict[int, None]
    names: Mapping[str, int]

    def with_nodes(self, *nodes: int) -> Match:
        """Return this match with more nodes."""
        return Match(self.graph, {**self.nodes, **dict.fromkeys(nodes)}, self.names)

    def with_name(self, name: str, source: int) -> Match | None:
        """Return this match with the source named `name`, or None if the name already stands for another source."""
        value = self.names.get(name)
        if value is not None:
            return self if value == source else None
        return Match(self.graph, self.nodes, {**self.names, name: source})

    def __getitem__(self, name: str) -> Node:
        """Return the node that the match names `name`.

        Raises:
            KeyError: the term does not define the name, or it names a graph input.
        """
        source = self.names[name]
        if source < 0:
            raise KeyError(f"{name!r} is an input of the graph, not a node; its value is found.value({name!r})")
        return self.graph.nodes[source]

    def value(self, name: str) -> int:
        """Return the value that the match names `name`: the first result of its node, or a graph input."""
        return self.graph.flow.value(self.names[name])

    def meta(self, name: str) -> TensorMeta:
        """Return the metadata of the value that the match names `name`."""
        return self.graph.meta(self.value(name))

    def descriptions(self) -> dict[str, str]:
        """Return a description of each named node or input, to fill the templates of reasons."""
        return {name: self._description(source) for name, source in self.names.items()}

    def _description(self, source: int) -> str:
        if source < 0:
            return f"an input of shape {self.graph.meta(self.graph.inputs[~source]).shape}"
        return f"{self.graph.nodes[source].op} (node {source})"


Ways = Iterator[Match]
