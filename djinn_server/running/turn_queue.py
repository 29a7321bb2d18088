"""Choose the session that uses the device next: the one with the least device time. Without threads, clocks or devices.

A turn runs one submission, or a part of a long one. Shares are measured in seconds, so a session with short submissions
has several turns for each long turn of another session. A session that is new, or was idle, starts with the device time
of the running session, so it cannot save up unused time.

The next submission of a program arrives a moment after the previous one has finished. If that session has used less time
than all waiting sessions, the device waits this moment for it. Otherwise each of its short submissions would wait for a
long one of another session.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Final

import attrs

MOMENT_SECONDS: Final = 0.001


@attrs.define(eq=False)
class Account:
    """Device time of one session.

    Attributes:
        used: seconds, including the start value of a new session.
        asked: time at which the session began to wait for a turn; None while it does not wait.
        entry: number of the session's entry in the queue.
    """

    used: float = 0.0
    asked: float | None = None
    entry: int = -1


@attrs.define(eq=False)
class TurnQueue:
    """Queue of the sessions that wait for one device. The caller passes the time to each method.

    Attributes:
        moment: seconds that the device may wait for the next submission of a session.
        clock: seconds that the running session had used when its turn began.
        running: the session that has the device.
        waiting: number of waiting sessions.
    """

    moment: float = MOMENT_SECONDS
    clock: float = 0.0
    running: Account | None = None
    waiting: int = 0
    _heap: list[tuple[float, int, Account]] = attrs.field(factory=list)  # the newest entry of an account counts
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count)
    _awaited: Account | None = None  # the session that has just had a turn, and may continue
    _until: float = 0.0  # when the wait for it ends

    def ask(self, account: Account, now: float) -> None:
        """Queue a session for a turn."""
        account.used = max(account.used, self.clock)
        account.asked = now
        self.waiting += 1
        self._push(account)

    def withdraw(self, account: Account) -> None:
        """Remove a session from the queue."""
        account.asked, account.entry = None, -1
        self.waiting -= 1

    def start(self, now: float) -> Account | None:
        """Start the next session's turn, and return its account.

        Return None if the device is busy, or if it should wait for another session (`patience`).
        """
        if self.running is not None or self.patience(now) != 0.0:
            return None
        account = self._first()
        assert account is not None
        self.withdraw(account)
        self._begin(account)
        return account

    def start_at_once(self, account: Account) -> bool:
        """Start a turn of a session that did not queue. Return False if the device is busy or another session is next."""
        used, first, awaited = max(account.used, self.clock), self._first(), self._awaited
        if self.running is not None or (first is not None and first.used <= used):
            return False
        if awaited is not None and awaited is not account and awaited.used < used:
            return False
        account.used = used
        self._begin(account)
        return True

    def end(self, account: Account, seconds: float, now: float, *, again: bool = False, returns: bool = True) -> None:
        """End a turn that took `seconds`.

        `again`: True to queue the session again. `returns`: True if its next submission may arrive in a moment.
        """
        account.used += seconds
        self.running = None
        if self.waiting and returns:
            self._awaited, self._until = account, now + self.moment
        if again:
            self.ask(account, now)

    def charge(self, account: Account, seconds: float) -> None:
        """Add device time to a session, because it was measured after its turn."""
        account.used += seconds
        if account.asked is not None:
            self._push(account)

    def patience(self, now: float) -> float | None:
        """Return the seconds until a turn can start if nothing happens; 0: now; None: never."""
        first = self._first()
        if self.running is not None or first is None:
            return None
        awaited = self._awaited
        if awaited is None or awaited is first or awaited.used >= first.used:
            return 0.0
        return max(self._until - now, 0.0)

    def longest_wait(self, now: float) -> float:
        """Return the seconds that the longest waiting session has waited."""
        return max([now - account.asked for account in self.accounts() if account.asked is not None], default=0.0)

    def accounts(self) -> list[Account]:
        """Return the accounts of waiting sessions, the session with the least device time first."""
        return [account for _, number, account in sorted(self._heap) if account.entry == number]

    def _begin(self, account: Account) -> None:
        self.running, self._awaited = account, None
        self.clock = max(self.clock, account.used)

    def _push(self, account: Account) -> None:
        account.entry = next(self._numbers)
        heapq.heappush(self._heap, (account.used, account.entry, account))

    def _first(self) -> Account | None:
        heap = self._heap
        while heap and heap[0][2].entry != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
