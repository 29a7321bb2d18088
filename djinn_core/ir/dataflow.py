"""Producers and users of values, found past views, copies and casts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from djinn_core.ir.flow import COPIES, is_view
from djinn_core.ir.graph import Graph, Node

_SWAPS = frozenset({"permute", "swapaxes", "transpose"})
_SCALED = frozenset({*COPIES, "div", "mul"})

__all__ = ["COPIES", "ancestors", "chain", "is_view", "origin", "users"]

_SCALINGS = frozenset({"div", "mul"})


def origin(graph: Graph, value: int) -> int:
    """Return the value that `value` was viewed, cast or copied from, followed back to the first value in the graph."""
    while (node := graph.producer(value)) is not None and node.inputs and (is_view(node) or node.operation in COPIES):
        value = node.inputs[0]
    return value


def chain(graph: Graph, value: int, through: frozenset[str] = COPIES) -> Iterator[int]:
    """Return `value` and its predecessors through views and ops in `through` (their first input), backwards.

    `mul` and `div` in `through` are followed only if they scale by a number.
    """
    yield value
    while (node := graph.producer(value)) is not None and (is_view(node) or node.operation in through):
        if not node.inputs or (node.operation in _SCALINGS and len(node.inputs) > 1):
            return
        value = node.inputs[0]
        yield value


def ancestors(
    graph: Graph, value: int, stop: frozenset[str] = frozenset(), limit: int = 256
) -> Iterator[tuple[int, Node | None]]:
    """Return the ancestors of `value`, nearest first, each with its producer (None for an input of the graph).

    The walk stops at ops in `stop` and after `limit` values.
    """
    queue, seen = deque([value]), {value}
    while queue and limit:
        limit -= 1
        current = queue.popleft()
        node = graph.producer(current)
        yield current, node
        if node is not None and node.operation not in stop:
            fresh = [v for v in dict.fromkeys(node.inputs) if v not in seen]
            seen.update(fresh)
            queue.extend(fresh)


def users(graph: Graph, value: int, through: frozenset[str] = COPIES, limit: int = 256) -> Iterator[tuple[Node, int]]:
    """Return the nodes that compute with `value`, nearest first, each with the view of `value` that it reads.

    Views and ops in `through` are skipped. The walk ends after `limit` nodes.
    """
    queue, seen = deque([value]), {value}
    while queue and limit:
        current = queue.popleft()
        for node in graph.consumers(current):
            limit -= 1
            if not (is_view(node) or node.operation in through):
                yield node, current
                continue
            fresh = [v for v in node.outputs if v not in seen]
            seen.update(fresh)
            queue.extend(fresh)


def query_shape(graph: Graph, query: int) -> tuple[int, ...]:
    """Return the shape (batch, heads, queries, width) of a query operand before it was folded for a matrix product.

    Products fold batch and heads into one dimension. If query heads share key heads, they also fold heads and queries.
    The result is the shape of the last 4-dimensional value before the fold, with heads before queries; else the
    operand's own shape.
    """
    shape = graph.meta(query).shape
    for value in chain(graph, query, _SCALED):
        candidate = graph.meta(value).shape
        if len(candidate) == 4 and candidate[-1] == shape[-1]:
            shape = candidate
        maker = graph.producer(value)
        if maker is not None and maker.operation in _SWAPS:
            break
    return shape
