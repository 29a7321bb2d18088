"""Attribution of plugin failures: names of plugin objects in warnings."""

from __future__ import annotations

from typing import Any

from djinn_core.ir.graph import Graph
from djinn_core.logs import get_logger

_log = get_logger("djinn.stages")


def title(kind: str, plugin: Any) -> str:
    """Return the name of a plugin object in messages: its kind, its name and its module."""
    return f"{kind} {getattr(plugin, 'name', '?')!r} ({type(plugin).__module__})"


def warn_skipped(kind: str, plugin: Any, error: Exception, instead: str, graph: Graph) -> str:
    """Log that `plugin` was skipped, with the consequence `instead`. Return the sentence for the result's reasons.

    If PyTorch rejects an op of the program, the message has level debug.
    """
    failure = f"{type(error).__name__}: {error}"
    log = _log.debug if graph.rejected_nodes else _log.warning
    log("a plugin failed and is left out", plugin=title(kind, plugin), error=failure, instead=instead)
    return f"{title(kind, plugin)} failed with {failure}; {instead}"
