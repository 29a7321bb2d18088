"""Kinds of attention masks (causal, sliding window, chunked), read from the ops that computed them."""

from __future__ import annotations

import attrs

from djinn.planning import COPIES, Graph, Node, arguments, chain

_TRIANGLES = frozenset({"tril", "tril_indices", "triu", "triu_indices"})
_COMPARISONS = frozenset({"ge", "gt", "le", "lt"})
_COUNTED = frozenset({*COPIES, "add", "arange", "cumsum", "index", "index_select", "ones", "ones_like", "sub"})
_JOINS = frozenset({
    "add", "bitwise_and", "bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or", "masked_fill", "mul",
    "rsub", "scalar_tensor", "sub", "where",
})  # fmt: skip
_CHUNKS = frozenset({"bitwise_right_shift", "div", "floor_divide"})
_LIMIT = 96  # ops that lead to a mask
_STEPS = 16  # ops between counting and comparing


@attrs.frozen
class Reach:
    """Visible positions of queries.

    Attributes:
        causal: True if later keys are hidden; None if unknown.
        name: `full`, `sliding` (the nearest keys) or `chunked` (keys of the same chunk); None if unknown.
        window: number of visible keys, if known.
    """

    causal: bool | None
    name: str | None
    window: int | None = None


@attrs.frozen
class _Bound:
    """A comparison of a key's position with a query's: key - query <= `offset`, or >= where it is a lower bound."""

    upper: bool
    offset: int
    beside: frozenset[int]  # values from elsewhere in the offset, such as the length of a cache


@attrs.define
class Masks:
    """Reads masks of one graph; most layers share theirs."""

    graph: Graph
    _known: dict[int, Reach] = attrs.field(init=False, factory=dict)

    def reach(self, masks: tuple[int, ...], flagged: bool, queries: int, keys: int) -> Reach:
        """Intersection of all these masks."""
        if queries == 1:
            return Reach(None, None)
        read = [self._read(mask, queries, keys) for mask in masks if _differs_by_query(self.graph, mask)]
        narrow = next((r for r in read if r.name not in {"full", None}), None)
        causal = flagged or any(r.causal for r in read)
        if narrow is not None:
            return attrs.evolve(narrow, causal=True if causal else narrow.causal)
        if any(r.name is None for r in read):
            return Reach(True if causal else None, "full" if flagged and not read else None)
        return Reach(causal, "full")

    def _read(self, mask: int, queries: int, keys: int) -> Reach:
        source = self.graph.flow.source(mask)
        if source not in self._known:
            self._known[source] = _read(self.graph, source, keys - queries)
        return self._known[source]


def _differs_by_query(graph: Graph, mask: int) -> bool:
    """True if a mask differs between queries. One that does not, such as for padding, is neither causal nor local."""
    metas = [graph.meta(v) for v in chain(graph, mask)]
    return all(len(m.shape) > 1 and m.shape[-2] > 1 and m.stride[-2] != 0 for m in metas)


def _read(graph: Graph, source: int, surplus: int) -> Reach:
    """Mask kind from the ops that made it; `surplus` is the number of keys minus the number of queries."""
    bounds, corners, unread = [], [], 0
    for at in graph.flow.ancestors(source, _TRIANGLES | _COMPARISONS, _LIMIT):
        node = graph.flow.node(at)
        if node is None:
            continue
        if node.operation in _TRIANGLES:
            corners.append((node.operation[:4], int(arguments(node).get("diagonal", 0) or 0)))
            corners += _further_corners(graph, node)
        elif node.operation in _COMPARISONS:
            read = _bounds(graph, node)
            bounds += read or []
            unread += read is None
        elif node.operation == "eq" and _same_chunk(graph, node) is not None:
            size = _same_chunk(graph, node)
            return Reach(_causal_beside(graph, source), "chunked", size)
    if corners:
        return _of_corners(corners)
    if bounds or unread:
        return _of_bounds(bounds, surplus) if bounds else Reach(True, None)
    return Reach(False, "full") if _apart(graph, source) else Reach(None, None)


def _apart(graph: Graph, source: int, depth: int = _STEPS) -> bool:
    """True if the mask is a combination of per-query and per-key masks, as for padding, and ignores their relative positions."""
    node = graph.flow.node(source)
    if node is None or depth == 0 or node.operation.removesuffix("_") not in _JOINS:
        return False
    return all(
        not _by_both(graph, value) or _apart(graph, operand, depth - 1)
        for value, operand in zip(node.inputs, graph.flow.operands(node), strict=True)
    )


def _by_both(graph: Graph, value: int) -> bool:
    """True if a mask varies along both queries and keys."""
    meta = graph.meta(value)
    return all(len(meta.shape) >= k and meta.shape[-k] > 1 and meta.stride[-k] != 0 for k in (1, 2))


def _further_corners(graph: Graph, node: Node) -> list[tuple[str, int]]:
    """Triangle that was applied to the operand of a triangle, for band-shaped masks."""
    before = graph.flow.node(graph.flow.operands(node)[0]) if node.inputs else None
    if before is None or before.operation not in _TRIANGLES:
        return []
    return [(before.operation[:4], int(arguments(before).get("diagonal", 0) or 0))]


