"""`djinn_register_admission_policies`: may a tenant that is known connect, begin a session, run a program now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.quotas import Quota

CONNECTION: Final = "connection"
SESSION: Final = "session"
SUBMISSION: Final = "submission"
STAGES: Final = frozenset({CONNECTION, SESSION, SUBMISSION})


@attrs.frozen
class AdmissionRequest:
    """Something that a tenant asks for.

    Attributes:
        stage: `connection` (at the gateway: a client with good credentials), `session` (at an executor: a client with a
            ticket) or `submission` (at an executor: a program that is to run).
        tenant, key, monitor: as in `Identity`; an executor knows of no monitors.
        client: name that the client gives itself; nothing should be decided by it.
        peer: the client's address; at the gateway alone, as far as the transport knows it.
        device: id of the executor's device; at the gateway what the client asks for, empty: any.
        quota: the tenant's quota.
        sessions: sessions that the tenant has on this executor beside this one; 0 at the gateway, as all that follow.
        values, memory: live values of the tenant on this executor, and their bytes.
        device_seconds: time on the device that the tenant has used in this hour.
        queue_seconds: longest time that a submission has been waiting for its turn on the device.
    """

    stage: str
    tenant: str
    key: str = ""
    monitor: bool = False
    client: str = ""
    peer: str = ""
    device: str = ""
    quota: Quota = attrs.field(factory=Quota)
    sessions: int = 0
    values: int = 0
    memory: int = 0
    device_seconds: float = 0.0
    queue_seconds: float = 0.0


@attrs.frozen
class AdmissionRefusal:
    """A refusal of what was asked for.

    Attributes:
        reason: what the client is told.
        after: seconds after which asking again makes sense, which clients do by themselves (`ServerBusy` in the end). None:
            refused for good (`AccessRefused`). A submission that is refused ends its session (`SessionLost`) in either case.
        kind: what the audit log and metrics call it: small letters and underscores, at most 32.
    """

    reason: str
    after: float | None = None
    kind: str = "policy"


@attrs.frozen
class AdmissionDelay:
    """A delay of what was asked for: the server waits for some seconds, then asks the policy again.

    Attributes:
        seconds: how long; more than 10 count as 10.
        reason: what the client is told where it is refused in the end, because it has waited for too long.
    """

    seconds: float
    reason: str


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Decides if something is admitted now. Built-in limits are checked before it, and it cannot lift them.

    Attributes:
        name: unique among admission policies.
        stages: which requests it is asked about, of `connection`, `session` and `submission`.
    """

    name: str
    stages: frozenset[str]

    def decide(self, request: AdmissionRequest) -> AdmissionRefusal | AdmissionDelay | None:
        """None if the request is admitted. Called in threads, several at the same time, while the client waits.

        For submissions it is called between a program's arrival and its run, so it must be quick.
        """


@hookspec
def djinn_register_admission_policies(settings: Any) -> Iterable[AdmissionPolicy]:
    """Return the admission policies that this plugin offers.

    Called once in each gateway and executor process: requests of stage `connection` are decided in the gateway, those of
    the other stages in the executor. All of them are asked, in order of name, until one refuses. One that raises, or returns
    anything else, refuses connections and sessions for now, and lets submissions run, since those that run already
    would be lost; a warning names its plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
