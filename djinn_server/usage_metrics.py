"""Usage metrics of an executor process, and checks of its tenant's quota."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from djinn_core.errors import QuotaExceeded
from djinn_core.ir.profile import ExecutionPhase
from djinn_core.wire.executor_reports import Distribution, ExecutorMetrics, LabelledValue
from djinn_core.wire.frames import Buffer
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Timing
from djinn_server.histogram import Histogram
from djinn_server.hookspecs.quotas import Quota
from djinn_server.rate_limit import Buckets
from djinn_server.request_times import NAMES, ModelNames, ModelTimes, include_models
from djinn_server.session_metrics import EVERY_SESSION, MeteredSession, SessionGauges
from djinn_server.usage_quota import UsageQuota

if TYPE_CHECKING:
    import psutil

# Labels of failures by the names of their errors. Other names have the label `_OTHER`.
_CAUSES: Final = MappingProxyType({
    "OutOfMemoryError": "memory",
    "MemoryError": "memory",
    "UnsupportedOperation": "unsupported",
    "NotImplementedError": "unsupported",
    "ProgramStopped": "stopped",
})  # fmt: skip
_OTHER: Final = "other"
ANSWERED_LIMIT: Final = 1024  # answered submissions after which counters are updated
_PHASES: Final = frozenset(phase.value for phase in ExecutionPhase)


@attrs.frozen
class Holdings:
    """Number and bytes of all sessions' values at one moment, collected once for several metrics."""

    _of: Mapping[int, tuple[int, Mapping[int, int]]]  # by identity of a session: values, and bytes by address

    def of(self, session: object) -> tuple[int, int]:
        """Return the number and the bytes of a session's values."""
        values, sizes = self._of.get(id(session), _NOTHING)
        return values, sum(sizes.values())

    @property
    def total(self) -> tuple[int, int]:
        """Return the number and the bytes of all sessions' values. Shared memory counts once."""
        memory: dict[int, int] = {}
        for _, sizes in self._of.values():
            memory.update(sizes)
        return sum(values for values, _ in self._of.values()), sum(memory.values())

    @functools.cached_property
    def _holders(self) -> Counter[int]:
        """Return how many sessions use each memory address."""
        return Counter(address for _, sizes in self._of.values() for address in sizes)

    def shared(self, session: object) -> int:
        """Return the bytes of a session's values that other sessions share."""
        if len(self._of) < 2:
            return 0
        sizes, holders = self._of.get(id(session), _NOTHING)[1], self._holders
        return sum(nbytes for address, nbytes in sizes.items() if holders[address] > 1)


_NOTHING: Final[tuple[int, Mapping[int, int]]] = 0, MappingProxyType({})