def _of_corners(corners: list[tuple[str, int]]) -> Reach:
    low = [d for name, d in corners if name == "tril"]
    high = [d for name, d in corners if name == "triu"]
    if not low or not high:
        return Reach(True, "full")
    # If the triangles overlap, the overlap is visible; otherwise the gap between them is hidden.
    window = low[0] - high[0] + 1 if low[0] >= high[0] else high[0] - low[0] - 1
    last = low[0] if low[0] >= high[0] else high[0] - 1
    return Reach(last <= 0, "sliding", window)


def _of_bounds(bounds: list[_Bound], surplus: int) -> Reach:
    uppers, lowers = [b for b in bounds if b.upper], [b for b in bounds if not b.upper]
    if not lowers:
        return Reach(True, "full")
    if not uppers:
        return Reach(None, "sliding")
    upper, lower = min(uppers, key=lambda b: b.offset), max(lowers, key=lambda b: b.offset)
    window = upper.offset - lower.offset + 1 if upper.beside == lower.beside else None
    return Reach(bool(upper.beside) or upper.offset <= surplus, "sliding", window)


def _bounds(graph: Graph, node: Node) -> list[_Bound] | None:
    """Bounds that a comparison of positions sets; empty if it compares something else, None if the sides are unknown."""
    if len(node.inputs) == 1:
        return _of_distance(graph, node)
    first, second = (_counted(graph, v) for v in node.inputs[:2])
    if first is None or second is None:
        return []
    axes = [_by_key(graph, v) for v in node.inputs]
    if axes not in ([True, False], [False, True]):
        return None
    (left, beside), (right, other) = first, second
    strict = node.operation in {"gt", "lt"}
    upper = (node.operation in {"le", "lt"}) == axes[0]
    key, query = (left, right) if axes[0] else (right, left)
    return [_Bound(upper, query - key + (0 if not strict else -1 if upper else 1), beside ^ other)]


def _of_distance(graph: Graph, node: Node) -> list[_Bound]:
    """Bounds from a difference of positions, or its absolute value, compared with a number."""
    limit = arguments(node).get("other")
    before = graph.flow.node(graph.flow.operands(node)[0])
    absolute = before is not None and before.operation == "abs"
    if before is not None and absolute:
        before = graph.flow.node(graph.flow.operands(before)[0])
    if before is None or before.operation != "sub" or len(before.inputs) != 2 or not isinstance(limit, int | float):
        return []
    counts, axes = [_counted(graph, v) for v in before.inputs], [_by_key(graph, v) for v in before.inputs]
    if counts[0] is None or counts[1] is None or axes not in ([True, False], [False, True]):
        return []
    shift, beside = counts[1][0] - counts[0][0], counts[0][1] ^ counts[1][1]
    strict, below = node.operation in {"gt", "lt"}, node.operation in {"le", "lt"}
    edge = int(limit) + (0 if not strict else -1 if below else 1)
    if absolute:
        return [_Bound(True, edge, beside), _Bound(False, -edge, beside)] if below else []
    if axes[0]:  # key - query
        return [_Bound(below, edge + shift, beside)]
    return [_Bound(not below, -edge - shift, beside)]


def _by_key(graph: Graph, value: int) -> bool | None:
    """True if positions vary along keys only, False if along queries only, None otherwise."""
    meta = graph.meta(value)
    along = [len(meta.shape) >= k and meta.shape[-k] > 1 and meta.stride[-k] != 0 for k in (1, 2)]
    return along[0] if along[0] != along[1] else None


def _counted(graph: Graph, value: int) -> tuple[int, frozenset[int]] | None:
    """Offset of counted positions from zero, with other summands; None if `value` does not count."""
    flow, offset = graph.flow, 0
    beside: set[int] = set()
    source = flow.source(value)
    for _ in range(_STEPS):
        node = flow.node(source)
        if node is None or node.operation.removesuffix("_") not in _COUNTED:
            return None
        given = arguments(node)
        if node.operation == "arange":
            return offset + int(given.get("start", 0) or 0), frozenset(beside)
        if not node.inputs:
            return None
        operands = flow.operands(node)
        if len(operands) == 1 and isinstance(given.get("other"), int | float):
            offset += int(given["other"]) * (-1 if node.operation.startswith("sub") else 1)
        elif node.operation in {"add", "sub"} and len(operands) == 2:
            sizes = [graph.meta(v).numel for v in node.inputs]
            counted = 0 if sizes[0] >= sizes[1] else 1
            beside ^= {operands[1 - counted]}
            operands = operands[counted:]
        elif node.operation == "cumsum":
            return offset, frozenset(beside)
        source = operands[0]
    return None


def _same_chunk(graph: Graph, node: Node) -> int | None:
    """Chunk size, if a node compares the chunks of two positions; otherwise None."""
    makers = [graph.flow.node(s) for s in graph.flow.operands(node)]
    if len(makers) != 2 or any(m is None or m.operation not in _CHUNKS for m in makers):
        return None
    sizes = [arguments(m).get("other") for m in makers if m is not None]
    if any(_counted(graph, m.inputs[0]) is None for m in makers if m is not None):
        return None
    return int(sizes[0]) if isinstance(sizes[0], int | float) and sizes[0] == sizes[1] else None


def _causal_beside(graph: Graph, source: int) -> bool | None:
    nodes = (graph.flow.node(at) for at in graph.flow.ancestors(source, _COMPARISONS, _LIMIT))
    read = [_bounds(graph, n) for n in nodes if n is not None and n.operation in _COMPARISONS]
    return True if any(r is None or any(b.upper for b in r) for r in read) else None
