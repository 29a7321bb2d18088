"""Stage 3, estimate: cost models say what a node costs on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from djinn_core.hookspecs import hookspec
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.graph import Graph, Node


@runtime_checkable
class CostModel(Protocol):
    """Predicts work and time.

    Attributes:
        name: unique among cost models.
        operations: ops without namespace and overload that it knows; empty means every op.
    """

    name: str
    operations: frozenset[str]

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Cost of `node` on `device`, or None to leave it to the next model."""


@hookspec
def djinn_register_cost_models() -> Iterable[CostModel]:
    """Return the cost models that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured anew. For each node the models
    that name its op are asked first, then the general ones, each group in order of name, built-ins last; the first
    answer that is not None counts. A model that raises is skipped for that graph with a warning that names it. Since API
    version 1.
    """
    raise NotImplementedError
