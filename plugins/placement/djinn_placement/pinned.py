"""Modules on the devices that the user named."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import attrs

from djinn.hooks import InvalidStage, Placement, PlacementContext, PlacementDecision, PlacementPolicy, hookimpl
from djinn.scheduling import Colocation, homes_of_values, resident_blocks, together

djinn_api_version = "2.0"


class Pinned:
    """Ops of modules whose path matches a pattern run on the device of that pattern, the others where their data comes from.

    Patterns are those of `fnmatch`; one that matches a module is valid for the modules inside it. The first match counts.
    """

    name = "pinned"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """A device for everything, from the setting `pins`.

        Raises:
            InvalidStage: a pin names a device that is not there, or there are no devices.
        """
        devices = [d.id for d in context.topology.devices]
        if not devices:
            raise InvalidStage("there are no devices; connect a server")
        pins = _Pins([(pattern, _named(device, devices, pattern)) for pattern, device in context.pins.items()])
        graph, replace, nodes = context.graph, context.plan.replace, context.plan.nodes
        blocks = together(graph, nodes, replace)
        homes = resident_blocks(blocks, graph.inputs, context.resident)
        reasons = dict.fromkeys(homes, "what it writes is there")
        _settle(context, pins, blocks, homes, reasons)
        decisions, pinned = [], set()
        for node_id in nodes:
            node, block = graph.nodes[node_id], blocks.node(node_id)
            used = [blocks.block(replace.get(v, v)) for v in node.inputs]
            pin = pins.of(node.module)
            came = next((homes[b] for b in used if b in homes), devices[0])
            device, reason = pin or (came, "no pin matches; its first operand is there" if used else "no pin matches")
            if block is not None:
                home = homes.setdefault(block, device)
                device, reason = home, reasons.setdefault(block, reason)
            for other in used:
                homes.setdefault(other, device)
            if pin is not None and device == pin[0]:
                pinned.add(node_id)
            decisions.append(PlacementDecision(node_id, device, reason))
        for value in graph.inputs:
            homes.setdefault(blocks.block(value), devices[0])
        homes_by_value = homes_of_values(graph, nodes, blocks, homes)
        return Placement(tuple(decisions), homes_by_value, self.name, pinned=frozenset(pinned))


def _settle(
    context: PlacementContext, pins: _Pins, blocks: Colocation, homes: dict[int, str], reasons: dict[int, str]
) -> None:
    """Blocks, and inputs of nodes, of pinned modules; what lives somewhere already stays."""
    replace = context.plan.replace
    for node_id in context.plan.nodes:
        node = context.graph.nodes[node_id]
        pin, block = pins.of(node.module), blocks.node(node_id)
        if pin is None:
            continue
        if block is not None and block not in homes:
            homes[block], reasons[block] = pin
        for value in node.inputs:
            if context.graph.producer(replace.get(value, value)) is None:
                homes.setdefault(blocks.block(replace.get(value, value)), pin[0])


@attrs.define
class _Pins:
    """Device that a module is pinned to, looked up once a module."""

    pins: Sequence[tuple[str, str]]
    known: dict[str, tuple[str, str] | None] = attrs.field(factory=dict)

    def of(self, module: str) -> tuple[str, str] | None:
        """The device of a module and the reason, or None."""
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
    """A device by its id or by its number."""
    if device in devices:
        return device
    if device.isdecimal() and int(device) < len(devices):
        return devices[int(device)]
    raise InvalidStage(
        f"the pin {pattern!r} names the device {device!r}; the devices are {', '.join(devices)} (or 0 to {len(devices) - 1})"
    )


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `pinned`."""
    return [Pinned()]
