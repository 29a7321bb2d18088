"""State that the sessions of an executor share; made when the executor starts, and passed on."""

from __future__ import annotations

import attrs

from djinn_core.builtins.unauthenticated_limit import Strangers
from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.server.malloc_trim import MemoryTrimmer
from djinn_core.server.running.cancellation import CancellationMonitor
from djinn_core.server.shared_device import SharedDevice
from djinn_core.server.usage_metrics import UsageMetrics
from djinn_core.server.weights.disk import Disk


@attrs.frozen
class ExecutorContext:
    """State of an executor, all of it its one tenant's.

    Attributes:
        device: the device that sessions take turns on, with its memory and its compiled templates.
        usage: counters, and the tenant's quota.
        disk: bytes that journals, spilled values and weights have on disk.
        monitor: reads the connections of sessions that compute.
        trimmer: returns memory to the system after a session has ended.
        unauthenticated: connections that have not shown a ticket yet, at all addresses together.
    """

    device: SharedDevice
    usage: UsageMetrics = attrs.field(factory=UsageMetrics)
    disk: Disk = attrs.field(factory=Disk)
    monitor: CancellationMonitor = attrs.field(factory=CancellationMonitor)
    trimmer: MemoryTrimmer = attrs.field(factory=MemoryTrimmer)
    unauthenticated: Strangers = attrs.field(factory=Strangers)

    @classmethod
    def of(cls, runtime: DeviceRuntime) -> ExecutorContext:
        """The context of an executor on this device, in which nothing has happened yet."""
        return cls(SharedDevice(runtime))
