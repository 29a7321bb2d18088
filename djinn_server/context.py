"""State that the sessions of an executor share. The executor creates it at startup."""

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
    """State of an executor, which belongs to one tenant.

    Attributes:
        device: the shared device, with its memory and compiled templates.
        usage: counters, and the tenant's quota.
        weights: reader of weights at addresses that clients name.
        disk: quota and usage of the disk for journals, spilled values and weights.
        threads: threads that run the sessions.
        trimmer: returns memory to the system after a session has ended.
        unauthenticated: limit of open connections that have not shown a ticket, at all addresses together.
        events: notifies observers. A session's own context has events with the session's name.
        idle_seconds: seconds without a message after which a session's values leave the device; 0: never.
        ahead_bytes: limit in bytes for the results of speculative runs of a session; 0: no speculative runs.
        move_lock: held while a session moves its values off the device, so that one session moves values at a time.
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
    move_lock: threading.Lock = attrs.field(factory=threading.Lock)

    @classmethod
    def of(cls, runtime: DeviceRuntime) -> ExecutorContext:
        """Return the initial context of an executor with this device."""
        return cls(SharedDevice(runtime))
