"""Placement of modules on devices that the user names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import attrs

from djinn.errors import InvalidStage
from djinn.hooks import PlacementContext, PlacementPolicy, hookimpl
from djinn.planning import BlockHomes, Node, Placement, assign_blocks

djinn_api_version = "2.0"


class Pinned(PlacementPolicy):
    """Placement policy that runs modules on the devices of the setting `pins`.

    Other ops run on the device of their data. The first `fnmatch` pattern that matches the path of a module, or of a
    module that contains it, decides.
    """

    name = "pinned"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """Return a placement by the setting `pins`.

        Raises:
            InvalidStage: a pin names a device that does not exist.
        """
        devices = [d.id for d in context.topology.devices]
        pins = _Pins([(pattern, _device_id(device, devices, pattern)) for pattern, device in context.pins.items()])
        nodes, homes = context.graph.nodes, BlockHomes(context)
        for node_id in context.plan.nodes:
            _settle_pinned_module(nodes[node_id], context, pins, homes)

        def choose(node: Node, homes: BlockHomes) -> tuple[str, str]:
            if (pin := pins.of(node.module)) is not None:
                return pin
            home = next((device for value in node.inputs if (device := homes.of(value)) is not None), devices[0])
            return home, "no pin matches; its first operand is on this device" if node.inputs else "no pin matches"

        placement = assign_blocks(context, self.name, choose, homes)
        decisions = [d for d in placement.decisions if (pin := pins.of(nodes[d.node].module)) and d.device == pin[0]]
        return attrs.evolve(placement, fixed_nodes=frozenset(d.node for d in decisions))


def _settle_pinned_module(node: Node, context: PlacementContext, pins: _Pins, homes: BlockHomes) -> None:
    """Set the device of a node's results and program inputs, if its module is pinned. Values on a device stay there."""
    if (pin := pins.of(node.module)) is None:
        return
    homes.settle_node(node, *pin)
    for value in node.inputs:
        if context.graph.producer(context.plan.replace.get(value, value)) is None:
            homes.settle(value, *pin)


@attrs.define
class _Pins:
    """Pins as pairs of a pattern and a device, with a cache of the device by module."""

    pins: Sequence[tuple[str, str]]
    device_by_module: dict[str, tuple[str, str] | None] = attrs.field(factory=dict)

    def of(self, module: str) -> tuple[str, str] | None:
        """Return the device of a module and the reason, or None if no pin matches."""
        if module not in self.device_by_module:
            self.device_by_module[module] = next(
                (
                    (device, f"the pin {pattern!r} matches {module}")
                    for pattern, device in self.pins
                    if fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")
                ),
                None,
            )
        return self.device_by_module[module]


def _device_id(device: str, devices: Sequence[str], pattern: str) -> str:
    """Return the id of `device`, which a pin names by its id or its number.

    Raises:
        InvalidStage: `devices` has no such device. The message names the pin's `pattern`.
    """
    if device in devices:
        return device
    if device.isdecimal() and int(device) < len(devices):
        return devices[int(device)]
    raise InvalidStage(
        f"the pin {pattern!r} names the device {device!r}, which is not available. Use one of {', '.join(devices)}, or a number from 0 to {len(devices) - 1}"
    )


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """Return the placement policy `pinned`."""
    return [Pinned()]
