"""Find the nodes of a program that can run separately for parts of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import attrs
import torch

from djinn.hooks import OptimizationContext
from djinn.planning import DataResidency, Graph, Node, Substitution, call_again, group, storage_of
from djinn_cnn.pipelining.rows import resize_arguments, rows_of

_FIRST_ONLY = frozenset({"native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"})


@attrs.frozen(eq=False)
class BatchRegion:
    """Nodes that process each input of a batch independently.

    Attributes:
        size: number of inputs in the batch.
        nodes: the nodes in order, each with its operands that have the same number of rows for each input.
        shared: nodes that run once for all parts.
        inputs: values that the nodes read and do not compute.
        outputs: results that nodes outside the region read, or that outlive the program.
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
        """Return all results of the region, by value, for the inputs from `begin` to `end` (exclusive) of the batch.

        `whole`: tensors for the whole batch, by value.
        """
        part: dict[int, torch.Tensor] = {}
        for node, rows in self.nodes:
            for value in rows - part.keys():
                factor = whole[value].shape[0] // self.size
                part[value] = whole[value][begin * factor : end * factor]
            operands = [part[v] if v in rows else whole[v] for v in node.inputs]
            factor = graph.meta(node.outputs[0]).shape[0] // self.size if node.outputs else 0
            results = call_again(node, operands, resize_arguments(node, graph, (end - begin) * factor))
            part.update(zip(node.outputs, results if node.outputs else (), strict=True))
        return part


def region_of(context: OptimizationContext) -> BatchRegion | None:
    """Return the batch region of a program, or None if there is no batch or no region that parts can replace.

    The batch size is the first size of the largest input that is no weight.
    """
    graph, residency = context.graph, context.profile.residency
    weight = DataResidency.PERSISTENT_WEIGHT
    data = [v for v in graph.inputs if residency.get(v) is not weight and graph.meta(v).shape[:1] > (1,)]
    largest = max(data, key=lambda v: graph.meta(v).nbytes, default=None)
    if largest is None:
        return None
    return _Search(context, graph.meta(largest).shape[0], data).run()


