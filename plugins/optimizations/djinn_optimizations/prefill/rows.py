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
    """The program cannot be divided. The message says why."""


@attrs.frozen
class CausalAttention:
    """Operands of an attention op in which each row attends only to itself and to earlier rows."""

    query: int
    key: int
    value: int


@attrs.define(eq=False)
class Rows:
    """The sequence dimension of a program: values that have it, and nodes that can run for some of the rows.

    Attributes:
        graph: the graph of the program.
        rows: number of rows, the length of the prompt.
        dims: index of the sequence dimension, by value.
        splits: rule result for each node that can run for some of the rows.
        attention: operands of attention, by node.
        undivided: nodes that need all rows at once.
    """

    graph: Graph
    rows: int
    dims: dict[int, int] = attrs.field(factory=dict)
    splits: dict[int, Split] = attrs.field(factory=dict)
    attention: dict[int, CausalAttention] = attrs.field(factory=dict)
    undivided: list[int] = attrs.field(factory=list)

    def visit(self, node: Node) -> None:
        """Record the sequence dimension of a node's results, if an operand has rows."""
        if not any(v in self.dims for v in node.inputs):
            return
        options = arguments(node)
        if node.operation == _ATTENTION:
            self._attend(node, options)
            return
        split = split_of(Case(self.graph, node, options, self.dims, self.rows)) if not _has_effects(node) else None
        if split is None:
            self.undivided.append(node.id)
            return
        self.splits[node.id] = split
        self.dims.update(zip(node.outputs, split.dims, strict=True))

    def _attend(self, node: Node, arguments: Mapping[str, object]) -> None:
        query, key, value = node.inputs[:3]
        dims_from_end = {self.dims.get(v, -1) - len(self.graph.meta(v).shape) for v in (query, key, value)}
        if dims_from_end != {-2}:
            raise NotDivisible(f"attention{module_note(node)} reads rows of an earlier program")
        if arguments.get("attn_mask") is not None or not arguments.get("is_causal") or arguments.get("dropout_p"):
            raise NotDivisible(
                f"attention{module_note(node)} has a mask or dropout; only causal attention can be split"
            )
        self.attention[node.id] = CausalAttention(query, key, value)
        self.dims[node.outputs[0]] = len(self.graph.meta(node.outputs[0]).shape) - 2

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Divided nodes, in order."""
        return tuple(sorted((*self.splits, *self.attention)))


def rows_of(context: OptimizationContext) -> Rows:
    """Return the sequence dimension of a program.

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
        rows.visit(node)
    if first.id not in rows.attention:
        raise NotDivisible(f"the rows of attention{module_note(first)} do not come from embeddings")
    _check(context, rows)
    return rows


def _check(context: OptimizationContext, rows: Rows) -> None:
    """Raise `NotDivisible` if the rows cannot be divided.

    No node may write into values of the divided part, and no divided node may have an effect or be changed by another
    optimization.
    """
    graph = rows.graph
    divided_storages = {storage_of(v) for n in rows.nodes for v in (*graph.nodes[n].inputs, *graph.nodes[n].outputs)}
    for node in graph.nodes[rows.nodes[0] :]:
        if any(storage_of(v) in divided_storages for v in node.writes):
            raise NotDivisible(f"{node.op}{module_note(node)} writes into values that would be split")
    for node in [graph.nodes[n] for n in rows.nodes]:
        if _has_effects(node):
            raise NotDivisible(f"{node.op}{module_note(node)} writes or draws random numbers")
        if any(v in context.plan.replace for v in (*node.inputs, *node.outputs)):
            raise NotDivisible("another optimization has changed the program")


def _has_effects(node: Node) -> bool:
    return bool(node.writes or node.random or not node.outputs)


def module_note(node: Node) -> str:
    """Return " in MODULE" for the module of a node, or "", for messages."""
    return f" in {node.module}" if node.module else ""


def first_row(rows: Rows, node: Node) -> int:
    """Return the first row that the slice `node` selects."""
    start = arguments(node).get("start") or 0
    return int(start + rows.rows if start < 0 else start)
