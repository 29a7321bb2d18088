"""Fair-share scheduling of a device among sessions: the waiting session with the least device time runs next.

A turn is one submission. Turns differ in length, so the share is counted in seconds: a session with short
submissions has several turns for each long one of another session. A session that is new, or was idle, starts with the device time
of the running session: unused time is not saved up.

A session that has its turn may join waiting sessions to it (`gather`): it does their work, too, and they go on without a turn of
their own. The time is charged to all of them in equal parts.

The next submission of a program arrives a moment after the previous one has finished. If that session has had less device time than
all that wait, the device waits this moment for it; otherwise each of its short submissions would wait for a long one of another
session. A long submission is interrupted between two ops while another session waits (`cancellation.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from types import TracebackType
from typing import Final

import attrs

MOMENT_SECONDS: Final = 0.001
_used = attrgetter("used")


@attrs.define(eq=False)
class Share:
    """One session's share of a device; as a context manager, one turn.

    Attributes:
        pending: what it wants its turn for, where another session may do it.
        joined: True while another session does it. served: True from when that is done until the turn ends, which is none of its own then.
        group: the sessions of which one did the work of all the last time.
        woken: notified where it may be its turn; no other session's thread is woken for that.
    """

    turns: FairShare
    used: float = 0.0  # device seconds, including a new session's start value
    began: float = 0.0  # when its turn began, on the clock `time.perf_counter`
    asked: float = 0.0  # when it began to wait
    pending: object | None = None
    joined: bool = False
    served: bool = False
    group: Sequence[Share] = ()
    woken: threading.Condition = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.turns.condition(), takes_self=True)
    )

    def __enter__(self) -> None:
        self.turns.begin(self, time.perf_counter())

    def begin_if_free(self) -> bool:
        """Begin a turn that must not keep another session waiting; False if the device is not free."""
        free = self.turns.begin_if_free(self)
        self.began = time.perf_counter()
        return free

    def leave(self, seconds: float) -> None:
        """End such a turn, which took `seconds`."""
        self.turns.leave(self, seconds)

    def rest(self) -> float:
        """Yield in the middle of a turn to waiting sessions that have had less; returns the seconds that this took."""
        now = time.perf_counter()
        self.turns.end(self, now)
        self.turns.begin(self, now)
        return self.began - now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turns.end(self, time.perf_counter())


@attrs.define(eq=False)
class FairShare:
    """The queue of a device. `moment`: seconds that the device may wait for the next submission of a session."""

    moment: float = MOMENT_SECONDS
    clock: float = 0.0  # device seconds of the running session when its turn began
    _lock: threading.RLock = attrs.field(factory=threading.RLock)
    _gathered: threading.Condition = attrs.field(
        init=False, default=attrs.Factory(lambda self: threading.Condition(self._lock), takes_self=True)
    )
    _taken: bool = False
    _waiting: list[Share] = attrs.field(factory=list)
    _awaited: Share | None = None  # the session that has just had a turn, and may continue
    _until: float = 0.0  # when the wait for it ends
    _gathering: bool = False

    def share(self) -> Share:
        """The share of a new session."""
        return Share(self)

    def condition(self) -> threading.Condition:
        """A condition of the queue."""
        return threading.Condition(self._lock)

    @property
    def busy(self) -> bool:
        """True if a session has its turn, or waits for one."""
        return self._taken or bool(self._waiting)

    @property
    def waiting(self) -> int:
        """Number of sessions that wait."""
        return len(self._waiting)

    @property
    def longest_wait(self) -> float:
        """Seconds that the longest waiting session has waited."""
        with self._lock:
            since = min((share.asked for share in self._waiting), default=0.0)
        return time.perf_counter() - since if since else 0.0

    def begin(self, share: Share, now: float) -> None:
        """Wait from `now` on for a turn, by the clock `time.perf_counter`."""
        with self._lock:
            awaited = self._awaited
            free = not self._taken and not self._waiting
            free = free and (awaited is None or awaited is share or awaited.used >= share.used)
            if free:
                self.clock = max(self.clock, share.used)
                share.used, self._taken, self._awaited = self.clock, True, None
        if not free:
            share.asked = now
            self._wait(share)
            now = time.perf_counter()
        share.pending = None  # what it waits for in the middle of its turn is not to be done again
        share.began = now

    def _wait(self, share: Share) -> None:
        with self._lock:
            share.used = max(share.used, self.clock)
            self._waiting.append(share)
            if self._gathering:
                self._gathered.notify()
            while not share.served and (patience := self._patience(share)) != 0.0:
                share.woken.wait(patience)
            if share.served:
                return
            self._waiting.remove(share)
            self._taken, self.clock, self._awaited = True, share.used, None

    def begin_if_free(self, share: Share) -> bool:
        """Begin a turn if no session has one, waits for one, or is to continue; False if one does."""
        with self._lock:
            if self._taken or self._waiting or (self._awaited is not None and self._awaited is not share):
                return False
            self.clock = max(self.clock, share.used)
            share.used, self._taken, self._awaited = self.clock, True, None
            return True

    def leave(self, share: Share, seconds: float) -> None:
        """End a turn that took `seconds`; sessions that wait need not wait for the next one of `share`."""
        with self._lock:
            share.used += seconds
            self._taken = False
            if self._waiting:
                self._first().woken.notify()

    def gather(self, share: Share, wanted: Callable[[object], bool], patience: float, others: range) -> Sequence[Share]:
        """Join waiting sessions whose `pending` is wanted to the turn of `share`. `others`: how many, at least and at most.

        Those of its group that do not wait for their turns yet are waited for: as long as another one comes within `patience` seconds, and
        four times as long at most.
        """
        with self._lock:
            until = time.perf_counter() + 4 * patience
            while True:
                found = [other for other in self._waiting if other.pending is not None and wanted(other.pending)]
                if len(found) + 1 >= others.stop or not self._comes(share, min(patience, until - time.perf_counter())):
                    break
            if len(found) < others.start:
                return ()
            joined = found[: others.stop - 1]
            for other in joined:
                other.joined = True
                self._waiting.remove(other)
            return joined

    def _comes(self, share: Share, patience: float) -> bool:
        """Wait for one of the group of `share` that does not wait for its turn; False if there is none, or none came."""
        waiting = set(map(id, self._waiting))
        if patience <= 0.0 or all(other is share or id(other) in waiting for other in share.group):
            return False
        self._gathering, count = True, len(waiting)
        try:
            return self._gathered.wait_for(lambda: len(self._waiting) > count, patience)
        finally:
            self._gathering = False

    def release(self, share: Share, joined: Collection[Share], seconds: float) -> None:
        """Let joined sessions go on, after `share` has done their work in `seconds` of its turn."""
        each = seconds / (len(joined) + 1)
        with self._lock:
            share.began += seconds - each
            for other in joined:
                other.joined, other.served = False, True
                other.used += each
                other.woken.notify()

    def end(self, share: Share, now: float) -> None:
        """End a turn at `now` on the clock `time.perf_counter`; the next one begins."""
        if share.served:  # it had none of its own
            share.served = False
            return
        with self._lock:
            share.used += now - share.began
            self._taken = False
            if self._waiting:
                self._awaited, self._until = share, time.perf_counter() + self.moment
                self._first().woken.notify()

    def _first(self) -> Share:
        """The waiting session that has had least."""
        return min(self._waiting, key=_used)

    def _patience(self, share: Share) -> float | None:
        """Seconds that `share` has to wait: 0 if it may run now; None: until the queue changes."""
        if self._taken or share.joined or self._first() is not share:
            return None
        awaited = self._awaited
        if awaited is None or awaited is share or awaited.used >= share.used:
            return 0.0
        return max(self._until - time.perf_counter(), 0.0)
