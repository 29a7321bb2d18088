"""Recognise causal masks by the ops that compute them."""

from __future__ import annotations

from djinn.planning import COPIES, Graph, Node, arguments, chain

_TRIANGLES = frozenset({"tril", "tril_indices", "triu", "triu_indices"})
_COMPARISONS = frozenset({"ge", "gt", "le", "lt"})
_POSITION_OPS = frozenset({*COPIES, "add", "arange", "cumsum", "index", "index_select", "ones", "ones_like", "sub"})
_JOINS = frozenset({
    "add", "bitwise_and", "bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or", "masked_fill", "mul",
    "rsub", "scalar_tensor", "sub", "where",
})  # fmt: skip
_MAX_MASK_OPS = 96  # maximum number of ops that compute a mask
_MAX_STEPS = 16  # maximum number of ops from the positions to their comparison, and of nested masks


def is_causal(graph: Graph, masks: tuple[int, ...], queries: int) -> bool | None:
    """Return True if one of `masks` hides later keys, False if none does, or None if this is unknown.

    `queries`: number of queries. With one query, the result is None.
    """
    if queries == 1:
        return None
    results = [_classify_mask(graph, graph.flow.source(mask)) for mask in masks if _differs_by_query(graph, mask)]
    return True if any(results) else None if None in results else False


def _differs_by_query(graph: Graph, mask: int) -> bool:
    metas = [graph.meta(v) for v in chain(graph, mask)]
    return all(len(m.shape) > 1 and m.shape[-2] > 1 and m.stride[-2] != 0 for m in metas)


def _classify_mask(graph: Graph, source: int) -> bool | None:
    """Return True if a mask hides later keys, False if it does not, or None if this is unknown."""
    triangles, bounds = list[tuple[bool, int]](), list[bool | None]()
    for node_id in graph.flow.ancestors(source, _COMPARISONS, _MAX_MASK_OPS):
        node = graph.flow.node(node_id)
        if node is not None and node.operation in _TRIANGLES:
            triangles.append((node.operation.startswith("tril"), int(arguments(node).get("diagonal", 0) or 0)))
        elif node is not None and node.operation in _COMPARISONS:
            bounds += _comparison_results(graph, node)
    low, high = ([d for lower, d in triangles if lower is side] for side in (True, False))
    if low and high:  # a band
        return (low[0] if low[0] >= high[0] else high[0] - 1) <= 0
    if triangles or any(hides_later_keys is not False for hides_later_keys in bounds):
        return True
    return False if bounds or _combines_separate_masks(graph, source) else None


def _comparison_results(graph: Graph, node: Node) -> list[bool | None]:
    """Return a list with one item if a node compares positions, otherwise an empty list.

    The item is True if the comparison hides later keys, False if it does not, and None if this is unknown.
    """
    pair = node.inputs[:2]
    if len(node.inputs) == 1:
        producer = graph.flow.node(graph.flow.operands(node)[0])
        if producer is not None and producer.operation == "abs":
            producer = graph.flow.node(graph.flow.operands(producer)[0])
            return [False] if producer is not None and producer.operation == "sub" else []
        if producer is None or producer.operation != "sub" or len(producer.inputs) != 2:
            return []
        pair = producer.inputs
    if not all(_is_position_sequence(graph, value) for value in pair):
        return []
    axes = [_varies_by_key(graph, value) for value in pair]
    if axes not in ([True, False], [False, True]):
        return [None]
    return [(node.operation in {"le", "lt"}) == axes[0]]


def _varies_by_key(graph: Graph, value: int) -> bool | None:
    """Return True if a value varies only along keys, False if it varies only along queries, else None."""
    meta = graph.meta(value)
    varies = [len(meta.shape) >= k and meta.shape[-k] > 1 and meta.stride[-k] != 0 for k in (1, 2)]
    return varies[0] if varies[0] != varies[1] else None


def _is_position_sequence(graph: Graph, value: int) -> bool:
    """Return True if a value is a sequence of positions, with or without an offset."""
    source = graph.flow.source(value)
    for _ in range(_MAX_STEPS):
        node = graph.flow.node(source)
        if node is None or node.operation.removesuffix("_") not in _POSITION_OPS:
            return False
        if node.operation in {"arange", "cumsum"}:
            return True
        if not node.inputs:
            return False
        sizes = [graph.meta(v).numel for v in node.inputs]
        largest = node.operation in {"add", "sub"} and len(sizes) == 2 and sizes[1] > sizes[0]
        source = graph.flow.operands(node)[1 if largest else 0]
    return False


def _combines_separate_masks(graph: Graph, source: int, depth: int = _MAX_STEPS) -> bool:
    """Return True if a mask combines a mask of queries with a mask of keys, as for padding.

    Such a mask does not depend on the relative positions of queries and keys.
    """
    node = graph.flow.node(source)
    if node is None or depth == 0 or node.operation.removesuffix("_") not in _JOINS:
        return False
    return all(
        not _varies_by_both(graph, value) or _combines_separate_masks(graph, operand, depth - 1)
        for value, operand in zip(node.inputs, graph.flow.operands(node), strict=True)
    )


def _varies_by_both(graph: Graph, value: int) -> bool:
    meta = graph.meta(value)
    return all(len(meta.shape) >= k and meta.shape[-k] > 1 and meta.stride[-k] != 0 for k in (1, 2))