class UsageMetrics:
    """Counters of the sessions of this process, which all belong to one tenant.

    Attributes:
        model_names: labels of models. A model gets its label at its first request.
    """

    def __init__(self) -> None:
        self.quota = Quota()
        self.model_names = ModelNames()
        self._lock = threading.Lock()
        self._totals: dict[str, float] = defaultdict(int)
        self._seconds = dict.fromkeys(("queue", "decode", "encode"), 0.0)
        self._messages: Counter[str] = Counter()
        self._labelled: Counter[tuple[str, str]] = Counter()
        self._labelled.update(dict.fromkeys([("op_failures", cause) for cause in (*_CAUSES.values(), _OTHER)], 0))
        self._holders: set[MeteredSession] = set()
        self._queued, self._executed = Histogram(), Histogram()
        self._answered: deque[tuple[Timing, tuple[int, int], tuple[int, ...]]] = deque()  # and not counted yet
        self._requests = Buckets()
        self._served: dict[str, ModelTimes] = {}  # by model, of sessions that have ended
        self._process: psutil.Process | None = None
        self.account = UsageQuota()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter. `name`: its name in `/metrics` after `djinn_executor_`, without `_total`."""
        with self._lock:
            self._totals[name] += amount

    def count_as(self, name: str, label: str) -> None:
        """Add 1 to a counter with a label. `label`: from a small, fixed set, because each label is a time series."""
        with self._lock:
            self._labelled[name, label] += 1

    def charge(self, seconds: float) -> None:
        """Charge the tenant for `seconds` of device time."""
        self.account.charge(seconds)

    def count_message(self, kind: str, nbytes: int) -> None:
        """Count a message with a body of `nbytes` bytes. Sleep if the tenant exceeds its message rate."""
        with self._lock:
            self._messages[kind] += 1
            self._totals["received_bytes"] += nbytes
        self.pace()

    def count_refused(self) -> None:
        """Count a refused submission, without a check of the message rate."""
        with self._lock:
            self._messages["Submit"] += 1

    def pace(self) -> None:
        """Sleep if the tenant exceeds its message rate, so that its clients slow down."""
        if self.quota.requests_a_second:
            wait = self._requests.of("", self.quota.requests_a_second, self.quota.requests_a_second).pace()
            if wait:
                time.sleep(wait)

    def completed(
        self, timing: Timing, ops: tuple[int, int], failures: Sequence[Failure], fetched: Sequence[Buffer]
    ) -> None:
        """Count an answered submission. Counters are updated for several submissions at once.

        `ops`: numbers of all ops, and of ops that the native library ran. `fetched`: bodies of the reply.
        """
        self._answered.append((timing, ops, tuple(map(len, fetched))))
        if failures:
            with self._lock:
                self._labelled.update(("op_failures", _CAUSES.get(failure.kind, _OTHER)) for failure in failures)
        if len(self._answered) >= ANSWERED_LIMIT:
            with self._lock:
                self._count_answered()

    def _count_answered(self) -> None:
        """Update the counters from answered submissions. The caller holds the lock."""
        submissions = [self._answered.popleft() for _ in range(len(self._answered))]
        if not submissions:
            return
        timings, ops, fetched_sizes = zip(*submissions, strict=True)
        self._messages["Submit"] += len(submissions)
        totals = self._totals
        totals["submissions"] += len(submissions)
        for name, amounts in zip(("ops", "native_ops"), zip(*ops, strict=True), strict=True):
            totals[name] += sum(amounts)
        totals["fetched_tensors"] += sum(map(len, fetched_sizes))
        totals["fetched_bytes"] += sum(map(sum, fetched_sizes))
        for name in self._seconds:
            self._seconds[name] += sum(map(attrgetter(name), timings))
        self._queued.add(timing.queue for timing in timings)
        self._executed.add(timing.execute for timing in timings)

    def enter(self, holder: MeteredSession) -> None:
        """Register a new session."""
        with self._lock:
            self._holders.add(holder)
            self._totals["sessions_started"] += 1

    def leave(self, holder: MeteredSession) -> None:
        """Remove an ended session, and add its counters to the totals."""
        with self._lock:
            self._holders.discard(holder)
            self._totals["sessions_ended"] += 1
            _add(self._totals, holder.counters())
            include_models(self._served, holder.request_times())

    def models(self) -> dict[str, ModelTimes]:
        """Return the durations of requests by model, of live and ended sessions."""
        totals: dict[str, ModelTimes] = {}
        with self._lock:
            for times in (self._served, *[holder.request_times() for holder in self._holders]):
                include_models(totals, times)
        return totals

    def check(self) -> None:
        """Check that the tenant is within its quota.

        Raises:
            QuotaExceeded: a quota is exhausted. The message names the quota and a remedy.
        """
        quota = self.quota
        self.check_values()
        if not quota.seconds_an_hour:
            return
        used_seconds, seconds_left = self.account.used()
        if used_seconds > quota.seconds_an_hour:
            self._refuse(
                f"you have used {used_seconds:.0f} s of device time in this hour; your quota is {quota.seconds_an_hour:g} s. The next hour begins in "
                f"{seconds_left / 60:.0f} minutes"
            )

    def check_values(self) -> None:
        """Check the tenant's quota of values. Uploads and reads create values without a submission.

        Raises:
            QuotaExceeded: the tenant has too many values.
        """
        if not self.quota.values:
            return
        with self._lock:
            holders = tuple(self._holders)
        values = sum(holder.live_values() for holder in holders)
        if values > self.quota.values:
            self._refuse(f"you have {values:,} live tensors; your quota is {self.quota.values:,}: free some of them")

    def may_begin(self, sessions: int) -> str:
        """Return the reason why the tenant may not begin a session, or "" if it may. `sessions`: number of its sessions."""
        try:
            self.check()
        except QuotaExceeded as error:
            return str(error)
        if self.quota.sessions and sessions >= self.quota.sessions:
            self.count("quota_refusals")
            return f"you have {sessions} sessions, and your quota allows no more: end one of them"
        return ""

    def holdings(self) -> Holdings:
        """Return the number and bytes of all sessions' values."""
        with self._lock:
            holders = tuple(self._holders)
        # Without the lock, because a walk over all values takes time.
        return Holdings({id(holder): holder.holdings() for holder in holders})

    def report(self, holdings: Holdings) -> ExecutorMetrics:
        """Return the metrics of all sessions. Counters include ended sessions. `holdings`: present values."""
        values, memory = holdings.total
        with self._lock:
            self._count_answered()
            totals = defaultdict(int, self._totals)
            for holder in self._holders:
                _add(totals, holder.counters())
            counters = dict(totals) | {"cpu_seconds": time.process_time()} | _times(self._seconds)
            labelled = {("messages", kind): n for kind, n in self._messages.items()}
            labelled.update(self._labelled.items())
            distributions: dict[str, tuple[Distribution, ...]] = {
                "queue_duration_seconds": (self._queued.distribution(),),
                "run_duration_seconds": (self._executed.distribution(),),
            }
            holders = tuple(self._holders)
        by_model = [times.distributions(model) for model, times in self.models().items()]
        distributions |= {name: tuple([by_name[name] for by_name in by_model]) for name in NAMES}
        gauges = [holder.gauges() for holder in holders]
        amounts: dict[str, float] = dict.fromkeys(EVERY_SESSION, 0)
        amounts |= {"values": values, "memory_bytes": memory, "threads": threading.active_count()}
        for by_name in gauges:
            _add(amounts, by_name.amounts)
        every = counters | amounts | self._figures_of_process()
        return ExecutorMetrics(every, _by_name(labelled) | _by_phase_and_kind(gauges), distributions)

    def _figures_of_process(self) -> dict[str, int]:
        """Return the operating system's figures for this process."""
        import psutil

        try:
            process = self._process = self._process or psutil.Process()
            return {"resident_memory_bytes": process.memory_info().rss, "open_fds": process.num_fds()}
        except (OSError, psutil.Error):
            return {}

    def _refuse(self, reason: str) -> None:
        self.count("quota_refusals")
        raise QuotaExceeded(reason)


