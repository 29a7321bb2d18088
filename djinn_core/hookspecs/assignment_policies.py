"""`djinn_register_assignment_policies`: on which executor of a server a new session begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.quotas import Quota


@attrs.frozen
class TenantLoad:
    """Load that another tenant puts on a device, through an executor process of its own.

    Attributes:
        tenant: its name.
        busy: share of time in which its executor ran programs between the last two reports, from 0 to 1.
        sessions: its sessions in the last report, plus those assigned since.
    """

    tenant: str
    busy: float = 0.0
    sessions: int = 0


@attrs.frozen
class ExecutorLoad:
    """Load of an executor that a session may begin on.

    Attributes:
        number: number of its device on the server. device: id of its device.
        busy: share of the time between the last two reports in which it ran programs of this tenant, from 0 to 1.
        beginning: sessions assigned since the last report. recent: sessions assigned in the last minute. sessions:
            sessions in the last report.
        memory: bytes that its device has; 0 if they are not known. memory_free: bytes that are free on it; None if they
            are not known.
        held: bytes that the tenant's sessions hold there: weights, caches and all else.
        hints: hints of sessions that were assigned to it since it last had none, the latest last.
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


@attrs.frozen
class AssignmentRequest:
    """Session that is about to begin, and the executors that it may begin on.

    Attributes:
        tenant: the tenant of the client.
        executors: executors with the requested device and room for the session; at least one.
        client: name that the client gives itself; do not base decisions on it.
        device: device that the client asks for; empty: any.
        hint: what the client says of its work, such as the name of a model, by its setting `assignment_hint`; mostly
            empty.
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
        reason: what the client is told.
        retry: True if a later retry may succeed. Clients then retry for `connect_timeout`.
    """

    reason: str
    retry: bool = False


class AssignmentPolicy(ABC):
    """Choose the executor of a new session, if the setting `assignment` names the policy. It is pure.

    A gateway calls it in the threads of clients, several at the same time, while these wait. Where it raises, or returns
    anything else, the built-in `least_loaded` takes its place for that session, and a warning names its plugin.

    Attributes:
        name: unique among assignment policies, as settings name it.
    """

    name: str

    @abstractmethod
    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Number of one of the executors of the request, or a refusal."""


@hookspec
def djinn_register_assignment_policies(settings: Any) -> Iterable[AssignmentPolicy]:
    """Return the assignment policies that this plugin offers.

    Called once in each gateway process. `djinn serve --assignment`, or the setting `assignment`, names the one that is used, by
    default the built-in `least_loaded`. One that raises, or returns anything but the number of an executor that it was
    shown or an `AssignmentRefusal`, is replaced by `least_loaded` for that session, with a warning that names its plugin.

    """
    del settings
    raise NotImplementedError
