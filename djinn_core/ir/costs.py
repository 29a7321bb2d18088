"""Cost estimates of programs, and capabilities of devices and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import attrs

from djinn_core.ir.short_repr import ShortRepr

CLIENT: Final = "client"  # the origin of programs, in links
EVERYWHERE: Final = "*"  # the group of all devices


@attrs.frozen
class CostEstimate:
    """Predicted cost of one node on one device.

    Attributes:
        flops: floating-point operations as `torch.utils.flop_counter` counts them on the meta device: products,
            convolutions and attention only (a multiply-add counts as two).
        bytes_read: bytes read from memory.
        bytes_written: bytes written to memory.
        seconds: predicted time.
        model: name of the cost model.
        operations: arithmetic of every kind, elementwise ops and reductions included.
        workspace: temporary bytes on the device, without operands and results. Placements reserve this memory.
    """

    flops: float
    bytes_read: int
    bytes_written: int
    seconds: float
    model: str = ""
    operations: float = 0.0
    workspace: int = 0


@attrs.frozen
class Calibration:
    """Measurements of a device, as fitted parameters for each cost model that supports calibration.

    Attributes:
        digest: digest of the other fields; equal digests mean equal calibrations.
        measured: time of the measurement, as ISO 8601.
        models: parameters as JSON values, by name of the cost model.
    """

    digest: str
    measured: str = attrs.field(default="", eq=False)
    models: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)


@attrs.frozen
class DeviceCapabilities:
    """A physical device behind a server.

    Attributes:
        id: `server/kind:index`, unique among the devices that a client knows; `kind:index` on the server itself.
        kind: `cpu`, `cuda` or the name that a device plugin gives.
        name: the hardware's own name.
        memory: total bytes; 0 if unknown.
        memory_free: free bytes at the time of measurement; None if unknown.
        spill: bytes that its executor can spill from device memory and restore.
        flops: peak floating-point operations a second; 0 if unknown.
        bandwidth: memory bandwidth in bytes a second; 0 if unknown.
        dtypes: names of supported dtypes; empty means all.
        unsupported: names of unsupported ops: `aten::sort` for all overloads, or `aten::sort.stable` for one. No
            placement may put an op on a device that lacks the op or one of its dtypes.
        calibration: measurements of `djinn calibrate`; None if the device was not calibrated.
        group: its device groups, outermost first, such as `rack0/node3`; links may name groups.
        queue: average seconds for which submissions waited for a turn on the device.
    """

    id: str
    kind: str
    name: str = ""
    memory: int = 0
    memory_free: int | None = None
    flops: float = 0.0
    bandwidth: float = 0.0
    dtypes: frozenset[str] = frozenset()
    calibration: Calibration | None = None
    group: str = ""
    spill: int = 0
    unsupported: frozenset[str] = frozenset()
    queue: float = attrs.field(default=0.0, eq=False)  # changes often, and plans do not depend on it

    @property
    def speeds(self) -> tuple[float, float]:
        """Return operations per second and bytes per second.

        Unknown speeds are assumed: one laptop core, or a mid-range accelerator.
        """
        flops, bandwidth = (5e10, 1e10) if self.kind == "cpu" else (2e13, 5e11)
        return self.flops or flops, self.bandwidth or bandwidth

    def runs(self, op: str) -> bool:
        """Return False if the device lacks an op, such as `aten::sort.stable`, or all overloads of it."""
        return not self.unsupported or not {op, op.partition(".")[0]} & self.unsupported


@attrs.frozen
class Link:
    """A measured path from one device to another, or from the client (`client`).

    Attributes:
        source: id of the sending device, `client`, or a group of devices.
        target: id of the receiving device, `client`, or a group of devices.
        bandwidth: bytes a second; 0 if unlimited.
        latency: seconds.
    """

    source: str
    target: str
    bandwidth: float
    latency: float

    def transfer_seconds(self, size: int) -> float:
        """Return the seconds to transfer `size` bytes."""
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


@attrs.frozen(slots=False, repr=False)
class NetworkTopology(ShortRepr):
    """Devices and the links between them.

    A link may name groups instead of devices. A link from `rack0` to `rack0` connects any two devices in that group. A
    link from `client` to `*` connects the client and any device. Links of devices take precedence over links of groups,
    and inner groups over outer groups. `djinn.topology()` returns the topology of the session; its links are measured
    at the first call.

    Attributes:
        devices: in the order of their indexes, unless `indexes` says otherwise.
        links: measured and configured links.
        indexes: device ids for `remote_accelerator:1`, `:2` and so on. Empty if the order of `devices` applies, which
            holds until an executor joins or leaves.
    """

    devices: tuple[DeviceCapabilities, ...]
    links: tuple[Link, ...] = ()
    indexes: tuple[str, ...] = ()

    @property
    def by_index(self) -> tuple[str, ...]:
        """Device ids of the indexes 1, 2 and so on."""
        return self.indexes or tuple([device.id for device in self.devices])

    def link(self, source: str, target: str) -> Link:
        """Return the link between two devices. Transfers within a device and over unknown links cost nothing."""
        direct = self._links.get((source, target))
        if direct is not None:
            return direct
        if source != target:
            for group in self._shared_groups(source, target):
                ends = (source if source == CLIENT else group, target if target == CLIENT else group)
                if (link := self._links.get(ends)) is not None:
                    return Link(source, target, link.bandwidth, link.latency)
        return Link(source, target, 0.0, 0.0)

    def device(self, device_id: str) -> DeviceCapabilities:
        """Return the device with the id `device_id`.

        Raises:
            KeyError: the topology has no such device.
        """
        return self._devices[device_id]

    def _shared_groups(self, source: str, target: str) -> Iterator[str]:
        """Return the groups of both devices, innermost first. The client is in every group."""
        ends = [self._devices[end].group for end in (source, target) if end in self._devices]
        path = min(ends, key=len, default="")
        while path:
            if all(f"{end}/".startswith(f"{path}/") for end in ends):
                yield path
            path = path.rpartition("/")[0]
        yield EVERYWHERE

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in reversed(self.links)}

    @cached_property
    def _devices(self) -> Mapping[str, DeviceCapabilities]:
        return {device.id: device for device in self.devices}


@attrs.frozen(repr=False)
class Costs(ShortRepr):
    """Result of the stage `estimate`: the cost of each node on each device.

    Attributes:
        by_device: estimates of all nodes, by device id.
    """

    by_device: Mapping[str, tuple[CostEstimate, ...]]

    def seconds(self, device: str) -> float:
        """Return the seconds of the whole program on one device, run sequentially."""
        return sum(e.seconds for e in self.by_device[device])

    @property
    def flops(self) -> float:
        """Return the floating-point operations of the whole program."""
        return sum(e.flops for e in next(iter(self.by_device.values()), ()))
