"""A cost model for Djinn: what a matrix product costs."""

from __future__ import annotations

from djinn.hooks import CostModel, hookimpl
from djinn.planning import MATRIX_PRODUCT, CostEstimate, DeviceCapabilities, Graph, Node, work_of

djinn_api_version = "2.0"
ASSUMED_FLOPS = 1e11  # for a device of unknown speed


class ExampleCostModel(CostModel):
    """Two floating-point operations for each multiply-add, at the device's peak."""

    name = "example"
    operations = MATRIX_PRODUCT  # `mm`, `addmm`, `linear` and their like; by default a model is asked about every op
    tolerates_growth = True  # the estimate of an op depends on its own sizes alone

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Return the cost of `node`, or None to leave it to the next model."""
        work = work_of(graph, node)  # FLOPs and bytes, from shapes and dtypes alone
        seconds = work.flops / (device.flops or ASSUMED_FLOPS)
        return CostEstimate(work.flops, work.bytes_read, work.bytes_written, seconds)


@hookimpl
def djinn_register_cost_models() -> list[CostModel]:
    """The cost models that this plugin offers."""
    return [ExampleCostModel()]
