"""Choose the session that uses the device next: the session with the least device time.

This file uses no threads, clocks or devices. A turn runs one submission, or a part of a long one. Shares are measured in
seconds, so a session with short submissions has several turns for each long turn of another session. A session that is
new, or was idle, starts with the device time of the running session, so it cannot save up unused time.

The next submission of a program arrives a moment after the previous one has finished. If that session has used less time
than all waiting sessions, the device waits this moment for it. Otherwise each of its short submissions would wait for a
long one of another session.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Final

import attrs

MOMENT_SECONDS: Final = 0.001  # default of `TurnQueue.moment`


@attrs.define(eq=False)
class Account:
    """Device time of one session.

    Attributes:
        used_seconds: device time of the session, including the start value of a new session.
        waiting_since: time at which the session began to wait for a turn; None while it does not wait.
        entry: number of the session's entry in the queue; -1 without an entry.
    """

    used_seconds: float = 0.0
    waiting_since: float | None = None
    entry: int = -1


@attrs.define(eq=False)
class TurnQueue:
    """Queue of the sessions that wait for one device. The caller passes the time to each method.

    Attributes:
        moment: seconds that the device may wait for the next submission of a session.
        virtual_time: largest `used_seconds` with which a turn has begun.
        running: the session that has the device.
        waiting: number of waiting sessions.
    """

    moment: float = MOMENT_SECONDS
    virtual_time: float = 0.0
    running: Account | None = None
    waiting: int = 0
    _heap: list[tuple[float, int, Account]] = attrs.field(factory=list)  # the newest entry of an account counts
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count)
    _awaited_account: Account | None = None  # the session that has just had a turn, and may continue
    _awaited_until: float = 0.0  # time at which the wait for `_awaited_account` ends

    def enqueue(self, account: Account, now: float) -> None:
        """Queue a session for a turn."""
        account.used_seconds = max(account.used_seconds, self.virtual_time)
        account.waiting_since = now
        self.waiting += 1
        self._push(account)

    def withdraw(self, account: Account) -> None:
        """Remove a session from the queue."""
        account.waiting_since, account.entry = None, -1
        self.waiting -= 1

    def start(self, now: float) -> Account | None:
        """Start the next session's turn, and return its account.

        Return None if the device is busy, or if it should wait for another session (`patience`).
        """
        if self.running is not None or self.patience(now) != 0.0:
            return None
        account = self._first_account()
        assert account is not None
        self.withdraw(account)
        self._begin(account)
        return account

    def start_at_once(self, account: Account) -> bool:
        """Start a turn of a session that did not queue. Return False if the device is busy or another session is next."""
        used_seconds, first, awaited = (
            max(account.used_seconds, self.virtual_time),
            self._first_account(),
            self._awaited_account,
        )
        if self.running is not None or (first is not None and first.used_seconds <= used_seconds):
            return False
        if awaited is not None and awaited is not account and awaited.used_seconds < used_seconds:
            return False
        account.used_seconds = used_seconds
        self._begin(account)
        return True

    def end(self, account: Account, seconds: float, now: float, *, again: bool = False, returns: bool = True) -> None:
        """End a turn.

        Args:
            account: the session that had the device.
            seconds: duration of the turn.
            now: the time.
            again: True to queue the session again.
            returns: True if the session may submit again within `self.moment` seconds. The device then waits for it.
        """
        account.used_seconds += seconds
        self.running = None
        if self.waiting and returns:
            self._awaited_account, self._awaited_until = account, now + self.moment
        if again:
            self.enqueue(account, now)

    def charge(self, account: Account, seconds: float) -> None:
        """Add device time to a session, because it was measured after its turn."""
        account.used_seconds += seconds
        if account.waiting_since is not None:
            self._push(account)

    def patience(self, now: float) -> float | None:
        """Return the seconds until a turn can start without further calls; 0.0 if now.

        Return None if the device is busy or no session waits.
        """
        first = self._first_account()
        if self.running is not None or first is None:
            return None
        awaited = self._awaited_account
        if awaited is None or awaited is first or awaited.used_seconds >= first.used_seconds:
            return 0.0
        return max(self._awaited_until - now, 0.0)

    def longest_wait(self, now: float) -> float:
        """Return the seconds for which the first of the waiting sessions has waited; 0.0 if none waits."""
        return max(
            [now - account.waiting_since for account in self.accounts() if account.waiting_since is not None],
            default=0.0,
        )

    def accounts(self) -> list[Account]:
        """Return the accounts of waiting sessions, the session with the least device time first."""
        return [account for _, number, account in sorted(self._heap) if account.entry == number]

    def _begin(self, account: Account) -> None:
        self.running, self._awaited_account = account, None
        self.virtual_time = max(self.virtual_time, account.used_seconds)

    def _push(self, account: Account) -> None:
        account.entry = next(self._numbers)
        heapq.heappush(self._heap, (account.used_seconds, account.entry, account))

    def _first_account(self) -> Account | None:
        heap = self._heap
        while heap and heap[0][2].entry != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
