"""Limits for a tenant: connections at the gateway, and sessions at an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from djinn_server.hookspecs.authenticators import Denial, Identity
from djinn_server.launch.executor_config import AdmissionLimits
from djinn_server.rate_limit import Buckets
from djinn_server.usage_metrics import UsageMetrics

CONNECTIONS_A_MINUTE: Final = 1200.0  # per tenant; the burst is ten seconds' worth


class ConnectionRate:
    """Limit of the rate at which a tenant connects to a gateway.

    A tenant is slowed down only by its own connections.
    """

    def __init__(self) -> None:
        self._rates = Buckets()

    def denial(self, identity: Identity) -> Denial | None:
        """Return the denial for a client that may not connect now; None if it may."""
        a_minute = identity.quota.connections_a_minute or CONNECTIONS_A_MINUTE
        who = f"{identity.tenant} {identity.monitor}"  # status watchers do not use up the rate of programs
        wait = self._rates.of(who, a_minute / 60, max(1.0, a_minute / 6)).take()
        if not wait:
            return None
        reason = f"too many connections of {identity.tenant}: there is one more in {wait:.1f} s"
        return Denial(reason, "rate", retry=True, retry_after=wait)


@attrs.frozen
class ExecutorLimits:
    """Limits of an executor: the tenant's quota, and the number of sessions.

    `UsageMetrics.check` also checks the quota, before each submission.
    """

    usage: UsageMetrics
    limits: AdmissionLimits
    next_lease_end: Callable[[], float | None] = lambda: (
        None
    )  # seconds until the next lease of a disconnected client ends

    def denial(self, sessions: int, queue_seconds: float) -> Denial | None:
        """Return the denial for a client that may not begin a session now; None if it may.

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
                f"the device is busy: a program has been waiting for it for {queue_seconds:.0f} s, and no session is admitted "
                "meanwhile. Try again later, or at another server",
                "full",
                retry=True,
            )
        return None
