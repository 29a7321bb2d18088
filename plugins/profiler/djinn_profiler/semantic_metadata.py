"""Facts about one node as a value, and roles of ops that belong to no family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from djinn_core.ir.costs import CostEstimate
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import DataResidency, ExecutionPhase, Lineage, Modality

MemoryPattern = Literal["none", "streaming", "reuse", "random"]  # a view; once, in order; several times; by index
INDEXING = frozenset({
    "_index_put_impl_", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_put_", "index_select",
    "masked_scatter", "masked_select", "nonzero", "scatter", "scatter_add", "scatter_reduce", "take", "take_along_dim",
})  # fmt: skip
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "copy", "copy_", "cat", "repeat", "stack", "to"})
_CREATION = frozenset({
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "new_empty", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "rand", "randint", "randn", "scalar_tensor", "zeros", "zeros_like",
})  # fmt: skip


@attrs.frozen
class SemanticMetadata:
    """All facts about one node, joined from the graph and the side tables.

    Attributes:
        node: `Node.id`.
        op: `Node.op`.
        inputs: `Node.inputs`.
        random: `Node.random`.
        shapes: shapes of its results.
        dtypes: dtypes of its results.
        device: logical device of its results.
        module: path of the `nn.Module` that issued it.
        phase: its phase.
        modality: its kind of data.
        residency: kinds of its results.
        patterns: names of the patterns that cover it.
        confidence: the highest confidence of these patterns.
        depth: length of the longest path from an input to it.
        mutates: True if it writes into an operand.
        role: the role from a match, from the op's family, or from `general_role`; never empty.
        synchronises: True if the client waits for the op, because its result's shape or a returned number depends on
            data, or its result was fetched during recording.
        lineage: kinds of inputs that its results derive from.
        is_gradient: True if its results derive from a gradient.
        memory_pattern: how it reads memory.
        cost: estimate for the first device, or None if costs were not requested.
        hints: the hints of its matches, by name, for placement and scheduling.
    """

    node: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    device: int
    module: str
    role: str
    phase: ExecutionPhase
    modality: Modality
    residency: tuple[DataResidency, ...]
    patterns: tuple[str, ...]
    confidence: float
    depth: int
    inputs: tuple[int, ...]
    random: bool
    mutates: bool
    synchronises: bool = False
    lineage: Lineage = Lineage.NOTHING
    memory_pattern: MemoryPattern = "streaming"
    is_gradient: bool = False
    cost: CostEstimate | None = None
    hints: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)


def general_role(graph: Graph, node: Node) -> str:
    """Return the role of an op whose family has no role. It depends on the op's effect on memory and shapes."""
    for role, operations in (("indexing", INDEXING), ("copy", _COPIES), ("creation", _CREATION)):
        if node.operation.removesuffix("_") in operations or node.operation in operations:
            return role
    if not node.inputs:
        return "creation"
    into = [graph.meta(value).shape for value in (*node.outputs, *node.writes)]
    shapes = [graph.meta(value).shape for value in node.inputs]
    if not into or len(into[0]) < max(map(len, shapes)) or math.prod(into[0]) < max(map(math.prod, shapes)):
        return "reduction"
    return "pointwise"
