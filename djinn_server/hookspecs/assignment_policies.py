"""`djinn_register_assignment_policies`: choose the executor of a server on which a new session begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_server.hookspecs.quotas import Quota


@attrs.frozen
class TenantLoad:
    """Load that another tenant's executor process puts on a device.

    Attributes:
        tenant: name of the tenant.
        busy: share of time, from 0 to 1, in which the executor ran programs between the last two reports.
        sessions: sessions of the tenant in the last report, plus sessions assigned since then.
    """

    tenant: str
    busy: float = 0.0
    sessions: int = 0


@attrs.frozen
class ExecutorLoad:
    """Load of an executor that can take a new session.

    Attributes:
        number: number of the executor's device on the server.
        device: id of the device.
        busy: share of time, from 0 to 1, in which the executor ran programs of this tenant between the last two reports.
        beginning: sessions assigned since the last report.
        recent: sessions assigned in the last minute.
        sessions: sessions in the last report.
        memory: bytes of memory of the device; 0 if unknown.
        memory_free: free bytes on the device; None if unknown.
        held: bytes of the tenant's sessions on the device, including weights and caches.
        hints: hints of the sessions assigned since the executor was last idle, the latest last.
        others: other tenants that have sessions on the same device.
    """

    number: int = 0
    device: str = ""
    busy: float = 0.0
    beginning: int = 0
    recent: int = 0
    sessions: int = 0
    memory: int = 0
    memory_free: int | None = None
    held: int = 0
    hints: tuple[str, ...] = ()
    others: tuple[TenantLoad, ...] = ()

    @property
    def device_load(self) -> float:
        """Load of the device by all tenants. 1.0 is a fully busy device.

        A session that is about to begin counts as 1.0, and an idle session as almost 0. So a training job goes to an
        executor with many idle notebooks rather than to an executor with another training job.
        """
        return round(self.busy + sum(other.busy for other in self.others), 1) + self.beginning

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: the least loaded executor comes first."""
        return self.device_load, self.recent, self.sessions, -(self.memory_free or 0)


@attrs.frozen
class AssignmentRequest:
    """A new session, and the executors on which it may begin.

    Attributes:
        tenant: the tenant of the client.
        executors: executors with the requested device and room for the session; at least one.
        client: name that the client chose for itself. Do not base decisions on this name.
        device: device that the client requests; empty: any.
        hint: the client's setting `assignment_hint`, such as the name of a model. Empty by default.
        quota: the tenant's quota.
    """

    tenant: str
    executors: tuple[ExecutorLoad, ...]
    client: str = ""
    device: str = ""
    hint: str = ""
    quota: Quota = attrs.field(factory=Quota)


@attrs.frozen
class AssignmentRefusal:
    """Refusal to begin a session on any of the executors.

    Attributes:
        reason: the message that the client receives.
        retry: True if a later retry may succeed. Clients then retry for `connect_timeout`.
    """

    reason: str
    retry: bool = False


class AssignmentPolicy(ABC):
    """Choose the executor of a new session, if the setting `assignment` names this policy. A policy has no side effects.

    A gateway calls it in the threads of waiting clients, several at a time. If it raises or returns an invalid result, the
    built-in `least_loaded` decides for that session, and a warning names the plugin.

    Attributes:
        name: unique among assignment policies, as settings name it.
    """

    name: str

    @abstractmethod
    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Return the number of an executor of the request, or a refusal."""


@hookspec
def djinn_register_assignment_policies(settings: Any) -> Iterable[AssignmentPolicy]:
    """Return the assignment policies that this plugin offers.

    Called once in each gateway process. `djinn serve --assignment`, or the setting `assignment`, selects the policy; the default
    is the built-in `least_loaded`. If a policy raises, or returns neither the number of an offered executor nor an
    `AssignmentRefusal`, `least_loaded` decides for that session, and a warning names the plugin.
    """
    del settings
    raise NotImplementedError
