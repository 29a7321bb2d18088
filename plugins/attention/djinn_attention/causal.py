"""Recognise causal masks by the ops that compute them."""

from __future__ import annotations

from djinn.planning import COPIES, Graph, Node, arguments, chain

_TRIANGLES = frozenset({"tril", "tril_indices", "triu", "triu_indices"})
_COMPARISONS = frozenset({"ge", "gt", "le", "lt"})
_COUNTED = frozenset({*COPIES, "add", "arange", "cumsum", "index", "index_select", "ones", "ones_like", "sub"})
_JOINS = frozenset({
    "add", "bitwise_and", "bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or", "masked_fill", "mul",
    "rsub", "scalar_tensor", "sub", "where",
})  # fmt: skip
_LIMIT = 96  # ops that lead to a mask
_STEPS = 16  # ops between counting and comparing


def is_causal(graph: Graph, masks: tuple[int, ...], queries: int) -> bool | None:
    """Return True if a mask hides later keys, and False if no mask does. If this is unknown, return None."""
    if queries == 1:
        return None
    read = [_read(graph, graph.flow.source(mask)) for mask in masks if _differs_by_query(graph, mask)]
    return True if any(read) else None if None in read else False


def _differs_by_query(graph: Graph, mask: int) -> bool:
    metas = [graph.meta(v) for v in chain(graph, mask)]
    return all(len(m.shape) > 1 and m.shape[-2] > 1 and m.stride[-2] != 0 for m in metas)


def _read(graph: Graph, source: int) -> bool | None:
    triangles, bounds = list[tuple[bool, int]](), list[bool | None]()
    for at in graph.flow.ancestors(source, _COMPARISONS, _LIMIT):
        node = graph.flow.node(at)
        if node is not None and node.operation in _TRIANGLES:
            triangles.append((node.operation.startswith("tril"), int(arguments(node).get("diagonal", 0) or 0)))
        elif node is not None and node.operation in _COMPARISONS:
            bounds += _bounds(graph, node)
    low, high = ([d for lower, d in triangles if lower is side] for side in (True, False))
    if low and high:  # a band
        return (low[0] if low[0] >= high[0] else high[0] - 1) <= 0
    if triangles or any(bound is not False for bound in bounds):
        return True
    return False if bounds or _is_apart(graph, source) else None


def _bounds(graph: Graph, node: Node) -> list[bool | None]:
    """Return for a comparison of positions whether it hides later keys. If the two sides are unknown, the item is None.

    For other nodes, return an empty list.
    """
    pair = node.inputs[:2]
    if len(node.inputs) == 1:
        before = graph.flow.node(graph.flow.operands(node)[0])
        if before is not None and before.operation == "abs":
            before = graph.flow.node(graph.flow.operands(before)[0])
            return [False] if before is not None and before.operation == "sub" else []
        if before is None or before.operation != "sub" or len(before.inputs) != 2:
            return []
        pair = before.inputs
    if not all(_counts(graph, value) for value in pair):
        return []
    axes = [_by_key(graph, value) for value in pair]
    if axes not in ([True, False], [False, True]):
        return [None]
    return [(node.operation in {"le", "lt"}) == axes[0]]


def _by_key(graph: Graph, value: int) -> bool | None:
    """Return True if a value varies along keys only, and False if it varies along queries only.

    Otherwise return None.
    """
    meta = graph.meta(value)
    along = [len(meta.shape) >= k and meta.shape[-k] > 1 and meta.stride[-k] != 0 for k in (1, 2)]
    return along[0] if along[0] != along[1] else None


def _counts(graph: Graph, value: int) -> bool:
    """Return True if a value is a sequence of positions, perhaps with an offset."""
    source = graph.flow.source(value)
    for _ in range(_STEPS):
        node = graph.flow.node(source)
        if node is None or node.operation.removesuffix("_") not in _COUNTED:
            return False
        if node.operation in {"arange", "cumsum"}:
            return True
        if not node.inputs:
            return False
        sizes = [graph.meta(v).numel for v in node.inputs]
        largest = node.operation in {"add", "sub"} and len(sizes) == 2 and sizes[1] > sizes[0]
        source = graph.flow.operands(node)[1 if largest else 0]
    return False


def _is_apart(graph: Graph, source: int, depth: int = _STEPS) -> bool:
    """Return True if a mask combines a mask of queries with a mask of keys, as for padding.

    Such a mask does not depend on the relative positions of queries and keys.
    """
    node = graph.flow.node(source)
    if node is None or depth == 0 or node.operation.removesuffix("_") not in _JOINS:
        return False
    return all(
        not _by_both(graph, value) or _is_apart(graph, operand, depth - 1)
        for value, operand in zip(node.inputs, graph.flow.operands(node), strict=True)
    )


def _by_both(graph: Graph, value: int) -> bool:
    meta = graph.meta(value)
    return all(len(meta.shape) >= k and meta.shape[-k] > 1 and meta.stride[-k] != 0 for k in (1, 2))
