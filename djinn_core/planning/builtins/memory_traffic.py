"""Bytes that an op reads and writes, from metadata alone.

Each operand is read once and each result is written once. Elements that share memory (expanded, overlapping) count
once. An op that looks rows up reads only those rows. An op that overwrites does not read the old elements. Views move
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import storage_of, storages_of
from djinn_core.ir.values import TensorMeta

FEW = 8  # number of distinct values to check; many list elements have equal metadata

# These ops allocate memory without writing it.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# These ops overwrite their first operand without reading it.
_FILLS = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip
# These ops read from their first operand only as many elements as they return.
_LOOK_UPS = frozenset({
    "embedding", "gather", "index", "index_select", "masked_select", "take", "take_along_dim", "_unsafe_index",
})  # fmt: skip
# These ops return a row per bag and read a row per index.
_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"})
# These ops write only as many elements of their first operand as the source has.
_SCATTERS = frozenset({
    "_index_put_impl_", "index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "put_", "scatter_",
    "scatter_add_", "scatter_reduce_",
})  # fmt: skip
_ACCUMULATE = frozenset({"index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_"})


def traffic_of(graph: Graph, node: Node) -> tuple[int, int]:
    """Return the bytes read and the bytes written by `node`, which must not be a view."""
    operation = node.operation
    if operation in _ALLOCATIONS:
        return 0, 0
    if operation in _SCATTERS:
        return _scatter_traffic(graph, node)
    bytes_written = _bytes_written(graph, node)
    if operation in _LOOK_UPS:
        table, *indices = dict.fromkeys(node.inputs)
        return min(distinct_bytes(graph.meta(table)), bytes_written) + _total(graph, indices), bytes_written
    if operation in _BAGS:
        table, bags, *other_operands = node.inputs
        width = graph.meta(table).shape[-1] * graph.meta(table).dtype.itemsize
        return graph.meta(bags).numel * width + _total(graph, (bags, *other_operands)), bytes_written
    overwritten = set(node.writes) if operation in _FILLS or node.op.endswith("out") else set()
    return _total(graph, [v for v in dict.fromkeys(node.inputs) if v not in overwritten]), bytes_written


def _bytes_written(graph: Graph, node: Node) -> int:
    """Return the bytes of newly allocated results and of in-place writes."""
    operand_storages = set(storages_of(node.inputs))
    fresh = [v for v in node.outputs if storage_of(v) not in operand_storages]
    return _total(graph, (*fresh, *dict.fromkeys(node.writes)))


def _scatter_traffic(graph: Graph, node: Node) -> tuple[int, int]:
    target, *sources = dict.fromkeys(node.inputs)
    into = graph.meta(target)
    count = max((graph.meta(v).numel for v in sources), default=0)
    bytes_written = min(distinct_bytes(into), count * into.dtype.itemsize)
    accumulated = bytes_written if node.operation in _ACCUMULATE else 0
    return _total(graph, sources) + accumulated, bytes_written


def _total(graph: Graph, values: Sequence[int]) -> int:
    if len(values) <= FEW:
        return sum([distinct_bytes(graph.meta(v)) for v in values])
    return sum([distinct_bytes(meta) * times for meta, times in Counter(map(graph.meta, values)).items()])


def distinct_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the elements at distinct addresses. An expanded dimension has stride 0 and costs nothing."""
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= min(size, 1) if stride == 0 else size
    return min(count, meta.extent) * meta.dtype.itemsize
