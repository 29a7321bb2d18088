"""The built-in placement policy `single`: one device for everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
from djinn_core.ir.colocation import storage_sizes
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import RANDOM_STATE, storage_of
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.planning.stages.placement_fit import SHOWN, shortages

djinn_api_version = "2.0"


class SingleDevice(PlacementPolicy):
    """Placement policy that runs everything on one device.

    Devices that need not spill are preferred; among these, the device that holds most bytes of the inputs; among equal
    devices, the first.
    """

    name = "single"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """Return a placement of all nodes on one device, with the same reason for each node.

        Raises:
            DoesNotFit: no device has the memory and the dtypes that the program needs.
        """
        devices = context.topology.devices
        bytes_held, empty_devices = _bytes_held(context.graph, context.resident), _EmptyDevices()
        obstacles: dict[str, str] = {}
        if (random_home := _random_home(context)) is not None:
            obstacles = {d.id: f"random numbers are drawn on {random_home}" for d in devices if d.id != random_home}
            devices = tuple(d for d in devices if d.id == random_home)
        for spill in (False, True):
            for device in sorted(devices, key=lambda d: -bytes_held[d.id]):  # the first of equally filled devices
                if spill and not device.spill:
                    continue
                obstacles[device.id] = empty_devices.obstacle(context, device, spill)
                if not obstacles[device.id]:
                    return self._placement_on(context, device, bytes_held, obstacles)
        raise DoesNotFit(f"no device can run this program alone ({_obstacles_text(obstacles)})")

    def _placement_on(
        self,
        context: PlacementContext,
        device: DeviceCapabilities,
        bytes_held: Mapping[str, int],
        obstacles: Mapping[str, str],
    ) -> Placement:
        if bytes_held[device.id]:
            reason = f"{bytes_held[device.id]:,} of {sum(bytes_held.values()):,} bytes of the inputs are there"
        else:
            reason = "the first device" if device is context.topology.devices[0] else "the first device that fits"
        if obstacle_list := _obstacles_text(obstacles):
            reason = f"{reason} (not {obstacle_list})"
        return attrs.evolve(_on_one_device(context, device.id, reason), policy=self.name)


def _obstacles_text(obstacles: Mapping[str, str]) -> str:
    obstacle_texts = [f"{device}: {obstacle}" for device, obstacle in obstacles.items() if obstacle]
    return "; ".join(obstacle_texts[:SHOWN]) + (
        f"; and {len(obstacle_texts) - SHOWN} more devices" if len(obstacle_texts) > SHOWN else ""
    )


def _on_one_device(context: PlacementContext, device: str, reason: str) -> Placement:
    decisions = tuple(PlacementDecision(node, device, reason) for node in context.plan.nodes)
    outputs = (v for node in context.graph.nodes for v in node.outputs)
    return Placement(decisions, dict.fromkeys((*context.graph.inputs, *outputs), device))


@attrs.define
class _EmptyDevices:
    """A cache of obstacles: why devices that hold no data of a program cannot run it.

    Devices with equal free memory and dtypes share an entry.
    """

    _obstacles: dict[DeviceCapabilities, str] = attrs.field(factory=dict)

    def obstacle(self, context: PlacementContext, device: DeviceCapabilities, spill: bool) -> str:
        """Return the reason why a program cannot run on a device, or an empty string."""
        if device.id in context.memory_limits or context.resident or context.copies:
            return _obstacle(context, device, spill)
        model = attrs.evolve(device, id=str(spill), name="", group="")
        if model not in self._obstacles:
            self._obstacles[model] = _obstacle(context, device, spill)
        return self._obstacles[model]


def _obstacle(context: PlacementContext, device: DeviceCapabilities, spill: bool) -> str:
    own_shortages = [
        s for s in shortages(context, _on_one_device(context, device.id, ""), spill=spill) if s.device == device.id
    ]
    return own_shortages[0].reason if own_shortages else ""


def _random_home(context: PlacementContext) -> str | None:
    """Return the device on which the program's random ops must run; None if unknown or without random ops."""
    home = context.resident.get(RANDOM_STATE)
    return home if home is not None and any(context.graph.nodes[n].random for n in context.plan.nodes) else None


def _bytes_held(graph: Graph, resident: Mapping[int, str]) -> Counter[str]:
    sizes = storage_sizes(graph, graph.inputs)
    homes = {storage_of(v): resident[v] for v in graph.inputs if v in resident}
    bytes_by_device: Counter[str] = Counter()
    for storage, device in homes.items():
        bytes_by_device[device] += sizes[storage]
    return bytes_by_device


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """Register the policy `single`."""
    return [SingleDevice()]
