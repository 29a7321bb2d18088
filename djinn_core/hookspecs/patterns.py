"""Stage 2, annotate: patterns recognise the workload of a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from djinn_core.hookspecs import hookspec
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import PatternMatch


class Pattern(ABC):
    """Recognise one kind of subgraph. The planner calls it once for each new graph, in the client, from any thread.

    The planner caches the matches of a program. It reuses them for programs that differ in nothing that a pattern may read.
    If `match` raises, or if a match does not fit the graph, the planner logs a warning that names the pattern.
    It ignores the pattern's matches for this graph.

    Attributes:
        name: unique among patterns.
        operations: ops without namespace and overload (`mm`) that a match must contain. The planner calls `match` only if the
            graph has one of these ops.
        tolerates_growth: True if the decisions do not depend on sizes that change from run to run, such as the length of a
            sequence or of a cache. If all plugin objects that take part in a plan tolerate growth, the plan serves sizes up to
            16 times larger or smaller, otherwise up to 4 times. Plans always distinguish the sizes of a model's weights.
    """

    name: str
    operations: frozenset[str]
    tolerates_growth: bool = False

    @abstractmethod
    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return the matches in `graph` that contain one of `candidates`, the nodes of `operations`. Read nothing but the graph."""


@hookspec
def djinn_register_patterns(settings: Any) -> Iterable[Pattern]:
    """Return the patterns that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. Patterns run in order of name, once
    per new graph. A pattern that raises is skipped for that graph, with a warning.
    """
    del settings
    raise NotImplementedError
