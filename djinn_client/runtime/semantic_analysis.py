"""Semantic analysis by hand: patterns of the caller's choice over any graph, and what is known of each node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from djinn_client.runtime import client
from djinn_client.runtime.semantics import semantic_metadata
from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import SemanticMetadata, WorkloadProfile
from djinn_core.planning.stages.annotate import annotate


class PatternRegistry:
    """Patterns by name. Those of the plugins in use, if none are given."""

    def __init__(self, patterns: Iterable[Pattern] | None = None) -> None:
        self._patterns: dict[str, Pattern] = {}
        for pattern in client.registry().patterns if patterns is None else patterns:
            self.register(pattern)

    def register(self, pattern: Pattern) -> None:
        """Add a pattern.

        Raises:
            ConfigurationError: there is one of that name.
        """
        if pattern.name in self._patterns:
            raise ConfigurationError(f"there is a pattern {pattern.name!r} in the registry: give this one another name")
        self._patterns[pattern.name] = pattern

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self._patterns.values())

    def __len__(self) -> int:
        return len(self._patterns)

    def __getitem__(self, name: str) -> Pattern:
        return self._patterns[name]


class SemanticAnalyzer:
    """Stage `annotate` by hand."""

    def __init__(self, pattern_registry: PatternRegistry | None = None) -> None:
        self.pattern_registry = PatternRegistry() if pattern_registry is None else pattern_registry

    def analyze_graph(self, graph: Graph) -> WorkloadProfile:
        """The profile of `graph`: workload, phases, modalities, residency and matches."""
        return annotate(graph, tuple(self.pattern_registry))


class MetadataRegistry:
    """Everything that is known of each node of an annotated graph, by the node's id."""

    def __init__(self, graph: Graph, profile: WorkloadProfile) -> None:
        self._by_node: Mapping[int, SemanticMetadata] = {m.node: m for m in semantic_metadata(graph, profile)}

    def get_metadata(self, node: int) -> SemanticMetadata | None:
        """Metadata of a node; None if the graph has no such node."""
        return self._by_node.get(node)

    def __len__(self) -> int:
        return len(self._by_node)
