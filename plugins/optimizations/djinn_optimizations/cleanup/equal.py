"""Find common subexpressions: nodes that run an op on the same values as an earlier node."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Final

import attrs

from djinn.planning import Graph, Node, OptimizationPlan, slot_positions, storage_of

MAX_CANDIDATES: Final = 16  # maximum number of equal nodes to remember per key as replacements
SMALL_FILL_BYTES: Final = (
    4096  # up to this size, filling a tensor again costs less than replanning when the number changes
)


@attrs.define
class MergedNodes:
    """Nodes that repeat earlier nodes.

    Attributes:
        drop: ids of the repeated nodes.
        replace: for each result of a repeated node, the equal earlier value.
        equal_slots: pairs of positions in the program's slots. The merge is valid while both numbers are equal.
    """

    drop: set[int] = attrs.field(factory=set)
    replace: dict[int, int] = attrs.field(factory=dict)
    equal_slots: list[tuple[int, int]] = attrs.field(factory=list)


def merge(graph: Graph, plan: OptimizationPlan, kept_values: frozenset[int]) -> MergedNodes:
    """Return the nodes in `plan` that repeat the computation of an earlier node.

    `kept_values`: values that outlive the program.
    """
    search = _Search(graph, plan, kept_values)
    for node_id in plan.nodes:
        search.visit(graph.nodes[node_id])
    return search.merged


class _Search:
    """Search for repeated computations in one pass over the program. Results accumulate in `merged`."""

    def __init__(self, graph: Graph, plan: OptimizationPlan, kept_values: frozenset[int]) -> None:
        self.graph, self.kept = graph, kept_values
        self.replace = dict(plan.replace)
        self.kept_storages = {storage_of(v) for v in kept_values}
        running = [graph.nodes[i] for i in plan.nodes]
        self.written_values = {v for node in running for v in node.writes}
        self.written_storages = {storage_of(v) for v in self.written_values}
        self.positions = dict(zip((n.id for n in graph.nodes), slot_positions(tuple(graph.nodes)), strict=True))
        self.versions: Counter[int] = Counter()
        self.nodes_by_key: dict[Hashable, list[Node]] = defaultdict(list)
        self.merged = MergedNodes()

    def visit(self, node: Node) -> None:
        mergeable = node.op.startswith("aten::") and not node.writes and not node.random and node.outputs
        if mergeable and _comparable(node) and not self._fills_little(node):
            key = self._key(node)
            first = next((n for n in self.nodes_by_key[key] if self._can_replace_node(n, node)), None)
            if first is not None:
                self._merge(first, node)
            elif len(self.nodes_by_key[key]) < MAX_CANDIDATES:
                self.nodes_by_key[key].append(node)
        for value in node.writes:
            self.versions[storage_of(value)] += 1

    def _fills_little(self, node: Node) -> bool:
        """Return True if a node fills a small tensor with a number, such as the end flag of a generation loop."""
        return node.op == "aten::full" and self.graph.meta(node.outputs[0]).nbytes <= SMALL_FILL_BYTES

    def _key(self, node: Node) -> Hashable:
        """Return a key that is equal for equal computations.

        The key contains the op, its typed scalars, its operands, and how often each operand's memory was written before.
        """
        inputs = tuple(self.replace.get(v, v) for v in node.inputs)
        versions = tuple(self.versions[storage_of(v)] for v in inputs)
        return (node.form, tuple((type(s), repr(s)) for s in node.slots), inputs, versions)

    def _can_replace_node(self, first: Node, second: Node) -> bool:
        return all(self._can_replace_value(a, b) for a, b in zip(first.outputs, second.outputs, strict=True))

    def _can_replace_value(self, first: int, second: int) -> bool:
        """Return True if value `first` can replace value `second` without an observable difference.

        `second` must not outlive the program, and no op may write into only one of the two values.
        """
        if second in self.kept or self.graph.meta(first) is not self.graph.meta(second):
            return False
        second_storage, first_storage = storage_of(second), storage_of(first)
        if second_storage == first_storage:
            return second not in self.written_values and first not in self.written_values
        return (
            second_storage not in self.kept_storages
            and second_storage not in self.written_storages
            and first_storage not in self.written_storages
        )

    def _merge(self, first: Node, second: Node) -> None:
        replacements = dict(zip(second.outputs, first.outputs, strict=True))
        self.replace.update(replacements)
        self.merged.replace.update(replacements)
        self.merged.drop.add(second.id)
        pairs = zip(self.positions[first.id], self.positions[second.id], strict=True)
        self.merged.equal_slots += pairs


def _comparable(node: Node) -> bool:
    """Return True if no scalar of a node is NaN. Later runs check that scalars are still equal, and NaN never is."""
    return not any(math.isnan(slot) for slot in node.slots)
