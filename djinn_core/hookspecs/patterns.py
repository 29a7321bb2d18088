"""Stage 2, annotate: patterns recognise what a graph is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from djinn_core.hookspecs import hookspec
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import PatternMatch


@runtime_checkable
class Pattern(Protocol):
    """Recognises one kind of subgraph.

    Attributes:
        name: unique among patterns.
        operations: ops without namespace and overload (`mm`) that a match must contain. The driver keeps an index and
            calls `match` only with nodes of these ops, and not at all when there are none.

    What it says of a program is kept, and found again for programs that are the same in everything that it may look at.
    With the optional member of `GrowthTolerant` a growing cache or a falling learning rate means no new analysis. Sizes of
    weights of layers are always distinguished.
    """

    name: str
    operations: frozenset[str]

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Matches in `graph` that contain at least one of `candidates`. Must not depend on anything but the graph."""


@hookspec
def djinn_register_patterns(settings: Any) -> Iterable[Pattern]:
    """Return the patterns that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. Patterns run in order of
    name, once per new graph. A pattern that raises is skipped for that graph with a warning that names it. Since API
    version 1.
    """
    del settings
    raise NotImplementedError
