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
    """The value that `value` was viewed, cast or copied from, as far back as the graph goes."""
    while (node := graph.producer(value)) is not None and node.inputs and (is_view(node) or node.operation in COPIES):
        value = node.inputs[0]
    return value


def chain(graph: Graph, value: int, through: frozenset[str] = COPIES) -> Iterator[int]:
    """`value`, what it was viewed from or made from by an op in `through` (its first input), and so on backwards.

    `mul` and `div` in `through` are followed only where they scale by a number.
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
    """Values that `value` is computed from, nearest first, each with its maker (None for an input of the graph).

    The walk does not go past ops in `stop`, and ends after `limit` values.
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
    """Nodes that use `value` and do more than look at or pass it on, with the value as they see it, nearest first.

    Views and ops in `through` pass it on. The walk ends after `limit` nodes.
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
    """Shape (batch, heads, queries, width) of a query operand before it was folded for a matrix product.

    Products fold batch and heads into one dimension, and, where query heads share key heads, heads and queries. The shape
    is that of the last value with four dimensions before heads and queries were swapped into place; where there is none,
    the operand's own.
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
