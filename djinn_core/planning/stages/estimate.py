"""Stage 3: estimate the cost of every node on every device."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.ir.costs import CostEstimate, Costs, DeviceCapabilities, NetworkTopology
from djinn_core.ir.graph import Graph, Node
from djinn_core.planning.stages.attribution import warn_skipped
from djinn_core.planning.stages.verify import check_estimate

_UNKNOWN = CostEstimate(0.0, 0, 0, 0.0)


def estimate(graph: Graph, models: Sequence[CostModel], topology: NetworkTopology) -> Costs:
    """Return the cost of every node on every device, as cost models predict it.

    Models that list the op come first, then the general models, in order. A model that raises or returns an invalid
    estimate is not asked again for this graph, and a warning names it. A model may raise at an op that PyTorch rejects.
    A node that no model knows costs nothing. Devices that differ only in name, memory, group, queue and missing ops
    share an estimate.
    """
    panel = _Panel(tuple(models))
    rows: dict[DeviceCapabilities, tuple[CostEstimate, ...]] = {}
    by_device: dict[str, tuple[CostEstimate, ...]] = {}
    for device in topology.devices:
        model = attrs.evolve(device, id="", memory=0, memory_free=None, group="", queue=0.0, unsupported=frozenset())
        if model not in rows:
            rows[model] = tuple(panel.estimate_node(graph, node, device) for node in graph.nodes)
        by_device[device.id] = rows[model]
    return Costs(by_device)


@attrs.define
class _Panel:
    """The cost models still in use, and their order for each op."""

    models: tuple[CostModel, ...]
    orders: dict[str, tuple[CostModel, ...]] = attrs.field(factory=dict)
    checked: dict[int, CostEstimate] = attrs.field(factory=dict)

    def estimate_node(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate:
        for model in self._order(node.operation):
            try:
                answer = model.estimate(graph, node, device)
                if answer is not None and id(answer) not in self.checked:
                    check_estimate(answer, node)
                    self.checked[id(answer)] = answer  # kept alive, so that no other object gets its identity
            except Exception as error:
                if node.id in graph.rejected_nodes:  # an error of the user's program
                    continue
                self._drop_model(model, error, graph)
                return self.estimate_node(graph, node, device)
            if answer is not None:
                return answer if answer.model else attrs.evolve(answer, model=model.name)
        return _UNKNOWN

    def _order(self, operation: str) -> tuple[CostModel, ...]:
        if operation not in self.orders:
            specific = tuple(m for m in self.models if operation in m.operations)
            self.orders[operation] = specific + tuple(m for m in self.models if not m.operations)
        return self.orders[operation]

    def _drop_model(self, model: CostModel, error: Exception, graph: Graph) -> None:
        warn_skipped("cost model", model, error, "the next cost model estimates this graph", graph)
        self.models = tuple(m for m in self.models if m is not model)
        self.orders.clear()
