"""Assign new sessions to executors: measure the load of each executor, and call a policy."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Final

import attrs

from djinn_core.errors import PluginError, install_hint
from djinn_core.logs import get_logger
from djinn_core.registry.registry import Registry
from djinn_core.wire.executor_reports import Sessions
from djinn_server.hookspecs.assignment_policies import (
    AssignmentPolicy,
    AssignmentRefusal,
    AssignmentRequest,
    ExecutorLoad,
)

LOAD_SECONDS: Final = 1.0  # after which a report is too old for assignments
RECENT_SECONDS: Final = 60.0  # for which an assigned session counts as recent
LEAST_LOADED: Final = "least_loaded"  # the default, and the fallback if a policy fails
_HINTS_LIMIT: Final = 32  # latest hints of an executor
_REASON_LENGTH: Final = 1000  # maximum characters of a refusal
Decisions = defaultdict[str, Counter[str]]
_log = get_logger("djinn.server")


class LoadMeter:
    """Load of one executor, from its reports and the sessions assigned to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._last_used: tuple[float, float] | None = None  # time of the last report, and its total device seconds
        self._load = ExecutorLoad()
        self.assigned = 0  # sessions, including those of earlier processes
        self._assigned_at: list[float] = []
        self._hints: dict[str, None] = {}

    @property
    def is_due(self) -> bool:
        """True if a new report should be requested, because the last one is older than `LOAD_SECONDS`."""
        return time.monotonic() - self._reported_at > LOAD_SECONDS

    def update(self, report: Sessions) -> None:
        """Update the load from a new report."""
        now = time.monotonic()
        device_seconds = report.metered.values.get("device_seconds", 0.0)
        with self._lock:
            before, self._last_used = self._last_used, (now, device_seconds)
            if not report.sessions and not self._beginning():
                self._hints.clear()
            self._reported_at = now
            busy = 0.0
            if before is not None and device_seconds >= before[1]:  # otherwise the executor was replaced
                busy = min(1.0, (device_seconds - before[1]) / max(now - before[0], 1e-3))
            self._load = ExecutorLoad(
                busy=busy,
                sessions=len(report.sessions),
                memory=report.device.memory,
                memory_free=report.device.memory_free,
                held=sum(session.memory for session in report.sessions),
            )

    def assign(self, hint: str = "") -> None:
        """Count a session that was assigned to the executor. `hint`: as in `AssignmentRequest`."""
        with self._lock:
            self.assigned += 1
            self._assigned_at.append(time.monotonic())
            if hint:
                self._hints.pop(hint, None)
                self._hints[hint] = None
                while len(self._hints) > _HINTS_LIMIT:
                    del self._hints[next(iter(self._hints))]

    def load(self) -> ExecutorLoad:
        """Return the current load of the executor."""
        with self._lock:
            now = time.monotonic()
            self._assigned_at = [at for at in self._assigned_at if now - at < RECENT_SECONDS]
            beginning, recent = self._beginning(), len(self._assigned_at)
            return attrs.evolve(self._load, beginning=beginning, recent=recent, hints=tuple(self._hints))

    def _beginning(self) -> int:
        return sum(at > self._reported_at for at in self._assigned_at)


class LeastLoaded(AssignmentPolicy):
    """Assign a session to the executor whose device has the least load."""

    name = LEAST_LOADED

    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Return the number of the least loaded executor."""
        return min(request.executors, key=lambda load: load.rank).number


@attrs.frozen
class Assigner:
    """Call the assignment policy of a gateway. If the policy fails, use `least_loaded`.

    Attributes:
        policy: the policy.
        plugin: name of its plugin for messages.
        counts: numbers of its results (`assigned`, `refused`, `failed`), by result and policy.
    """

    policy: AssignmentPolicy = attrs.field(factory=LeastLoaded)
    plugin: str = ""
    counts: Decisions = attrs.field(factory=lambda: defaultdict(Counter))

    @classmethod
    def of(cls, registry: Registry, name: str, counts: Decisions) -> Assigner:
        """Return an assigner with the policy of this name. `counts`: as the attribute.

        Raises:
            PluginError: no plugin in use offers the policy.
        """
        if name in {"", LEAST_LOADED}:
            return cls(counts=counts)
        for policy in registry.assignment_policies:
            if policy.name == name:
                return cls(policy, registry.owner("assignment_policies", name), counts)
        policies = ", ".join([LEAST_LOADED, *(policy.name for policy in registry.assignment_policies)])
        raise PluginError(
            f"no plugin in use offers the assignment policy {name!r}; available are {policies}. To install affinity and fair_share, run "
            + install_hint("plugins/strategies")
        )

    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Return the number of the executor for a new session, or a refusal."""
        result = self._decide(request)
        self.counts["refused" if isinstance(result, AssignmentRefusal) else "assigned"][self.policy.name] += 1
        return result

    def _decide(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        try:
            result: object = self.policy.assign(request)  # a plugin may return anything
        except Exception as error:
            return self._fallback(request, f"`assign` raised {error!r}")
        if isinstance(result, AssignmentRefusal):
            return AssignmentRefusal(str(result.reason)[:_REASON_LENGTH], bool(result.retry))
        numbers = [load.number for load in request.executors]
        if isinstance(result, int) and result in numbers:
            return result
        return self._fallback(request, f"`assign` returned {result!r}, which is none of {numbers}")

    def _fallback(self, request: AssignmentRequest, error: str) -> int | AssignmentRefusal:
        self.counts["failed"][self.policy.name] += 1
        facts = {"policy": self.policy.name, "plugin": self.plugin, "error": error}
        _log.warning("an assignment policy failed: the session begins on the least loaded executor", **facts)
        return LeastLoaded().assign(request)
