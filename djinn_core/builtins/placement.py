"""The built-in placement policy `single`: one device for everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from djinn_core.errors import InvalidStage
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.placement import PlacementContext, PlacementPolicy
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.values import storage_of

djinn_api_version = 1


class SingleDevice:
    """Everything runs where most bytes of the inputs already are; without inputs, on the first device that fits."""

    name = "single"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """One device and one reason for all.

        Raises:
            InvalidStage: no device has the memory and the dtypes that the program needs.
        """
        device, reason = _choose(context)
        decisions = tuple(PlacementDecision(node, device, reason) for node in context.plan.nodes)
        made = (v for node in context.graph.nodes for v in node.outputs)
        values = dict.fromkeys((*context.graph.inputs, *made), device)
        return Placement(decisions, values, self.name)


def _choose(context: PlacementContext) -> tuple[str, str]:
    obstacles = {d.id: _obstacle(context.graph, d) for d in context.topology.devices}
    fitting = [d.id for d in context.topology.devices if not obstacles[d.id]]
    if not fitting:
        listed = "; ".join(f"{device}: {obstacle}" for device, obstacle in obstacles.items()) or "there are no devices"
        raise InvalidStage(f"no device can run this program ({listed}); connect a server whose device can")
    held = _bytes_held(context.graph, context.resident)
    device = max(fitting, key=lambda d: held[d])  # the first of those that hold the same
    if held[device]:
        reason = f"{held[device]:,} of {sum(held.values()):,} bytes of the inputs are there"
    else:
        reason = "the first device" if device == context.topology.devices[0].id else "the first device that fits"
    refused = [f"{d}: {o}" for d, o in obstacles.items() if o]
    return device, f"{reason} (not {'; '.join(refused)})" if refused else reason


def _obstacle(graph: Graph, device: DeviceCapabilities) -> str:
    """Why a program cannot run on a device, or an empty string. Of memory, only what must be there at once is counted."""
    values = (*graph.inputs, *(v for node in graph.nodes for v in node.outputs))
    dtypes = {str(graph.meta(v).dtype).removeprefix("torch.") for v in values}
    if device.dtypes and not dtypes <= device.dtypes:
        return f"it lacks {', '.join(sorted(dtypes - device.dtypes))}"
    needed = sum(_storage_bytes(graph).values())
    if device.memory and needed > device.memory + device.spill:
        spilled = f" and {device.spill:,} that it can spill" if device.spill else ""
        return f"its {device.memory:,} bytes of memory{spilled} are less than the {needed:,} bytes of the inputs"
    return ""


def _storage_bytes(graph: Graph) -> dict[int, int]:
    """Bytes of the inputs by storage, as far as the program looks into them."""
    sizes: dict[int, int] = {}
    for value in graph.inputs:
        meta, storage = graph.meta(value), storage_of(value)
        sizes[storage] = max(sizes.get(storage, 0), meta.extent * meta.dtype.itemsize)
    return sizes


def _bytes_held(graph: Graph, resident: Mapping[int, str]) -> Counter[str]:
    sizes = _storage_bytes(graph)
    homes = {storage_of(v): resident[v] for v in graph.inputs if v in resident}
    held: Counter[str] = Counter()
    for storage, device in homes.items():
        held[device] += sizes[storage]
    return held


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `single`."""
    return [SingleDevice()]
