"""Find the nodes of a program that can run separately for parts of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import attrs
import torch

from djinn.hooks import OptimizationContext
from djinn.planning import DataResidency, Graph, Node, Substitution, call_again, group, storage_of
from djinn_cnn.pipelining.rows import resized, rows_of

_FIRST_ONLY = frozenset({"native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"})


@attrs.frozen(eq=False)
class BatchRegion:
    """Nodes that process each input of a batch independently.

    Attributes:
        size: number of inputs in the batch.
        nodes: the nodes in order, each with its operands that have one row per input.
        shared: nodes that run once for all parts.
        inputs: values that the nodes read and do not compute.
        outputs: values of the nodes that other nodes read.
    """

    size: int
    nodes: tuple[tuple[Node, frozenset[int]], ...]
    shared: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def substitution(self, graph: Graph, parts: int) -> Substitution:
        """Return a substitution that splits the batch into `parts` groups, which can run concurrently."""
        ends = [self.size * part // parts for part in range(parts + 1)]
        node_ids = [node.id for node, _ in self.nodes] + [node.id for node in self.shared]

        def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            full = dict(zip(self.inputs, tensors, strict=True))
            for node in self.shared:
                results = call_again(node, [full[v] for v in node.inputs], {})
                full.update(zip(node.outputs, results, strict=True))
            outputs: list[dict[int, torch.Tensor]] = []
            for number, (begin, end) in enumerate(pairwise(ends)):
                with group(number):
                    outputs.append(self._part(graph, full, begin, end))
            return [torch.cat([part[value] for part in outputs]) for value in self.outputs]

        return Substitution(frozenset(node_ids), self.inputs, self.outputs, compute)

    def _part(self, graph: Graph, whole: dict[int, torch.Tensor], begin: int, end: int) -> dict[int, torch.Tensor]:
        """Return the results for the inputs from `begin` to `end`."""
        part: dict[int, torch.Tensor] = {}
        for node, rows in self.nodes:
            for value in rows - part.keys():
                factor = whole[value].shape[0] // self.size
                part[value] = whole[value][begin * factor : end * factor]
            operands = [part[v] if v in rows else whole[v] for v in node.inputs]
            factor = graph.meta(node.outputs[0]).shape[0] // self.size if node.outputs else 0
            results = call_again(node, operands, resized(node, graph, (end - begin) * factor))
            part.update(zip(node.outputs, results if node.outputs else (), strict=True))
        return part


def region_of(context: OptimizationContext) -> BatchRegion | None:
    """Return the batch region of a program. If there is no batch, or if no output has rows, return None."""
    graph, residency = context.graph, context.profile.residency
    weight = DataResidency.PERSISTENT_WEIGHT
    data = [v for v in graph.inputs if residency.get(v) is not weight and graph.meta(v).shape[:1] > (1,)]
    largest = max(data, key=lambda v: graph.meta(v).nbytes, default=None)
    if largest is None:
        return None
    return _Search(context, graph.meta(largest).shape[0], data).run()


class _Search:
    """Walk over a program once, and collect the nodes of a batch region."""

    def __init__(self, context: OptimizationContext, size: int, data: Sequence[int]) -> None:
        self.context, self.graph, self.size = context, context.graph, size
        self.batch = {v for v in data if self.graph.meta(v).shape[0] == size}  # values with rows of the batch
        self.before = {storage_of(v) for v in self.graph.inputs}
        running = [self.graph.nodes[n] for n in context.plan.nodes]
        self.running = frozenset(context.plan.nodes)
        self.values = Counter(storage_of(v) for node in running for v in node.outputs)
        self.nodes: dict[int, tuple[Node, frozenset[int]]] = {}
        self.shared: dict[int, Node] = {}
        self.made: set[int] = set()

    def run(self) -> BatchRegion | None:
        for node_id in self.context.plan.nodes:
            self._take(self.graph.nodes[node_id])
        self._leave_views()
        own = {**self.nodes, **self.shared}
        results = [v for n in sorted(own) for v in self.graph.nodes[n].outputs]
        outputs = tuple(v for v in results if self._is_wanted(v, own))
        used = [v for n in sorted(own) for v in self.graph.nodes[n].inputs]
        inputs = tuple(dict.fromkeys(v for v in used if v not in frozenset(results)))
        if not outputs or not self._is_legal(inputs, outputs, own):
            return None
        shared = tuple(self.shared[n] for n in sorted(self.shared))
        return BatchRegion(self.size, tuple(self.nodes[n] for n in sorted(self.nodes)), shared, inputs, outputs)

    def _take(self, node: Node) -> None:
        if self.batch.isdisjoint(node.inputs):
            return
        operands = rows_of(self.graph, node)
        rows = frozenset(operands or ())
        if any(storage_of(v) in self.before for v in node.outputs):  # views of inputs are not divided
            if self._divides(node, rows):
                self.batch.update(node.outputs)
        elif rows and self._divides(node, rows) and self._writes_its_own(node) and self._has_other_operands(node):
            self.nodes[node.id] = node, rows
            outputs = node.outputs[:1] if node.operation in _FIRST_ONLY else node.outputs
            self.made.update(outputs)
            self.batch.update(outputs)

    def _divides(self, node: Node, rows: frozenset[int]) -> bool:
        """Return True if all operands with rows have the same number of rows, and the results have rows."""
        counts = {self.graph.meta(v).shape[0] for v in rows}
        outputs = node.outputs[:1] if node.operation in _FIRST_ONLY else node.outputs
        shapes = [self.graph.meta(v).shape for v in outputs]
        return (
            len(counts) == 1
            and not max(counts) % self.size
            and not (self.batch.intersection(node.inputs) - rows)
            and all(shape and not shape[0] % self.size for shape in shapes)
        )

    def _writes_its_own(self, node: Node) -> bool:
        """Return True if a node writes only values that the region computed and that have no other views."""
        return all(v in self.made and self.values[storage_of(v)] == 1 for v in node.writes)

    def _has_other_operands(self, node: Node) -> bool:
        """Return True if the operands without rows exist before the region, or can be computed once for all parts."""
        return all(v in self.made or self._is_there(v) for v in node.inputs)

    def _is_there(self, value: int) -> bool:
        maker = self.graph.producer(value)
        first = min(self.nodes, default=None)
        if maker is None or maker.id in self.shared or first is None or maker.id < first:
            return True
        pure = not (maker.random or maker.writes) and maker.id not in self.nodes
        if not pure or not all(self._is_there(v) for v in maker.inputs):
            return False
        self.shared[maker.id] = maker
        return True

    def _leave_views(self) -> None:
        """Remove views of results from the region if other nodes read them, and the nodes that depend on such views.

        These views are made after the parts were concatenated.
        """
        maker: dict[int, int] = {}
        for node_id, (node, _) in self.nodes.items():
            for value in node.outputs:
                maker.setdefault(storage_of(value), node_id)
        kept_views: Collection[int] = (-1,)
        while kept_views:
            own = {**self.nodes, **self.shared}
            views = {n: [v for v in node.outputs if maker[storage_of(v)] != n] for n, (node, _) in self.nodes.items()}
            kept_views = {n for n, made_values in views.items() if any(self._is_wanted(v, own) for v in made_values)}
            values = {v for n in kept_views for v in self.graph.nodes[n].outputs}
            for node_id, (node, _) in list(self.nodes.items()):
                if node_id in kept_views or not values.isdisjoint(node.inputs):
                    del self.nodes[node_id]
                    values.update(node.outputs)
                    self.made.difference_update(node.outputs)

    def _is_wanted(self, value: int, own: Collection[int]) -> bool:
        users = self.graph.consumers(value)
        return value in self.context.kept or any(u.id not in own and u.id in self.running for u in users)

    def _is_legal(self, inputs: Sequence[int], outputs: Sequence[int], own: Collection[int]) -> bool:
        """Return True if separate parts can replace the region.

        Each output must have rows and memory of its own. No other node may write an output, or read it too early. No
        node may write an input.
        """
        memory = {storage_of(v) for v in outputs}
        if memory & self.before or len(memory) < len(outputs) or not self.made.issuperset(outputs):
            return False
        storages = memory | {storage_of(v) for v in inputs}
        later_nodes = [self.graph.nodes[n] for n in self.context.plan.nodes if n not in own and n > min(own)]
        if any(storage_of(v) in storages for node in later_nodes for v in node.writes):
            return False
        last = {v: node_id for node_id, (node, _) in sorted(self.nodes.items()) for v in node.writes}
        return not any(
            last.get(v, -1) > user.id for v in outputs for user in self.graph.consumers(v) if user.id not in own
        )