class _Search:
    """Collector of the nodes of a batch region, in one pass over a program.

    Attributes:
        batch: values that have rows for each input of the batch.
        region_values: values that nodes of the region compute.
        values: number of values by storage.
    """

    def __init__(self, context: OptimizationContext, size: int, data: Sequence[int]) -> None:
        self.context, self.graph, self.size = context, context.graph, size
        self.batch = {v for v in data if self.graph.meta(v).shape[0] == size}  # values with rows of the batch
        self.input_storages = {storage_of(v) for v in self.graph.inputs}
        running = [self.graph.nodes[n] for n in context.plan.nodes]
        self.running = frozenset(context.plan.nodes)
        self.values = Counter(storage_of(v) for node in running for v in node.outputs)
        self.nodes: dict[int, tuple[Node, frozenset[int]]] = {}
        self.shared: dict[int, Node] = {}
        self.region_values: set[int] = set()

    def run(self) -> BatchRegion | None:
        for node_id in self.context.plan.nodes:
            self._visit(self.graph.nodes[node_id])
        self._remove_outside_views()
        region = {**self.nodes, **self.shared}
        results = [v for n in sorted(region) for v in self.graph.nodes[n].outputs]
        outputs = tuple(v for v in results if self._is_used_outside(v, region))
        operands = [v for n in sorted(region) for v in self.graph.nodes[n].inputs]
        inputs = tuple(dict.fromkeys(v for v in operands if v not in frozenset(results)))
        if not outputs or not self._is_legal(inputs, outputs, region):
            return None
        shared_nodes = tuple(self.shared[n] for n in sorted(self.shared))
        return BatchRegion(self.size, tuple(self.nodes[n] for n in sorted(self.nodes)), shared_nodes, inputs, outputs)

    def _visit(self, node: Node) -> None:
        if self.batch.isdisjoint(node.inputs):
            return
        operands = rows_of(self.graph, node)
        rows = frozenset(operands or ())
        if any(storage_of(v) in self.input_storages for v in node.outputs):  # views of inputs are not divided
            if self._has_divisible_rows(node, rows):
                self.batch.update(node.outputs)
        elif (
            rows
            and self._has_divisible_rows(node, rows)
            and self._writes_region_values(node)
            and self._has_shared_operands(node)
        ):
            self.nodes[node.id] = node, rows
            outputs = node.outputs[:1] if node.operation in _FIRST_ONLY else node.outputs
            self.region_values.update(outputs)
            self.batch.update(outputs)

    def _has_divisible_rows(self, node: Node, rows: frozenset[int]) -> bool:
        """Return True if the numbers of rows of operands and results are multiples of the batch size.

        `rows`: the operands whose rows the op treats independently. They must have equal numbers of rows. No other operand
        may have rows of the batch.
        """
        counts = {self.graph.meta(v).shape[0] for v in rows}
        outputs = node.outputs[:1] if node.operation in _FIRST_ONLY else node.outputs
        shapes = [self.graph.meta(v).shape for v in outputs]
        return (
            len(counts) == 1
            and not max(counts) % self.size
            and not (self.batch.intersection(node.inputs) - rows)
            and all(shape and not shape[0] % self.size for shape in shapes)
        )

    def _writes_region_values(self, node: Node) -> bool:
        """Return True if each value that a node writes was computed in the region and has no views."""
        return all(v in self.region_values and self.values[storage_of(v)] == 1 for v in node.writes)

    def _has_shared_operands(self, node: Node) -> bool:
        """Return True if each operand is made in the region, before it, or by ops that may run once for all parts."""
        return all(v in self.region_values or self._exists_before_region(v) for v in node.inputs)

    def _exists_before_region(self, value: int) -> bool:
        producer = self.graph.producer(value)
        first = min(self.nodes, default=None)
        if producer is None or producer.id in self.shared or first is None or producer.id < first:
            return True
        is_pure = not (producer.random or producer.writes) and producer.id not in self.nodes
        if not is_pure or not all(self._exists_before_region(v) for v in producer.inputs):
            return False
        self.shared[producer.id] = producer
        return True

    def _remove_outside_views(self) -> None:
        """Remove nodes whose results are views that nodes outside the region read, and nodes that depend on such views.

        The removed nodes run after the parts are concatenated.
        """
        first_writer: dict[int, int] = {}
        for node_id, (node, _) in self.nodes.items():
            for value in node.outputs:
                first_writer.setdefault(storage_of(value), node_id)
        outside_views: Collection[int] = (-1,)
        while outside_views:
            region = {**self.nodes, **self.shared}
            views = {
                n: [v for v in node.outputs if first_writer[storage_of(v)] != n] for n, (node, _) in self.nodes.items()
            }
            outside_views = {
                n for n, view_values in views.items() if any(self._is_used_outside(v, region) for v in view_values)
            }
            values = {v for n in outside_views for v in self.graph.nodes[n].outputs}
            for node_id, (node, _) in list(self.nodes.items()):
                if node_id in outside_views or not values.isdisjoint(node.inputs):
                    del self.nodes[node_id]
                    values.update(node.outputs)
                    self.region_values.difference_update(node.outputs)

    def _is_used_outside(self, value: int, own: Collection[int]) -> bool:
        users = self.graph.consumers(value)
        return value in self.context.kept or any(u.id not in own and u.id in self.running for u in users)

    def _is_legal(self, inputs: Sequence[int], outputs: Sequence[int], own: Collection[int]) -> bool:
        """Return True if separate parts can replace the region.

        Each output must have rows and memory of its own. Outside the region, no later node may write an output or an input.
        No node may read an output before the region's last write to it.
        """
        memory = {storage_of(v) for v in outputs}
        if memory & self.input_storages or len(memory) < len(outputs) or not self.region_values.issuperset(outputs):
            return False
        storages = memory | {storage_of(v) for v in inputs}
        later_nodes = [self.graph.nodes[n] for n in self.context.plan.nodes if n not in own and n > min(own)]
        if any(storage_of(v) in storages for node in later_nodes for v in node.writes):
            return False
        last = {v: node_id for node_id, (node, _) in sorted(self.nodes.items()) for v in node.writes}
        return not any(
            last.get(v, -1) > user.id for v in outputs for user in self.graph.consumers(v) if user.id not in own
        )
