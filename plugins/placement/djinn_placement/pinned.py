"""Placement of modules on the devices that the user names."""

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

    Other ops run on the device of their data.

    A module belongs to the first pattern that matches its path. Patterns are those of `fnmatch`. A pattern also holds
    for the submodules of a module that it matches.
    """

    name = "pinned"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """Return a device for everything, from the setting `pins`.

        Raises:
            InvalidStage: a pin names a device that does not exist.
        """
        devices = [d.id for d in context.topology.devices]
        pins = _Pins([(pattern, _named(device, devices, pattern)) for pattern, device in context.pins.items()])
        nodes, homes = context.graph.nodes, BlockHomes(context)
        for node_id in context.plan.nodes:
            _settle(nodes[node_id], context, pins, homes)

        def choose(node: Node, homes: BlockHomes) -> tuple[str, str]:
            if (pin := pins.of(node.module)) is not None:
                return pin
            home = next((device for value in node.inputs if (device := homes.of(value)) is not None), devices[0])
            return home, "no pin matches; its first operand is on this device" if node.inputs else "no pin matches"

        placement = assign_blocks(context, self.name, choose, homes)
        decisions = [d for d in placement.decisions if (pin := pins.of(nodes[d.node].module)) and d.device == pin[0]]
        return attrs.evolve(placement, fixed_nodes=frozenset(d.node for d in decisions))


def _settle(node: Node, context: PlacementContext, pins: _Pins, homes: BlockHomes) -> None:
    """Set the device of the results and inputs of a pinned module. Values that already are on a device stay on it."""
    if (pin := pins.of(node.module)) is None:
        return
    homes.settle_node(node, *pin)
    for value in node.inputs:
        if context.graph.producer(context.plan.replace.get(value, value)) is None:
            homes.settle(value, *pin)


@attrs.define
class _Pins:
    """The device that a module is pinned to, cached per module."""

    pins: Sequence[tuple[str, str]]
    known: dict[str, tuple[str, str] | None] = attrs.field(factory=dict)

    def of(self, module: str) -> tuple[str, str] | None:
        """Return the device of a module and the reason, or None."""
        if module not in self.known:
            self.known[module] = next(
                (
                    (device, f"the pin {pattern!r} matches {module}")
                    for pattern, device in self.pins
                    if fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")
                ),
                None,
            )
        return self.known[module]


def _named(device: str, devices: Sequence[str], pattern: str) -> str:
    """Return the id of the device that a pin names by its id or its number."""
    if device in devices:
        return device
    if device.isdecimal() and int(device) < len(devices):
        return devices[int(device)]
    raise InvalidStage(
        f"the pin {pattern!r} names the device {device!r}; the devices are {', '.join(devices)} (or 0 to {len(devices) - 1})"
    )


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """Return the placement policy `pinned`."""
    return [Pinned()]
