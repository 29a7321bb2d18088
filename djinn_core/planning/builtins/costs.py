"""The built-in cost model `roofline`: work by formula, bytes by metadata, time by whichever of the two takes longer."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.graph import Graph, Node
from djinn_core.planning.builtins.work import work_of

djinn_api_version = "2.0"

# Where a device does not say what it can do: peak operations a second, bytes a second, seconds to start an op.
# A laptop's core and a mid-range accelerator; measurements replace them.
_ASSUMED = {"cpu": (5e10, 1e10, 2e-6)}
_ASSUMED_ELSEWHERE = (2e13, 5e11, 5e-6)


class Roofline(CostModel):
    """Estimates every op: FLOPs as PyTorch counts them, bytes of all operands and results, and work space by family. Views cost nothing."""

    name = "roofline"
    tolerates_growth = True

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Cost of `node`: the larger of compute time and memory time, and the time to start it."""
        work = work_of(graph, node)
        if work.kind == "view":
            return CostEstimate(0.0, 0, 0, 0.0, self.name)
        peak, bandwidth, start = _ASSUMED.get(device.kind, _ASSUMED_ELSEWHERE)
        seconds = max(work.operations / (device.flops or peak), work.bytes / (device.bandwidth or bandwidth))
        traffic = work.bytes_read, work.bytes_written
        return CostEstimate(work.flops, *traffic, start + seconds, self.name, work.operations, work.workspace)


@hookimpl
def djinn_register_cost_models() -> Iterable[CostModel]:
    """The cost model `roofline`."""
    return [Roofline()]
