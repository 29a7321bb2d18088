"""The built-in cost model `roofline`: work by formula, bytes by metadata, time by whichever of the two takes longer."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.builtins.flops import flops_of
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.costs import CostModel
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities
from djinn_core.ir.dataflow import is_view
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.values import TensorMeta

djinn_api_version = 1

# Where a device does not say what it can do: peak operations a second, bytes a second, seconds to start an op.
# A laptop's core and a mid-range accelerator; measurements replace them.
_ASSUMED = {"cpu": (5e10, 1e10, 2e-6)}
_ASSUMED_ELSEWHERE = (2e13, 5e11, 5e-6)
# These read only the rows that their indices name, not the whole table.
_LOOK_UPS = frozenset({"embedding", "gather", "index", "index_select", "take", "take_along_dim"})
_FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_"})


class Roofline:
    """Knows every op: FLOPs of products, convolutions and attention; bytes of everything; no cost for views."""

    name = "roofline"
    operations: frozenset[str] = frozenset()

    def estimate(self, graph: Graph, node: Node, device: DeviceCapabilities) -> CostEstimate | None:
        """Cost of `node`: the larger of compute time and memory time, and the time to start it."""
        if is_view(node):
            return CostEstimate(0.0, 0, 0, 0.0, self.name)
        flops = flops_of(graph, node)
        read, written = _bytes_read(graph, node), _bytes_written(graph, node)
        peak, bandwidth, start = _ASSUMED.get(device.kind, _ASSUMED_ELSEWHERE)
        seconds = max(flops / (device.flops or peak), (read + written) / (device.bandwidth or bandwidth))
        return CostEstimate(flops, read, written, start + seconds, self.name)


def _bytes_read(graph: Graph, node: Node) -> int:
    overwritten = set(node.writes) if node.operation in _FILLS else set()
    read = [v for v in dict.fromkeys(node.inputs) if v not in overwritten]
    if node.operation in _LOOK_UPS:
        table, *indices = node.inputs
        return _bytes_written(graph, node) + sum(_distinct_bytes(graph.meta(v)) for v in indices if v != table)
    return sum(_distinct_bytes(graph.meta(v)) for v in read)


def _bytes_written(graph: Graph, node: Node) -> int:
    return sum(_distinct_bytes(graph.meta(v)) for v in (*node.outputs, *dict.fromkeys(node.writes)))


def _distinct_bytes(meta: TensorMeta) -> int:
    """Bytes of the elements that differ in place: an expanded dimension has stride 0 and costs nothing."""
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= min(size, 1) if stride == 0 else size
    return count * meta.dtype.itemsize


@hookimpl
def djinn_register_cost_models() -> Iterable[CostModel]:
    """The cost model `roofline`."""
    return [Roofline()]
