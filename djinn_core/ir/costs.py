"""Cost estimates of programs, and capabilities of devices and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import attrs

from djinn_core.ir.short_repr import ShortRepr

CLIENT: Final = "client"  # where programs come from, in links
EVERYWHERE: Final = "*"  # the group of all devices


@attrs.frozen
class CostEstimate:
    """Predicted cost of one node on one device.

    Attributes:
        flops: floating-point operations as `torch.utils.flop_counter` counts them on the meta device: those of products,
            convolutions and attention (a multiply-add counts as two).
        bytes_read, bytes_written: memory traffic in bytes.
        seconds: predicted time.
        model: name of the cost model that said so.
        operations: arithmetic of every kind, elementwise ops and reductions included.
        workspace: bytes that the op takes on its device while it runs, beside what it reads and makes. Placements reserve
            this memory.
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
    """Measurements of a device: for each cost model that can be calibrated, the parameters fitted to its measurements.

    Attributes:
        digest: of all that follows; two of the same digest are the same.
        measured: when, as ISO 8601.
        models: by name of the cost model its parameters, as JSON holds them.
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
        memory: bytes in total; 0 if that is not known.
        memory_free: bytes that were free when it was measured; 0 if none were, None if that is not known.
        spill: bytes beyond its memory that its executor can keep elsewhere and bring back.
        flops: peak floating-point operations a second (0: unknown).
        bandwidth: memory bandwidth in bytes a second (0: unknown).
        dtypes: names of the dtypes that it computes with; empty means all.
        unsupported: names of ops that it does not run: `aten::sort` for all overloads, or `aten::sort.stable` for one.
            No placement may put an op on a device that does not run it or lacks one of its dtypes.
        calibration: measurements of `djinn calibrate`; None if the device was not calibrated.
        group: the groups of devices that it is in, outermost first, such as `rack0/node3`; links may name groups.
        queue: seconds that a submission waited there for its turn, on average, as its replies said.
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
    queue: float = attrs.field(default=0.0, eq=False)  # changes all the time, and plans do not depend on it

    @property
    def speeds(self) -> tuple[float, float]:
        """Operations and bytes a second, assumed by its kind if it does not say them: a laptop's core, or a mid-range accelerator."""
        flops, bandwidth = (5e10, 1e10) if self.kind == "cpu" else (2e13, 5e11)
        return self.flops or flops, self.bandwidth or bandwidth

    def runs(self, op: str) -> bool:
        """False if it does not run an op, such as `aten::sort.stable`: this overload, or any."""
        return not self.unsupported or not {op, op.partition(".")[0]} & self.unsupported


@attrs.frozen
class Link:
    """A measured path from one device to another, or from the client (`client`).

    Attributes:
        source, target: ids of devices, `client`, or groups of devices.
        bandwidth: bytes a second; 0: unlimited.
        latency: seconds.
    """

    source: str
    target: str
    bandwidth: float
    latency: float

    def transfer_seconds(self, size: int) -> float:
        """Time to move `size` bytes."""
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


@attrs.frozen(slots=False, repr=False)
class NetworkTopology(ShortRepr):
    """Devices and the links between them.

    A link may name groups instead of devices: one from `rack0` to `rack0` is between any two devices in that group, one from
    `client` to `*` between the client and any device. Links of devices go before those of groups, inner groups before
    outer ones. `djinn.topology()` returns the topology of the session; its links are measured at the first call.

    Attributes:
        devices: in the order of their indexes, unless `indexes` says otherwise.
        links: those that were measured or configured.
        indexes: ids of the devices that the indexes of `remote_accelerator` from 1 on stand for, where those are not the
            devices in their order, because executors have joined or left.
    """

    devices: tuple[DeviceCapabilities, ...]
    links: tuple[Link, ...] = ()
    indexes: tuple[str, ...] = ()

    @property
    def by_index(self) -> tuple[str, ...]:
        """Ids of the devices of the indexes 1, 2 and so on."""
        return self.indexes or tuple([device.id for device in self.devices])

    def link(self, source: str, target: str) -> Link:
        """The link between two devices; free within one device, unknown links cost nothing."""
        direct = self._links.get((source, target))
        if direct is not None:
            return direct
        if source != target:
            for group in self._shared_groups(source, target):
                ends = (source if source == CLIENT else group, target if target == CLIENT else group)
                if (found := self._links.get(ends)) is not None:
                    return Link(source, target, found.bandwidth, found.latency)
        return Link(source, target, 0.0, 0.0)

    def device(self, device_id: str) -> DeviceCapabilities:
        """The device of that id.

        Raises:
            KeyError: there is none.
        """
        return self._devices[device_id]

    def _shared_groups(self, source: str, target: str) -> Iterator[str]:
        """Groups that both are in, innermost first; the client is in all."""
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
    """Result of `estimate`.

    Attributes:
        by_device: by device id one estimate per node.
    """

    by_device: Mapping[str, tuple[CostEstimate, ...]]

    def seconds(self, device: str) -> float:
        """Time of the whole program on one device, one op after the other."""
        return sum(e.seconds for e in self.by_device[device])

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole program."""
        return sum(e.flops for e in next(iter(self.by_device.values()), ()))
