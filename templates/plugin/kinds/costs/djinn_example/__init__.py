"""A cost model for Djinn: what a matrix product costs."""

from __future__ import annotations

from djinn.hooks import CostEstimate, CostModel, DeviceCapabilities, Graph, Node, hookimpl

djinn_api_version = 1

# Where a device does not say how fast it is.
ASSUMED_FLOPS = 1e11


class ExampleCostModel:
    """Two floating-point operations for each multiply-add, at the device's peak."""

    name = "example"
    operations = frozenset({"mm"})

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """The cost of `node`, or None to leave it to the next model."""
        left, right = (graph.meta(value) for value in node.inputs[:2])
        made = graph.meta(node.outputs[0])
        flops = 2.0 * made.numel * left.shape[-1]
        return CostEstimate(
            flops=flops,
            bytes_read=left.nbytes + right.nbytes,
            bytes_written=made.nbytes,
            seconds=flops / (device.flops or ASSUMED_FLOPS),
            model=self.name,
        )


@hookimpl
def djinn_register_cost_models() -> list[CostModel]:
    """The cost models that this plugin offers."""
    return [ExampleCostModel()]
