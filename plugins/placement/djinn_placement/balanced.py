"""Placement by memory: each device holds its share of the inputs, and runs the segment of the program that uses them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn.hooks import PlacementContext, PlacementPolicy, hookimpl
from djinn.planning import BlockHomes, DeviceCapabilities, Node, Placement, assign_blocks, storage_of, storage_sizes

djinn_api_version = "2.0"


class Balanced(PlacementPolicy):
    """Placement policy that divides inputs, in order of use, among devices in proportion to memory. It ignores speed."""

    name = "balanced"

    def place(self, context: PlacementContext) -> Placement:
        """Return a placement in contiguous segments, one per device. Values that already are on a device do not move."""
        graph, replace = context.graph, context.plan.replace
        shares = _Shares.of(context.topology.devices, storage_sizes(graph, graph.inputs))
        inputs = frozenset(graph.inputs)

        def choose(node: Node, homes: BlockHomes) -> tuple[str, str]:
            input_values = [source for value in node.inputs if (source := replace.get(value, value)) in inputs]
            home_devices = [homes.of(value) for value in input_values if homes.is_resident(value)]
            return shares.take(
                [storage_of(value) for value in input_values], home_devices[-1] if home_devices else None
            )

        return assign_blocks(context, self.name, choose)


@attrs.define
class _Shares:
    """Shares of the input bytes. The next device is the first device whose share is not used up.

    Attributes:
        ends: pairs of a device and the end of its share, in bytes of inputs in order of use.
        sizes: bytes by storage.
        current: device of the last node.
        seen: storages that nodes have read.
        at: bytes of these storages.
        total: bytes of all storages.
    """

    ends: list[tuple[str, float]]
    sizes: dict[int, int]
    current: str
    seen: set[int] = attrs.field(factory=set)
    at: int = 0
    total: int = 0

    @classmethod
    def of(cls, devices: tuple[DeviceCapabilities, ...], sizes: dict[int, int]) -> _Shares:
        """Return shares in proportion to memory, or equal shares if a device's memory is unknown."""
        weights = [float(d.memory) if all(d.memory for d in devices) else 1.0 for d in devices]
        total, end, ends = sum(sizes.values()), 0.0, []
        for device, weight in zip(devices, weights, strict=True):
            end += total * weight / sum(weights)
            ends.append((device.id, end))
        return cls(ends, sizes, devices[0].id, total=total)

    def take(self, storages: list[int], settled: str | None) -> tuple[str, str]:
        """Return the device of a node that reads the inputs in `storages`, and the reason.

        `settled`: device on which an input already is, or None. The node runs on this device.
        """
        for storage in storages:
            if storage not in self.seen:
                self.seen.add(storage)
                self.at += self.sizes[storage]
        if settled is not None:
            self.current = settled
        elif storages:
            middle = self.at - self.sizes[storages[-1]] / 2
            self.current = next((device for device, end in self.ends if middle <= end), self.ends[-1][0])
        return self.current, f"the share of {self.current} in {self.total:,} bytes of inputs, in the order of use"


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """Return the placement policy `balanced`."""
    return [Balanced()]
