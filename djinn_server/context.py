"""State that the sessions of an executor share; made when the executor starts, and passed on."""

from __future__ import annotations

import threading

import attrs

from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_server.disk_quota import DiskQuota
from djinn_server.events import ServerEvents
from djinn_server.malloc_trim import MemoryTrimmer
from djinn_server.session_threads import SessionThreads
from djinn_server.shared_device import SharedDevice
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.weights.weight_reader import WeightReader


@attrs.frozen
class ExecutorContext:
    """State of an executor, all of it its one tenant's.

    Attributes:
        device: the device that sessions take turns on, with its memory and its compiled templates.
        usage: counters, and the tenant's quota.
        weights: reads weights from where clients say.
        disk: bytes that journals, spilled values and weights have on disk.
        threads: run the sessions.
        trimmer: returns memory to the system after a session has ended.
        unauthenticated: connections that have not shown a ticket yet, at all addresses together.
        events: tells observers what happens; in a session's own context with the session.
        idle_seconds: time without a message after which a session's values are moved off the device; 0: they stay.
        ahead_bytes: bytes of results that a session's programs may have which run before they come; 0: none does.
        moving: held while they are moved, so that one session's are at a time.
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
        """The context of an executor on this device, in which nothing has happened yet."""
        return cls(SharedDevice(runtime))
