"""State shared by the sessions of an executor. The executor creates it at startup."""

from __future__ import annotations

import threading

import attrs

from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_server.disk_quota import DiskQuota
from djinn_server.events import ServerEvents
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.malloc_trim import MemoryTrimmer
from djinn_server.session_threads import SessionThreads
from djinn_server.shared_device import SharedDevice
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.weights.weight_reader import WeightReader


@attrs.frozen
class ExecutorContext:
    """State of an executor. All of it belongs to the executor's one tenant.

    Attributes:
        device: the shared device, with its memory and compiled templates.
        usage: counters, and the tenant's quota.
        weights: reads weights from addresses that clients name.
        disk: disk usage of journals, spilled values and weights.
        threads: run the sessions.
        trimmer: returns memory to the system after a session has ended.
        unauthenticated: connections that have not shown a ticket yet, at all addresses together.
        events: notifies observers; in a session's own context it names the session.
        idle_seconds: time without a message after which a session's values are moved off the device; 0: they stay.
        ahead_bytes: limit of result bytes of a session's programs that run before their submissions arrive; 0: none.
        moving: held while values are moved, so that one session moves at a time.
    """

    device: SharedDevice
    usage: UsageMetrics = attrs.field(factory=UsageMetrics)
    weights: WeightReader = attrs.field(factory=WeightReader)
    disk: DiskQuota = attrs.field(factory=DiskQuota)
    threads: SessionThreads = attrs.field(factory=SessionThreads)
    trimmer: MemoryTrimmer = attrs.field(factory=MemoryTrimmer)
    unauthenticated: UnauthenticatedLimit = attrs.field(factory=UnauthenticatedLimit)
    events: ServerEvents = attrs.field(factory=ServerEvents)
    idle_seconds: float = 0.0
    ahead_bytes: int = 0
    moving: threading.Lock = attrs.field(factory=threading.Lock)

    @classmethod
    def of(cls, runtime: DeviceRuntime) -> ExecutorContext:
        """Return the initial context of an executor on this device."""
        return cls(SharedDevice(runtime))
