"""Attribution of plugin failures: names of plugin objects in warnings."""

from __future__ import annotations

from typing import Any

from djinn_core.ir.graph import Graph, ProgramGraph
from djinn_core.logs import get_logger

_log = get_logger("djinn.stages")


def title(kind: str, plugin: Any) -> str:
    """Name of a plugin object in messages: its kind, its name and the module that it came from."""
    return f"{kind} {getattr(plugin, 'name', '?')!r} ({type(plugin).__module__})"


def refused_nodes(graph: Graph) -> frozenset[int]:
    """Nodes that PyTorch refuses because of a mistake in the user's program: a plugin that fails at those is not at fault."""
    return graph.refused if isinstance(graph, ProgramGraph) else frozenset()


def warn_skipped(kind: str, plugin: Any, error: Exception, instead: str, graph: Graph) -> str:
    """Log that `plugin` was skipped and what happens instead; returns the sentence for the result's reasons.

    The message has level debug where the program has an op that PyTorch refuses.
    """
    failure = f"{type(error).__name__}: {error}"
    log = _log.debug if refused_nodes(graph) else _log.warning
    log("a plugin failed and is left out", plugin=title(kind, plugin), error=failure, instead=instead)
    return f"{title(kind, plugin)} failed with {failure}; {instead}"
