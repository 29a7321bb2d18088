"""Tables of devices and links for fast lookup."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from djinn.hooks import PlacementContext
from djinn.planning import CostEstimate, DeviceCapabilities, NetworkTopology

# Minimum seconds of a message between devices, if links were not measured or report zero.
HOP = 5e-5  # in seconds


@attrs.define(eq=False)
class Hardware:
    """Properties of devices and links for placement.

    Attributes:
        devices: devices in the order of the topology.
        rows: cost of each node, in one row for each device model.
        row_of: index in `rows`, by device id.
        hop: latency of a message between two devices, in seconds.
        rate: bytes per second of the fastest link between two devices; infinite if no link was measured.
    """

    devices: tuple[DeviceCapabilities, ...]
    rows: list[Sequence[CostEstimate]]
    row_of: dict[str, int]
    hop: float
    rate: float
    _topology: NetworkTopology
    _links: dict[tuple[str, str], tuple[float, float]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, context: PlacementContext) -> Hardware:
        """Collect the properties of the devices and links in a context."""
        rows: list[Sequence[CostEstimate]] = []
        sizes: dict[int, int] = {}
        row_of: dict[str, int] = {}
        for device in context.topology.devices:
            row = context.costs.by_device[device.id]
            if id(row) not in sizes:
                sizes[id(row)] = len(rows)
                rows.append(row)
            row_of[device.id] = sizes[id(row)]
        between = [k for k in context.topology.links if "client" not in {k.source, k.target}]
        hop = max(HOP, min((k.latency for k in between), default=0.0))
        rate = max((k.bandwidth for k in between), default=0.0) or math.inf
        return cls(context.topology.devices, rows, row_of, hop, rate, context.topology)

    def seconds(self, source: str, target: str, size: int) -> float:
        """Return the time to transfer `size` bytes from device `source` to device `target`."""
        if source == target:
            return 0.0
        link = self._links.get((source, target))
        if link is None:
            measured_link = self._topology.link(source, target)
            link = (max(HOP, measured_link.latency), 1 / measured_link.bandwidth if measured_link.bandwidth else 0.0)
            self._links[source, target] = link
        return link[0] + size * link[1]
