"""Each device holds its share of the program's inputs, and runs the stretch of the program that uses them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn.hooks import (
    DeviceCapabilities,
    InvalidStage,
    Placement,
    PlacementContext,
    PlacementDecision,
    PlacementPolicy,
    hookimpl,
    storage_of,
)
from djinn.scheduling import homes_of_values, resident_blocks, storage_sizes, together

djinn_api_version = "2.0"


class Balanced:
    """Memory in proportion to what devices have of it, contiguous in the order of use, blind to speed."""

    name = "balanced"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """The program in stretches, one a device; what lives somewhere already stays.

        Raises:
            InvalidStage: there are no devices.
        """
        if not context.topology.devices:
            raise InvalidStage("there are no devices; connect a server")
        graph, replace, nodes = context.graph, context.plan.replace, context.plan.nodes
        blocks = together(graph, nodes, replace)
        homes = resident_blocks(blocks, graph.inputs, context.resident)
        stayed = frozenset(homes)
        shares = _Shares.of(context.topology.devices, storage_sizes(graph, graph.inputs))
        inputs = frozenset(graph.inputs)
        decisions = []
        for node_id in nodes:
            node, block = graph.nodes[node_id], blocks.node(node_id)
            used = [replace.get(v, v) for v in node.inputs]
            fresh = [v for v in used if v in inputs]
            settled = [homes[b] for v in fresh if (b := blocks.block(v)) in stayed]
            device = shares.take([storage_of(v) for v in fresh], settled[-1] if settled else None)
            if block is not None:
                device = homes.setdefault(block, device)
            for value in fresh:
                homes.setdefault(blocks.block(value), device)
            decisions.append(PlacementDecision(node_id, device, shares.reason(device, block in stayed)))
        for value in graph.inputs:
            homes.setdefault(blocks.block(value), shares.current)
        return Placement(tuple(decisions), homes_of_values(graph, nodes, blocks, homes), self.name)


@attrs.define
class _Shares:
    """Next device: the one whose share of the bytes is not yet used up."""

    ends: list[tuple[str, float]]
    sizes: dict[int, int]
    current: str
    seen: set[int] = attrs.field(factory=set)
    at: int = 0
    total: int = 0

    @classmethod
    def of(cls, devices: tuple[DeviceCapabilities, ...], sizes: dict[int, int]) -> _Shares:
        """Shares in proportion to memory; equal ones where that of a device is unknown."""
        weights = [float(d.memory) if all(d.memory for d in devices) else 1.0 for d in devices]
        total, end, ends = sum(sizes.values()), 0.0, []
        for device, weight in zip(devices, weights, strict=True):
            end += total * weight / sum(weights)
            ends.append((device.id, end))
        return cls(ends, sizes, devices[0].id, total=total)

    def take(self, storages: list[int], settled: str | None) -> str:
        """The device for a node that reads these inputs first; where they have a home, the work goes on there."""
        for storage in storages:
            if storage not in self.seen:
                self.seen.add(storage)
                self.at += self.sizes[storage]
        if settled is not None:
            self.current = settled
        elif storages:
            middle = self.at - self.sizes[storages[-1]] / 2
            self.current = next((device for device, end in self.ends if middle <= end), self.ends[-1][0])
        return self.current

    def reason(self, device: str, stayed: bool) -> str:
        """Reason why a node is on `device`."""
        if stayed:
            return "what it writes is there"
        return f"the share of {device} in {self.total:,} bytes of inputs, in the order of use"


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `balanced`."""
    return [Balanced()]