def _add(totals: dict[str, float], increments: Mapping[str, float]) -> None:
    for name, value in increments.items():
        totals[name] = totals.get(name, 0) + value


def _by_name(counted: Mapping[tuple[str, str], float]) -> dict[str, tuple[LabelledValue, ...]]:
    labelled: dict[str, list[LabelledValue]] = {}
    for (name, label), number in sorted(counted.items()):
        labelled.setdefault(name, []).append(LabelledValue((label,), number))
    return {name: tuple(values) for name, values in labelled.items()}


def _by_phase_and_kind(measured: Iterable[SessionGauges]) -> dict[str, tuple[LabelledValue, ...]]:
    """Return the number of sessions by phase, and the bytes of values by kind. Unknown phases count as `unknown`."""
    phases: Counter[str] = Counter()
    bytes_by_kind: Counter[str] = Counter()
    for gauges in measured:
        phases[gauges.phase if gauges.phase in _PHASES else ExecutionPhase.UNKNOWN.value] += 1
        bytes_by_kind.update(gauges.value_bytes)
    return _by_name(
        {("phase_sessions", phase): number for phase, number in phases.items()}
        | {("value_bytes", kind): nbytes for kind, nbytes in bytes_by_kind.items()}
    )


def _times(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_seconds": value for name, value in seconds.items()}
