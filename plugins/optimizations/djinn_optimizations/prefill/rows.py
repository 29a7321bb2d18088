"""Find the part of a program that can be divided by rows: from token embeddings through causal attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final

import attrs

from djinn.hooks import OptimizationContext
from djinn.planning import Graph, Node, arguments, storage_of
from djinn_optimizations.prefill.rules import Case, Split, split_of

_ATTENTION: Final = "scaled_dot_product_attention"


class NotDivisible(Exception):  # noqa: N818 - a reason, not a failure
    """A program cannot be divided, for the reason in the message."""


@attrs.frozen
class CausalAttention:
    """An attention op in which each row attends only to itself and to earlier rows."""

    query: int
    key: int
    value: int


@attrs.define(eq=False)
class Rows:
    """The sequence dimension of a program: which values have it, and which nodes can run for some of the rows.

    Attributes:
        graph: the graph of the program.
        rows: number of rows.
        dims: index of the sequence dimension, by value.
        splits: how a node can run for some of the rows, by node.
        attention: attention ops, by node.
        whole: nodes that need all rows at once.
    """

    graph: Graph
    rows: int
    dims: dict[int, int] = attrs.field(factory=dict)
    splits: dict[int, Split] = attrs.field(factory=dict)
    attention: dict[int, CausalAttention] = attrs.field(factory=dict)
    whole: list[int] = attrs.field(factory=list)

    def take(self, node: Node) -> None:
        """Find the sequence dimension of a node's results."""
        if not any(v in self.dims for v in node.inputs):
            return
        options = arguments(node)
        if node.operation == _ATTENTION:
            self._attend(node, options)
            return
        split = split_of(Case(self.graph, node, options, self.dims, self.rows)) if not _has_effects(node) else None
        if split is None:
            self.whole.append(node.id)
            return
        self.splits[node.id] = split
        self.dims.update(zip(node.outputs, split.dims, strict=True))

    def _attend(self, node: Node, given: Mapping[str, object]) -> None:
        query, key, value = node.inputs[:3]
        where = {self.dims.get(v, -1) - len(self.graph.meta(v).shape) for v in (query, key, value)}
        if where != {-2}:
            raise NotDivisible(f"attention{inside(node)} reads rows of an earlier program")
        if given.get("attn_mask") is not None or not given.get("is_causal") or given.get("dropout_p"):
            raise NotDivisible(f"attention{inside(node)} has a mask or dropout; only causal attention can be split")
        self.attention[node.id] = CausalAttention(query, key, value)
        self.dims[node.outputs[0]] = len(self.graph.meta(node.outputs[0]).shape) - 2

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Return the divided nodes, in order."""
        return tuple(sorted((*self.splits, *self.attention)))


def rows_of(context: OptimizationContext) -> Rows:
    """Find the sequence dimension of a program.

    Raises:
        NotDivisible: the program has no sequence dimension, or cannot be divided along it.
    """
    graph = context.graph
    nodes = [graph.nodes[n] for n in context.plan.nodes]
    first = next((n for n in nodes if n.operation == _ATTENTION and arguments(n).get("is_causal")), None)
    if first is None:
        raise NotDivisible("there is no causal attention over a prompt")
    rows = Rows(graph, graph.meta(first.inputs[0]).shape[-2])
    for node in nodes:
        if node.operation == "embedding" and not any(v in rows.dims for v in node.inputs):
            indices = arguments(node)["indices"]
            if graph.meta(indices).shape[-1:] == (rows.rows,):
                rows.dims[indices] = len(graph.meta(indices).shape) - 1
        rows.take(node)
    if first.id not in rows.attention:
        raise NotDivisible(f"the rows of attention{inside(first)} do not come from embeddings")
    _check(context, rows)
    return rows


def _check(context: OptimizationContext, found: Rows) -> None:
    """Raise `NotDivisible` if the rows cannot be divided.

    No node outside the divided part may use its intermediate values, and these values must not change meanwhile.
    """
    graph = found.graph
    looked_at = {storage_of(v) for n in found.nodes for v in (*graph.nodes[n].inputs, *graph.nodes[n].outputs)}
    for node in graph.nodes[found.nodes[0] :]:
        if any(storage_of(v) in looked_at for v in node.writes):
            raise NotDivisible(f"{node.op}{inside(node)} writes into values that would be split")
    for node in [graph.nodes[n] for n in found.nodes]:
        if _has_effects(node):
            raise NotDivisible(f"{node.op}{inside(node)} writes or draws random numbers")
        if any(v in context.plan.replace for v in (*node.inputs, *node.outputs)):
            raise NotDivisible("another optimization has changed the program")


def _has_effects(node: Node) -> bool:
    return bool(node.writes or node.random or not node.outputs)


def inside(node: Node) -> str:
    """Return the position of a node in the model as text, for messages."""
    return f" in {node.module}" if node.module else ""


def first_row(rows: Rows, node: Node) -> int:
    """Return the first row of a slice."""
    start = arguments(node).get("start") or 0
    return int(start + rows.rows if start < 0 else start)
