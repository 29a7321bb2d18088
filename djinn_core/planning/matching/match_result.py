"""Matches of a search, partial or complete, and the places in a graph that conditions look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.values import TensorMeta


@attrs.frozen
class Place:
    """A node in its graph: what conditions are asked about."""

    graph: Graph
    node: Node

    @property
    def result(self) -> TensorMeta:
        """Metadata of the first result, or of what is written."""
        node = self.node
        return self.graph.meta((*node.outputs, *node.writes, *node.inputs)[0])

    @property
    def operands(self) -> tuple[TensorMeta, ...]:
        """Metadata of the tensors that it reads."""
        return tuple([self.graph.meta(v) for v in self.node.inputs])


@attrs.frozen
class Found:
    """A match: the nodes that it covers and the sources that it names. While a search goes on, it is partial.

    Attributes:
        graph: where.
        nodes: ids of the nodes that it covers, views and casts between them among them; a set that keeps its order.
        names: sources by the names that the term gives; see `ir.flow` for what a source is.
    """

    graph: Graph
    nodes: dict[int, None]
    names: Mapping[str, int]

    def covering(self, *nodes: int) -> Found:
        """This match with more nodes."""
        return Found(self.graph, {**self.nodes, **dict.fromkeys(nodes)}, self.names)

    def named(self, name: str, source: int) -> Found | None:
        """This match with one more name; None if the name stands for another source already."""
        known = self.names.get(name)
        if known is not None:
            return self if known == source else None
        return Found(self.graph, self.nodes, {**self.names, name: source})

    def __getitem__(self, name: str) -> Node:
        """The node of that name.

        Raises:
            KeyError: nothing in the graph has that name: the term does not give it, or it comes from outside.
        """
        source = self.names[name]
        if source < 0:
            raise KeyError(f"{name!r} comes from outside the graph; its value is found.value({name!r})")
        return self.graph.nodes[source]

    def value(self, name: str) -> int:
        """The value of that name: the first result of its node, or the input of the graph."""
        return self.graph.flow.value(self.names[name])

    def meta(self, name: str) -> TensorMeta:
        """Metadata of the value of that name."""
        return self.graph.meta(self.value(name))

    def described(self) -> dict[str, str]:
        """For the templates of reasons: what each name stands for, in words."""
        return {name: self._in_words(source) for name, source in self.names.items()}

    def _in_words(self, source: int) -> str:
        if source < 0:
            return f"an input of shape {self.graph.meta(self.graph.inputs[~source]).shape}"
        return f"{self.graph.nodes[source].op} (node {source})"


Ways = Iterator[Found]
