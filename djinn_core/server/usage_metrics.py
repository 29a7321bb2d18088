"""Usage metrics of an executor process, and the check of its tenant's quota."""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from djinn_core.errors import QuotaExceeded
from djinn_core.hookspecs.quotas import Quota
from djinn_core.launch.orders import Distribution, Metered
from djinn_core.server.rate_limit import Buckets
from djinn_core.server.usage_quota import UsageQuota
from djinn_core.wire.messages import Timing

# Upper bounds in seconds: a decode step, an ordinary submission, a long one.
BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Holder(Protocol):
    """Something that holds values: a session."""

    def holdings(self) -> tuple[int, int]:
        """Number of live values, and their bytes."""

    def live_values(self) -> int:
        """Number of live values, in constant time."""


class Histogram:
    """A histogram of durations."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """One more time."""
        self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def distribution(self) -> Distribution:
        """The distribution of the durations seen so far."""
        return Distribution(BOUNDS, tuple(self._counts), self._sum)


class UsageMetrics:
    """Counters of the sessions of this process, all of which are one tenant's."""

    def __init__(self) -> None:
        self.quota = Quota()
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._seconds = dict.fromkeys(("queue", "decode", "execute", "encode"), 0.0)
        self._messages: Counter[str] = Counter()
        self._holders: set[Holder] = set()
        self._queued, self._executed = Histogram(), Histogram()
        self._requests = Buckets()
        self.account = UsageQuota()

    def count(self, what: str, amount: int = 1) -> None:
        """Something happened: the name of a counter, as `/metrics` shows it after `djinn_executor_`, without `_total`."""
        with self._lock:
            self._totals[what] += amount

    def message(self, kind: str, nbytes: int) -> None:
        """Count a message with `nbytes` bytes beside it. Waits where the tenant has sent more than it may: who sends is slowed."""
        with self._lock:
            self._messages[kind] += 1
            self._totals["received_bytes"] += nbytes
        if self.quota.requests_a_second:
            wait = self._requests.of("", self.quota.requests_a_second, self.quota.requests_a_second).pace()
            if wait:
                time.sleep(wait)

    def completed(self, timing: Timing, ops: int, failures: int, fetched: Sequence[memoryview]) -> None:
        """A submission was answered."""
        with self._lock:
            self._totals["submissions"] += 1
            self._totals["ops"] += ops
            self._totals["op_failures"] += failures
            self._totals["fetched_tensors"] += len(fetched)
            self._totals["fetched_bytes"] += sum(map(len, fetched))
            for name in self._seconds:
                self._seconds[name] += getattr(timing, name)
            self._queued.add(timing.queue)
            self._executed.add(timing.execute)

    def enter(self, holder: Holder) -> None:
        """A session began."""
        with self._lock:
            self._holders.add(holder)
            self._totals["sessions_started"] += 1

    def leave(self, holder: Holder) -> None:
        """A session ended."""
        with self._lock:
            self._holders.discard(holder)
            self._totals["sessions_ended"] += 1

    def check(self) -> None:
        """Check that the tenant is within its quota.

        Raises:
            QuotaExceeded: it has used up a quota; the message says which, and what to do.
        """
        quota = self.quota
        self.check_values()
        if not quota.seconds_an_hour:
            return
        used, left = self.account.used()
        if used > quota.seconds_an_hour:
            self._refuse(
                f"{used:.0f} s on the device in this hour, of {quota.seconds_an_hour:g} that you may use: there are more in "
                f"{left / 60:.0f} minutes"
            )

    def check_values(self) -> None:
        """Check the tenant's quota of values, which are also created without a submission.

        Raises:
            QuotaExceeded: it has.
        """
        if not self.quota.values:
            return
        with self._lock:
            values = sum(holder.live_values() for holder in self._holders)
        if values > self.quota.values:
            self._refuse(
                f"{values:,} live tensors, of {self.quota.values:,} that you may have at a time: let go of some"
            )

    def may_begin(self, sessions: int) -> str:
        """The reason why a further session may not begin beside `sessions` others; empty: it may."""
        try:
            self.check()
        except QuotaExceeded as error:
            return str(error)
        if self.quota.sessions and sessions >= self.quota.sessions:
            self.count("quota_refusals")
            return f"{sessions} sessions, which is what you may have at a time: end one of them"
        return ""

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len(self._holders)

    def holdings(self) -> tuple[int, int]:
        """Live values of all sessions, and their bytes."""
        with self._lock:
            held = [holder.holdings() for holder in self._holders]
        return sum(values for values, _ in held), sum(nbytes for _, nbytes in held)

    def report(self, others: Mapping[str, int]) -> Metered:
        """All counters and gauges; `others` are gauges that the caller measures."""
        values, memory = self.holdings()
        with self._lock:
            gauges: dict[str, float] = {
                "values": values,
                "memory_bytes": memory,
                "threads": threading.active_count(),
                **others,
            }
            return Metered(
                dict(self._totals) | {"cpu_seconds": time.process_time()} | _times(self._seconds),
                gauges | _process(),
                dict(self._messages),
                {
                    "queue_duration_seconds": self._queued.distribution(),
                    "run_duration_seconds": self._executed.distribution(),
                },
            )

    def _refuse(self, reason: str) -> None:
        self.count("quota_refusals")
        raise QuotaExceeded(reason)


def _times(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_seconds": value for name, value in seconds.items()}


def _process() -> dict[str, int]:
    """The system's figures for this process."""
    import psutil

    process = psutil.Process()
    try:
        return {"resident_memory_bytes": process.memory_info().rss, "open_fds": process.num_fds()}
    except (OSError, psutil.Error):
        return {}
