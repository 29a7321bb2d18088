"""A cost model for Djinn: what a matrix product costs."""

from __future__ import annotations

from djinn.costs import work_of
from djinn.hooks import CostEstimate, CostModel, DeviceCapabilities, Graph, Node, hookimpl
from djinn.patterns import MATRIX_PRODUCT

djinn_api_version = "2.0"

# Where a device does not say how fast it is.
ASSUMED_FLOPS = 1e11


class ExampleCostModel:
    """Two floating-point operations for each multiply-add, at the device's peak."""

    name = "example"
    tolerates_growth = True  # what it says does not depend on how long a sequence or a cache is
    operations = MATRIX_PRODUCT  # `mm`, `addmm`, `linear` and their like; an empty set would be every op

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """The cost of `node`, or None to leave it to the next model."""
        work = work_of(graph, node)  # what the op does, from its metadata alone
        return CostEstimate(
            flops=work.flops,
            bytes_read=work.bytes_read,
            bytes_written=work.bytes_written,
            seconds=work.flops / (device.flops or ASSUMED_FLOPS),
            model=self.name,
        )


@hookimpl
def djinn_register_cost_models() -> list[CostModel]:
    """The cost models that this plugin offers."""
    return [ExampleCostModel()]
