"""Find the cache from which an operand of attention comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from djinn.planning import COPIES, Graph, Node, chain, storage_of
from djinn_kv_cache.caches import SCALED, Cache, Caches

# Between a cache and the attention that reads it: repeating for the query heads, scaling, views and copies.
_PASS_THROUGH = frozenset({*COPIES, "div", "gather", "index", "index_select", "mul", "repeat", "repeat_interleave"})
_LAYERS = {"addmm": slice(1, 2), "linear": slice(0, 1), "matmul": slice(0, 1), "mm": slice(0, 1)}
# Before and after a layer that computes keys from the cache: rotary positions, dequantization.
_BEFORE_LAYER = frozenset({*_PASS_THROUGH, "_fused_rms_norm", "cat", "layer_norm", "native_layer_norm", "rms_norm"})
_AFTER_LAYER = frozenset({*_BEFORE_LAYER, *SCALED, *_LAYERS, "neg", "stack"})
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros"}
)
_MAX_OPS = 40  # maximum number of ops to visit between a cache and the attention that reads it


@attrs.define
class CacheTracer:
    """Tracer from an operand of attention to its cache.

    Attributes:
        graph: the graph.
        caches: all possible caches in the graph.
    """

    graph: Graph
    caches: Caches

    def cache(self, value: int) -> Cache | None:
        """Return the cache from which `value`, the keys or values of an attention, was computed, or None."""
        path = list(chain(self.graph, value, _PASS_THROUGH))
        cache = next((k for v in path if (k := self._cache_of(v)) is not None), None) or self._nearest_cache(path[-1])
        if cache is not None:
            return cache
        if self.graph.producer(path[-1]) is None:
            return Cache("read", (path[-1],))
        surviving = [v for v in path if v in self.caches.outliving.get(storage_of(v), ())]
        return Cache("kept", tuple(surviving)) if surviving else None

    def _cache_of(self, value: int) -> Cache | None:
        cache = self.caches.by_storage.get(storage_of(value))
        if cache is None and self.caches.by_source and (producer := self.graph.producer(value)) is not None:
            cache = self.caches.by_source.get(producer.id)
        return cache

    def _nearest_cache(self, value: int) -> Cache | None:
        """Return the nearest cache from which `value` was computed, or None. A quantized cache includes its scales."""
        queue, visited, limit = deque([(value, _AFTER_LAYER)]), {value}, _MAX_OPS
        nearest: Cache | None = None
        quantized_inputs: list[int] = []
        scales: list[int] = []
        while queue and limit:
            limit -= 1
            current, allowed = queue.popleft()
            node = self.graph.producer(current)
            if (cache := self._cache_of(current)) is not None:
                nearest = nearest or cache
            elif node is None and self._is_quantized_input(current):
                quantized_inputs.append(current)
            elif node is not None:
                remaining_ops = _BEFORE_LAYER if node.operation in _LAYERS else allowed
                new_values = [v for v in self._data_operands(current, node, allowed) if v not in visited]
                scales += self._scales(node, new_values)
                visited.update(new_values)
                queue.extend((v, remaining_ops) for v in new_values)
        if quantized_inputs:
            nearest = attrs.evolve(nearest or Cache("appended", ()), quantised=True)
        if nearest is None or not nearest.quantised:
            return nearest
        return attrs.evolve(nearest, values=tuple(dict.fromkeys((*quantized_inputs, *nearest.values, *scales))))

    def _scales(self, node: Node, followed: Sequence[int]) -> list[int]:
        """Return operands of a sum or scaling that may be scales: program inputs that are not in `followed` (data)."""
        if node.operation not in {"add", "div", "mul", "sub"}:
            return []
        return [v for v in node.inputs if v not in followed and self.graph.producer(v) is None]

    def _is_quantized_input(self, value: int) -> bool:
        return self.caches.is_quantized(value) and len(self.graph.meta(value).shape) > 2

    def _data_operands(self, value: int, node: Node, allowed: frozenset[str]) -> Sequence[int]:
        """Return the values that contain the data of `value`, the result of `node`.

        For an allocation, return the values written into it. For an op in `allowed`, return the input of a layer, all
        operands of a `cat`, or the largest operand. For another op, return the operand that it passes on, or ().
        `allowed`: ops that may lie between the cache and the attention.
        """
        if node.operation in _ALLOCATIONS:
            return self.caches.new_buffers.get(storage_of(value), ())
        if not node.inputs:
            return ()
        if node.operation not in allowed:
            return node.inputs[:1] if self.graph.flow.pass_through[node.id] else ()
        if node.operation in _LAYERS:
            return node.inputs[_LAYERS[node.operation]]
        if node.operation in {"cat", "stack"}:
            return node.inputs
        return (max(node.inputs, key=lambda v: self.graph.meta(v).numel),)
