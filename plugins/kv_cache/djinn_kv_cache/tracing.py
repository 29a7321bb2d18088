"""Find the cache from which an operand of attention comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from djinn.planning import COPIES, Graph, Node, chain, storage_of
from djinn_kv_cache.caches import SCALED, Cache, Caches

# Between a cache and the attention that reads it: repeating for the query heads, scaling, views and copies.
_PASSED = frozenset({*COPIES, "div", "gather", "index", "index_select", "mul", "repeat", "repeat_interleave"})
_LAYERS = {"addmm": slice(1, 2), "linear": slice(0, 1), "matmul": slice(0, 1), "mm": slice(0, 1)}
# Before and after a layer that computes keys from the cache: rotary positions, dequantization.
_BEFORE_LAYER = frozenset({*_PASSED, "_fused_rms_norm", "cat", "layer_norm", "native_layer_norm", "rms_norm"})
_AFTER_LAYER = frozenset({*_BEFORE_LAYER, *SCALED, *_LAYERS, "neg", "stack"})
_BLANK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros"})
_FAR = 40  # ops between a cache and the attention that reads from it


@attrs.define
class CacheTracer:
    """Find the cache from which an operand of attention comes.

    Attributes:
        graph: the graph.
        caches: all possible caches in the graph.
    """

    graph: Graph
    caches: Caches

    def cache(self, value: int) -> Cache | None:
        """Return the cache from which the key or value operand of an attention comes, or None."""
        path = list(chain(self.graph, value, _PASSED))
        cache = next((k for v in path if (k := self._known(v)) is not None), None) or self._far(path[-1])
        if cache is not None:
            return cache
        if self.graph.producer(path[-1]) is None:
            return Cache("read", (path[-1],))
        surviving = [v for v in path if v in self.caches.kept.get(storage_of(v), ())]
        return Cache("kept", tuple(surviving)) if surviving else None

    def _known(self, value: int) -> Cache | None:
        cache = self.caches.by_storage.get(storage_of(value))
        if cache is None and self.caches.by_source and (maker := self.graph.producer(value)) is not None:
            cache = self.caches.by_source.get(maker.id)
        return cache

    def _far(self, value: int) -> Cache | None:
        """Return the nearest cache from which `value` was computed, including quantized values and their scales."""
        queue, visited, limit = deque([(value, _AFTER_LAYER)]), {value}, _FAR
        nearest: Cache | None = None
        few: list[int] = []
        scales: list[int] = []
        while queue and limit:
            limit -= 1
            current, allowed = queue.popleft()
            node = self.graph.producer(current)
            if (cache := self._known(current)) is not None:
                nearest = nearest or cache
            elif node is None and self._few_bits(current):
                few.append(current)
            elif node is not None:
                remaining_ops = _BEFORE_LAYER if node.operation in _LAYERS else allowed
                fresh = [v for v in self._made_of(current, node, allowed) if v not in visited]
                scales += self._scales(node, fresh)
                visited.update(fresh)
                queue.extend((v, remaining_ops) for v in fresh)
        if few:
            nearest = attrs.evolve(nearest or Cache("appended", ()), quantised=True)
        if nearest is None or not nearest.quantised:
            return nearest
        return attrs.evolve(nearest, values=tuple(dict.fromkeys((*few, *nearest.values, *scales))))

    def _scales(self, node: Node, followed: Sequence[int]) -> list[int]:
        """Return the scales of a dequantization that are inputs of the program."""
        if node.operation not in {"add", "div", "mul", "sub"}:
            return []
        return [v for v in node.inputs if v not in followed and self.graph.producer(v) is None]

    def _few_bits(self, value: int) -> bool:
        return self.caches.is_low(value) and len(self.graph.meta(value).shape) > 2

    def _made_of(self, value: int, node: Node, allowed: frozenset[str]) -> Sequence[int]:
        """Return the operands that contain the data of a node.

        They are the input of a layer, or the largest operand of a sum or a scaling.
        """
        if node.operation in _BLANK:
            return self.caches.filled.get(storage_of(value), ())
        if not node.inputs:
            return ()
        if node.operation not in allowed:
            return node.inputs[:1] if self.graph.flow.looks[node.id] else ()
        if node.operation in _LAYERS:
            return node.inputs[_LAYERS[node.operation]]
        if node.operation in {"cat", "stack"}:
            return node.inputs
        return (max(node.inputs, key=lambda v: self.graph.meta(v).numel),)
