"""Detection of backward passes: a backward pass repeats many forward patterns."""

from __future__ import annotations

from djinn_core.ir.graph import Graph
from djinn_core.ir.op_families import OPTIMIZER, is_backward

_ONES = frozenset({"full_like", "ones_like"})


class Gradients:
    """The nodes of a graph that derive from the gradient of a loss.

    They are computed at the first query, in linear time.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._derived: bytearray | None = None

    def __contains__(self, node: int) -> bool:
        if self._derived is None:
            self._derived = self._find_derived()
        return bool(self._derived[node])

    def _find_derived(self) -> bytearray:
        graph = self._graph
        derived = bytearray(len(graph.nodes))
        if not any(o in _ONES or "_backward" in o for o in graph.by_op):
            return derived
        for node, sources in zip(graph.nodes, graph.flow.sources, strict=True):
            if node.operation in OPTIMIZER:
                continue  # the result is a weight again
            seed = node.operation in _ONES and self._is_loss_shape(node.outputs)
            derived[node.id] = seed or is_backward(node) or any(s >= 0 and derived[s] for s in sources)
        return derived

    def _is_loss_shape(self, outputs: tuple[int, ...]) -> bool:
        """Return True if the first output has the shape of a loss: one element."""
        return bool(outputs) and self._graph.meta(outputs[0]).shape in {(), (1,)}
