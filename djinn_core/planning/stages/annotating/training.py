"""Detection of training steps: the beginning and end of the backward pass, and the end of the optimizer.

Autograd runs a backward pass to its end before other ops are recorded, so the parts of a step are contiguous. A
backward pass begins with the gradient of the loss: a tensor of ones in the loss's shape. It ends with the last op that
differentiates a layer. Later ops that write into weights, and their ancestors, belong to the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import storage_of
from djinn_core.ir.op_families import OPTIMIZER, is_backward
from djinn_core.ir.profile import DataResidency, ExecutionPhase
from djinn_core.planning.stages.annotating.inputs import LAYERS, Inputs

_ONES = frozenset({"full_like", "ones_like"})
_NEW = frozenset({"new_empty", "new_empty_strided"})
# In a backward pass these ops compute gradients of layers. Optimizers do not use them.
_OF_LAYERS = frozenset({
    "addmm", "baddbmm", "bmm", "embedding_dense_backward", "index_add", "index_add_", "linear", "matmul", "mm",
    "scatter_add", "sum",
})  # fmt: skip


@attrs.frozen
class TrainingParts:
    """The parts of a program that belong to training steps.

    Attributes:
        phases: by node of a training step; empty if nothing is trained.
        backward: number of ops that differentiate.
        updates: number of ops that write into weights.
        gradients: nodes whose results derive from the gradient of a loss.
    """

    phases: Mapping[int, ExecutionPhase]
    backward: int
    updates: int
    gradients: bytearray

    def __bool__(self) -> bool:
        return bool(self.phases)


def training_in(graph: Graph, inputs: Inputs, known_residency: Mapping[int, DataResidency]) -> TrainingParts:
    """Return the parts of a program that belong to training steps.

    Args:
        graph: the program.
        inputs: findings about its inputs.
        known_residency: residency of values from earlier programs, such as gradients that wait for the optimizer.
    """
    walk = _BackwardWalk(graph, inputs, known_residency)
    if not (walk.layers or walk.updates):
        return TrainingParts({}, 0, 0, walk.derived)
    return TrainingParts(_phases(graph, walk), len(walk.layers), len(walk.updates), walk.derived)


class _BackwardWalk:
    """A single walk over the program that finds backward passes and weight updates.

    Attributes:
        derived: by node, True if it derives from the gradient of a loss.
        seeds: first nodes of backward passes.
        layers: nodes that compute gradients of layers.
        updates: nodes that write weights.
    """

    def __init__(self, graph: Graph, inputs: Inputs, known_residency: Mapping[int, DataResidency]) -> None:
        self.derived = bytearray(len(graph.nodes))
        self.seeds: list[int] = []
        self.layers: list[int] = []
        self.updates: list[int] = []
        self._graph, self._stops = graph, bytearray(len(graph.nodes))
        self._differentiates = any("_backward" in operation for operation in graph.by_op)
        weights = (v for v, kind in known_residency.items() if kind is DataResidency.PERSISTENT_WEIGHT)
        self._weights = {storage_of(v) for v in (*inputs.weights, *weights)}
        is_pending_gradient = [known_residency.get(v) is DataResidency.GRADIENT for v in graph.inputs]
        for node, sources in zip(graph.nodes, graph.flow.sources, strict=True):
            self._add_node(
                node, any(is_pending_gradient[~s] if s < 0 else self.derived[s] and not self._stops[s] for s in sources)
            )

    def _add_node(self, node: Node, derived: bool) -> None:
        backward = is_backward(node)
        seed = node.operation in _ONES and self._is_seed(node)
        if derived or backward or seed:
            self.derived[node.id] = True
            if seed:
                self.seeds.append(node.id)
            elif backward or node.operation in _OF_LAYERS:
                self.layers.append(node.id)
        fused = node.operation in OPTIMIZER
        if fused or (node.writes and derived and any(storage_of(v) in self._weights for v in node.writes)):
            self.updates.append(node.id)
            self._stops[node.id] = True  # the result is a weight again

    def _is_seed(self, node: Node) -> bool:
        """Return True if `node` creates the initial gradient of a computed loss, a tensor of ones."""
        shape = self._graph.meta(node.outputs[0]).shape if node.outputs else (0,)
        source = self._graph.flow.operands(node)[0]
        return shape in {(), (1,)} and bool(self._graph.flow.users(node.id)) and (source >= 0 or self._differentiates)


def _phases(graph: Graph, walk: _BackwardWalk) -> dict[int, ExecutionPhase]:
    """Return the phase of each node of the training steps.

    The program is cut at the beginnings and ends of backward passes and at the last writes into weights.
    """
    count = len(graph.nodes)
    starts = walk.seeds or walk.layers[:1] or [0]
    phases = dict.fromkeys(range(starts[0]), ExecutionPhase.TRAINING_FORWARD)
    layers, updates = _MonotoneCursor(walk.layers), _MonotoneCursor(walk.updates)
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        last = layers.last_before(end, at_least=start)
        end_of_update = updates.last_before(end, at_least=last)
        has_backward = start < last or bool(walk.seeds)
        after = _end_of_accumulation(graph, walk.derived, last, end) if has_backward else last
        phases.update(dict.fromkeys(range(start, after + 1), ExecutionPhase.TRAINING_BACKWARD))
        first = after + 1 if has_backward else start
        optimizing = range(first, end_of_update + 1)
        phases.update(dict.fromkeys(optimizing, ExecutionPhase.TRAINING_OPTIMIZER))
        next_start = max(first, end_of_update + 1)
        phases.update(
            dict.fromkeys(
                range(next_start, end), _phase_after_step(graph, range(next_start, end), end_of_update > last)
            )
        )
    return phases


def _phase_after_step(graph: Graph, nodes: range, optimized: bool) -> ExecutionPhase:
    """Return the phase of the nodes after a step: a forward pass if they contain layers, else the phase before them."""
    if any(graph.nodes[n].operation in LAYERS for n in nodes):
        return ExecutionPhase.TRAINING_FORWARD
    return ExecutionPhase.TRAINING_OPTIMIZER if optimized else ExecutionPhase.TRAINING_BACKWARD


def _end_of_accumulation(graph: Graph, derived: bytearray, last: int, end: int) -> int:
    """Return the last of the views, copies and sums of gradients that directly follow node `last`, before node `end`.

    Return `last` if there are none. Sums occur if a weight is used twice. `derived`: nodes that derive from a gradient.
    """
    flow, outputs = graph.flow, set(graph.outputs)
    while last + 1 < end:
        node = graph.nodes[last + 1]
        if node.operation == "clone" and outputs.issuperset((*node.inputs, *node.outputs)):
            break  # not the gradient: the first momentum
        is_sum = node.operation == "add" and len(flow.sources[node.id]) == 2
        is_copy = flow.pass_through[node.id] or node.operation in _NEW  # a copy in the layout of the weight
        if not is_copy and not (is_sum and all(s >= 0 and derived[s] for s in flow.operands(node))):
            break
        last += 1
    return last


class _MonotoneCursor:
    """A cursor over ascending positions that finds the last position before an end.

    The ends of successive queries must ascend.
    """

    def __init__(self, positions: list[int]) -> None:
        self._positions, self._at = positions, 0

    def last_before(self, end: int, at_least: int) -> int:
        """Return the last position before `end`, or `at_least` if that is larger."""
        while self._at < len(self._positions) and self._positions[self._at] < end:
            self._at += 1
        return max(at_least, self._positions[self._at - 1]) if self._at else at_least
