"""What a program costs and what the hardware offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class CostEstimate:
    """Predicted cost of one node on one device.

    Attributes:
        flops: floating-point operations as `torch.utils.flop_counter` counts them: those of products, convolutions and
            attention (a multiply-add counts as two).
        bytes_read, bytes_written: memory traffic in bytes.
        seconds: predicted time.
        model: name of the cost model that said so.
        operations: arithmetic of every kind, elementwise ops and reductions included.
    """

    flops: float
    bytes_read: int
    bytes_written: int
    seconds: float
    model: str = ""
    operations: float = 0.0


@attrs.frozen
class Calibration:
    """What was measured of a device: for each cost model that can be calibrated, what it made of its measurements.

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
        id: `server/kind:index`, unique among the devices that a client knows.
        kind: `cpu`, `cuda` or what a device plugin calls it.
        name: what the hardware calls itself.
        memory: bytes in total.
        memory_free: bytes that were free when it was measured.
        flops: peak floating-point operations a second (0: unknown).
        bandwidth: memory bandwidth in bytes a second (0: unknown).
        dtypes: names of the dtypes that it computes with; empty means all.
        calibration: what was measured of it (`djinn calibrate`); None where nothing was.
        queue: seconds that a submission waited there for its turn, on average, as its answers said.
    """

    id: str
    kind: str
    name: str = ""
    memory: int = 0
    memory_free: int = 0
    flops: float = 0.0
    bandwidth: float = 0.0
    dtypes: frozenset[str] = frozenset()
    calibration: Calibration | None = None
    queue: float = attrs.field(default=0.0, eq=False)  # changes all the time, and plans do not depend on it


@attrs.frozen
class Link:
    """A measured path from one device to another, or from the client (`client`)."""

    source: str
    target: str
    bandwidth: float
    latency: float

    def transfer_seconds(self, size: int) -> float:
        """Time to move `size` bytes."""
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


@attrs.frozen
class NetworkTopology:
    """Devices and the links between them."""

    devices: tuple[DeviceCapabilities, ...]
    links: tuple[Link, ...] = ()

    def link(self, source: str, target: str) -> Link:
        """The link between two devices; free within one device, unknown links cost nothing."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return Link(source, target, 0.0, 0.0)

    def device(self, device_id: str) -> DeviceCapabilities:
        """The device of that id.

        Raises:
            KeyError: there is none.
        """
        for device in self.devices:
            if device.id == device_id:
                return device
        raise KeyError(device_id)


@attrs.frozen
class Costs:
    """Result of `estimate`: by device id one estimate per node."""

    by_device: Mapping[str, tuple[CostEstimate, ...]]

    def seconds(self, device: str) -> float:
        """Time of the whole program on one device, one op after the other."""
        return sum(e.seconds for e in self.by_device[device])

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole program."""
        return sum(e.flops for e in next(iter(self.by_device.values()), ()))
