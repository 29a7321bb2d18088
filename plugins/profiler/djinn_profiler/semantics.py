"""Facts about each node, joined from the graph and the profile's side tables."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from djinn_client.runtime import client
from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.costs import CostEstimate, Costs
from djinn_core.ir.flow import is_view
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import CONVOLUTION, EMBEDDING, FUSED_ATTENTION, MATRIX_PRODUCT, is_backward
from djinn_core.ir.operators import split_name
from djinn_core.ir.profile import DataResidency, Lineage, PatternMatch, WorkloadProfile
from djinn_core.planning.stages.annotate import annotate
from djinn_profiler.semantic_metadata import INDEXING, MemoryPattern, SemanticMetadata, general_role


def semantic_metadata(
    graph: Graph, profile: WorkloadProfile, costs: Costs | None = None, waited: AbstractSet[int] = frozenset()
) -> tuple[SemanticMetadata, ...]:
    """Return the metadata of each node, in program order, with its cost on the first device if `costs` are given.

    `waited`: values for which the client waited.
    """
    matches: dict[int, list[PatternMatch]] = defaultdict(list)
    for match in profile.patterns:
        for node in match.nodes:
            matches[node].append(match)
    depths = _depths(graph)
    estimates = next(iter(costs.by_device.values()), ()) if costs is not None else ()
    return tuple(
        _node_metadata(
            graph, profile, node, matches[node.id], depths[node.id], estimates[at] if estimates else None, waited
        )
        for at, node in enumerate(graph.nodes)
    )


def _node_metadata(
    graph: Graph,
    profile: WorkloadProfile,
    node: Node,
    matches: list[PatternMatch],
    depth: int,
    cost: CostEstimate | None,
    waited: AbstractSet[int],
) -> SemanticMetadata:
    lineage = profile.lineage[node.id] if profile.lineage else Lineage.NOTHING
    metas = [graph.meta(v) for v in node.outputs]
    return SemanticMetadata(
        node=node.id,
        op=node.op,
        shapes=tuple(m.shape for m in metas),
        dtypes=tuple(str(m.dtype).removeprefix("torch.") for m in metas),
        device=next((m.device for m in metas), 0),
        module=node.module,
        role=profile.roles.get(node.id) or general_role(graph, node),
        phase=profile.phases[node.id],
        modality=profile.modalities[node.id],
        residency=tuple(profile.residency.get(v, DataResidency.EPHEMERAL_ACTIVATION) for v in node.outputs),
        patterns=tuple(m.pattern for m in matches),
        confidence=max((m.confidence for m in matches), default=0.0),
        depth=depth,
        inputs=node.inputs,
        random=node.random,
        mutates=bool(node.writes),
        synchronises=_depends_on_data(node.op) or not waited.isdisjoint((*node.outputs, *node.writes)),
        lineage=lineage,
        memory_pattern=_memory_pattern(node),
        is_gradient=Lineage.GRADIENT in lineage or is_backward(node),
        cost=cost,
        hints=_hints(matches),
    )


def _hints(matches: list[PatternMatch]) -> dict[str, tuple[Any, ...]]:
    hints: dict[str, tuple[Any, ...]] = {}
    for match in matches:
        for name, fact in match.hints.items():
            hints[name] = (*hints.get(name, ()), fact)
    return hints


def _memory_pattern(node: Node) -> MemoryPattern:
    if is_view(node):
        return "none"
    if node.operation in INDEXING | EMBEDDING:
        return "random"
    return "reuse" if node.operation in MATRIX_PRODUCT | CONVOLUTION | FUSED_ATTENTION else "streaming"


@functools.lru_cache(maxsize=4096)
def _depends_on_data(name: str) -> bool:
    """Return True if PyTorch marks the shape of an op's result, or a returned number, as data-dependent."""
    packet, overload = split_name(name)
    if not name.startswith("aten::") or not hasattr(torch.ops.aten, packet):
        return False
    tags = getattr(getattr(torch.ops.aten, packet), overload or "default").tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _depths(graph: Graph) -> list[int]:
    """Return for each node the number of earlier nodes on the longest data path that leads to it."""
    depths: list[int] = []
    depth_by_value: dict[int, int] = {}
    for node in graph.nodes:
        depth = 1 + max((depth_by_value.get(v, -1) for v in node.inputs), default=-1)
        depths.append(depth)
        depth_by_value.update(dict.fromkeys((*node.outputs, *node.writes), depth))
    return depths


class PatternRegistry:
    """Patterns by name. By default it has the patterns of the plugins in use."""

    def __init__(self, patterns: Iterable[Pattern] | None = None) -> None:
        self._patterns: dict[str, Pattern] = {}
        for pattern in client.registry().patterns if patterns is None else patterns:
            self.register(pattern)

    def register(self, pattern: Pattern) -> None:
        """Add a pattern.

        Raises:
            ConfigurationError: a pattern with this name exists.
        """
        if pattern.name in self._patterns:
            raise ConfigurationError(f"a pattern {pattern.name!r} is registered already: choose another name")
        self._patterns[pattern.name] = pattern

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self._patterns.values())

    def __len__(self) -> int:
        return len(self._patterns)

    def __getitem__(self, name: str) -> Pattern:
        return self._patterns[name]


class SemanticAnalyzer:
    """Run the stage `annotate` on a graph directly."""

    def __init__(self, pattern_registry: PatternRegistry | None = None) -> None:
        self.pattern_registry = PatternRegistry() if pattern_registry is None else pattern_registry

    def analyze_graph(self, graph: Graph) -> WorkloadProfile:
        """Return the profile of `graph`: workload, phases, modalities, residency and matches."""
        return annotate(graph, tuple(self.pattern_registry))


class MetadataRegistry:
    """All facts about each node of an annotated graph, by node id."""

    def __init__(self, graph: Graph, profile: WorkloadProfile) -> None:
        self._by_node: Mapping[int, SemanticMetadata] = {m.node: m for m in semantic_metadata(graph, profile)}

    def get_metadata(self, node: int) -> SemanticMetadata | None:
        """Return the metadata of a node, or None if the graph has no such node."""
        return self._by_node.get(node)

    def __len__(self) -> int:
        return len(self._by_node)
