"""The built-in cost model `roofline`: work by formula, bytes by metadata, and the longer of compute and memory time."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.graph import Graph, Node
from djinn_core.planning.builtins.work import work_of

djinn_api_version = "2.0"

_START_SECONDS = {"cpu": 2e-6}  # start time of an op
_START_SECONDS_ELSEWHERE = 5e-6


class Roofline(CostModel):
    """Estimate the cost of every op. Views cost nothing.

    The estimate has FLOPs as PyTorch counts them, the bytes of all operands and results, and a workspace by family of
    ops.
    """

    name = "roofline"
    tolerates_growth = True

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Return the cost of `node`: launch time plus the larger of compute time and memory time."""
        work = work_of(graph, node)
        if work.kind == "view":
            return CostEstimate(0.0, 0, 0, 0.0, self.name)
        flops, bandwidth = device.speeds
        start = _START_SECONDS.get(device.kind, _START_SECONDS_ELSEWHERE)
        seconds = max(work.operations / flops, work.bytes / bandwidth)
        traffic = work.bytes_read, work.bytes_written
        return CostEstimate(work.flops, *traffic, start + seconds, self.name, work.operations, work.workspace)


@hookimpl
def djinn_register_cost_models() -> Iterable[CostModel]:
    """Register the cost model `roofline`."""
    return [Roofline()]
