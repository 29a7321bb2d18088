"""A cost model for Djinn: predict the time of matrix products."""

from __future__ import annotations

from djinn.hooks import CostModel, hookimpl
from djinn.planning import MATRIX_PRODUCT, CostEstimate, DeviceCapabilities, Graph, Node, work_of

djinn_api_version = "2.0"
ASSUMED_FLOPS = 1e11  # for a device of unknown speed


class ExampleCostModel(CostModel):
    """Count two floating-point operations for each multiply-add, at the peak speed of the device."""

    name = "example"
    operations = MATRIX_PRODUCT  # `mm`, `addmm`, `linear` and similar ops; by default Djinn asks a model about every op
    tolerates_growth = True  # the estimate of an op depends only on its own sizes

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Return the cost of `node`, or None to leave it to the next model."""
        work = work_of(graph, node)  # FLOPs and bytes, computed from shapes and dtypes
        seconds = work.flops / (device.flops or ASSUMED_FLOPS)
        return CostEstimate(work.flops, work.bytes_read, work.bytes_written, seconds)


@hookimpl
def djinn_register_cost_models() -> list[CostModel]:
    """Return the cost models of this plugin."""
    return [ExampleCostModel()]
