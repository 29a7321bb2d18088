"""Limits for a tenant: connections at the gateway, and sessions at an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from djinn_server.hookspecs.authenticators import Denial, Identity
from djinn_server.launch.executor_config import AdmissionLimits
from djinn_server.rate_limit import Buckets
from djinn_server.usage_metrics import UsageMetrics

CONNECTIONS_A_MINUTE: Final = 1200.0  # per tenant; a burst may use the connections of ten seconds at once


class ConnectionRate:
    """Limit the rate at which each tenant connects to a gateway, independently of other tenants."""

    def __init__(self) -> None:
        self._rates = Buckets()

    def denial(self, identity: Identity) -> Denial | None:
        """Return the reason why a client may not connect now, or None if it may connect."""
        per_minute = identity.quota.connections_a_minute or CONNECTIONS_A_MINUTE
        rate_key = f"{identity.tenant} {identity.monitor}"  # status watchers do not use up the rate of programs
        wait = self._rates.of(rate_key, per_minute / 60, max(1.0, per_minute / 6)).take()
        if not wait:
            return None
        reason = f"{identity.tenant} has opened too many connections: connect again in {wait:.1f} s"
        return Denial(reason, "rate", retry=True, retry_after=wait)


@attrs.frozen
class ExecutorLimits:
    """Limits for new sessions of an executor. `UsageMetrics.check` also checks the quota, at each submission.

    Attributes:
        usage: counters, and the tenant's quota.
        limits: maximum number of sessions, and of seconds in the device's queue.
        next_lease_end: returns the seconds until the next lease of a disconnected client ends; None if there is none.
    """

    usage: UsageMetrics
    limits: AdmissionLimits
    next_lease_end: Callable[[], float | None] = lambda: None

    def denial(self, sessions: int, queue_seconds: float) -> Denial | None:
        """Return the reason why a client may not begin a session now, or None if it may.

        Args:
            sessions: number of sessions on the executor.
            queue_seconds: longest time that a waiting submission has queued for the device.
        """
        reason = self.usage.may_begin(sessions)
        if reason:
            return Denial(reason, "quota")
        if sessions >= self.limits.sessions:
            lease_seconds = self.next_lease_end()
            lease_note = (
                ""
                if lease_seconds is None
                else f"; a session of a disconnected client ends in {max(lease_seconds, 0):.0f} s"
            )
            return Denial(
                f"this executor is full: it serves {sessions} of at most {self.limits.sessions} sessions{lease_note}. Try again later, or "
                "at another server",
                "full",
                retry=True,
            )
        if queue_seconds > self.limits.queue_seconds:
            return Denial(
                f"the device is busy: a program has been waiting for it for {queue_seconds:.0f} s. No session is admitted until "
                "the queue is shorter. Try again later, or at another server",
                "full",
                retry=True,
            )
        return None
