"""Admission of tenants: built-in limits first, then the policies of plugins, each of which may refuse or delay."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from djinn_core.hookspecs.admission_policies import (
    CONNECTION,
    SESSION,
    SUBMISSION,
    AdmissionDelay,
    AdmissionPolicy,
    AdmissionRefusal,
    AdmissionRequest,
)
from djinn_core.logs import get_logger
from djinn_core.registry.registry import Registry
from djinn_server.launch.executor_config import AdmissionLimits
from djinn_server.rate_limit import Buckets
from djinn_server.usage_metrics import UsageMetrics

CONNECTIONS_A_MINUTE: Final = 1200.0  # of a tenant; as many as in ten seconds at once
KIND: Final = re.compile("[a-z][a-z_]{0,31}")  # of a refusal, as audit log and metrics call it
LATEST: Final = 3600.0  # seconds: clients are told no later time
STEP: Final = 10.0  # seconds that one delay takes at most, and after which a policy is asked again
# Seconds that delays of one request may take in all. Clients wait for a reply no longer than `connect_timeout`.
LONGEST: Final = {CONNECTION: 3.0, SESSION: 3.0, SUBMISSION: 300.0}
_AGAIN: Final = 5.0  # seconds, where a policy has failed
_REASON: Final = 1000  # characters
_log = get_logger("djinn.server")


class ConnectionRate:
    """The built-in policy of a gateway: how often tenants connect. A tenant is slowed only by its own connections."""

    name = "connection_rate"
    stages = frozenset({CONNECTION})

    def __init__(self) -> None:
        self._rates = Buckets()

    def decide(self, request: AdmissionRequest) -> AdmissionRefusal | None:
        """As `AdmissionPolicy.decide`."""
        a_minute = request.quota.connections_a_minute or CONNECTIONS_A_MINUTE
        who = f"{request.tenant} {request.monitor}"  # those that watch the server do not slow programs
        wait = self._rates.of(who, a_minute / 60, max(1.0, a_minute / 6)).take()
        if not wait:
            return None
        return AdmissionRefusal(
            f"too many connections of {request.tenant}: there is one more in {wait:.1f} s", wait, "rate"
        )


@attrs.frozen
class ExecutorLimits:
    """The built-in policy of an executor: the tenant's quota, and how many sessions the executor serves.

    The quota is checked before each submission as well, by `UsageMetrics.check`.
    """

    usage: UsageMetrics
    limits: AdmissionLimits
    next_lease_end: Callable[[], float | None] = lambda: (
        None
    )  # seconds until the next lease of a disconnected client ends
    name: str = "executor_limits"
    stages: frozenset[str] = frozenset({SESSION})

    def decide(self, request: AdmissionRequest) -> AdmissionRefusal | None:
        """As `AdmissionPolicy.decide`."""
        reason = self.usage.may_begin(request.sessions)
        if reason:
            return AdmissionRefusal(reason, kind="quota")
        if request.sessions >= self.limits.sessions:
            left = self.next_lease_end()
            gone = "" if left is None else f"; a session of a disconnected client ends in {max(left, 0):.0f} s"
            return AdmissionRefusal(
                f"this executor is full: it serves {request.sessions} of at most {self.limits.sessions} sessions{gone}. Try again "
                "later, or at another server",
                0.0,
                "full",
            )
        if request.queue_seconds > self.limits.queue_seconds:
            return AdmissionRefusal(
                f"the device is busy: a program has been waiting for it for {request.queue_seconds:.0f} s, and no session is "
                "admitted meanwhile. Try again later, or at another server",
                0.0,
                "full",
            )
        return None


class AdmissionPolicies:
    """The admission policies of plugins in this process."""

    def __init__(self, policies: Sequence[tuple[AdmissionPolicy, str]] = ()) -> None:
        """`policies`: each with its plugin, as messages name it."""
        self._policies = {
            stage: [pair for pair in policies if stage in pair[0].stages] for stage in (CONNECTION, SESSION, SUBMISSION)
        }
        self._told: set[str] = set()

    @classmethod
    def of(cls, registry: Registry) -> AdmissionPolicies:
        """Those of the plugins in use."""
        owner = registry.owner
        return cls([(policy, owner("admission_policies", policy.name)) for policy in registry.admission_policies])

    def decides(self, stage: str) -> bool:
        """True if a policy is asked about requests of this stage."""
        return bool(self._policies[stage])

    def decide(
        self, request: AdmissionRequest, sleep: Callable[[float], None] | None = None
    ) -> AdmissionRefusal | None:
        """Return the first refusal, or None if all policies admit the request. Call `sleep` (default `time.sleep`) for each delay."""
        waited = 0.0
        for policy, plugin in self._policies[request.stage]:
            while (result := self._ask(policy, plugin, request)) is not None:
                if isinstance(result, AdmissionRefusal):
                    return result
                if waited >= LONGEST[request.stage]:
                    return AdmissionRefusal(result.reason, result.seconds, "delayed")
                pause = min(result.seconds, LONGEST[request.stage] - waited)
                (sleep or time.sleep)(pause)
                waited += pause
        return None

    def _ask(
        self, policy: AdmissionPolicy, plugin: str, request: AdmissionRequest
    ) -> AdmissionRefusal | AdmissionDelay | None:
        try:
            result: object = policy.decide(request)  # of a plugin: anything
            if result is None:
                return None
            if isinstance(result, AdmissionRefusal):
                after = None if result.after is None else min(max(0.0, float(result.after)), LATEST)
                kind = result.kind if KIND.fullmatch(str(result.kind)) else "policy"
                return AdmissionRefusal(str(result.reason)[:_REASON], after, kind)
            if isinstance(result, AdmissionDelay):
                return AdmissionDelay(min(max(0.01, float(result.seconds)), STEP), str(result.reason)[:_REASON])
            error = f"`decide` returned a {type(result).__name__}"
        except Exception as raised:
            error = f"`decide` raised {raised!r}"
        self._tell(policy, plugin, request.stage, error)
        if request.stage == SUBMISSION:
            return None
        return AdmissionRefusal("this server cannot decide if it admits you: try again later", _AGAIN, "policy_failed")

    def _tell(self, policy: AdmissionPolicy, plugin: str, stage: str, error: str) -> None:
        """Warn once of each error."""
        log = _log.debug if error in self._told else _log.warning
        if len(self._told) < 100:
            self._told.add(error)
        log("an admission policy failed", policy=policy.name, plugin=plugin, stage=stage, error=error)
