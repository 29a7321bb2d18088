"""Fair-share scheduling of a device among sessions: the waiting session with the least device time runs next.

A turn is one submission: a piece of a program. Turns differ in length, so the share is counted in seconds: a session with short
submissions has several turns for each long one of another session. A session that is new, or was idle, starts with the device time
of the running session: unused time is not saved up.

The next submission of a program arrives a moment after the previous one has finished. If that session has had less device time than
all that wait, the device waits this moment for it; otherwise each of its short submissions would wait for a long one of another
session. A long submission is interrupted between two ops while another session waits (`cancellation.py`).
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

import attrs

MOMENT_SECONDS: Final = 0.001


@attrs.define(eq=False)
class Share:
    """One session's share of a device; as a context manager, one turn."""

    turns: FairShare
    used: float = 0.0  # device seconds, including a new session's start value
    began: float = 0.0  # when its turn began, on the clock `time.perf_counter`
    asked: float = 0.0  # when it began to wait

    def __enter__(self) -> None:
        self.turns.begin(self)
        self.began = time.perf_counter()

    def rest(self) -> float:
        """Yield in the middle of a turn to waiting sessions that have had less; returns the seconds that this took."""
        now = time.perf_counter()
        self.turns.end(self, now - self.began)
        self.turns.begin(self)
        self.began = time.perf_counter()
        return self.began - now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turns.end(self, time.perf_counter() - self.began)


@attrs.define(eq=False)
class FairShare:
    """The queue of a device. `moment`: seconds that the device may wait for the next submission of a session."""

    moment: float = MOMENT_SECONDS
    clock: float = 0.0  # device seconds of the running session when its turn began
    _lock: threading.RLock = attrs.field(factory=threading.RLock)
    _changed: threading.Condition = attrs.field(
        init=False, default=attrs.Factory(lambda self: threading.Condition(self._lock), takes_self=True)
    )
    _taken: bool = False
    _waiting: list[Share] = attrs.field(factory=list)
    _awaited: Share | None = None  # the session that has just had a turn, and may continue
    _until: float = 0.0  # when the wait for it ends

    def share(self) -> Share:
        """The share of a new session."""
        return Share(self)

    @property
    def waiting(self) -> int:
        """Number of sessions that wait."""
        return len(self._waiting)

    @property
    def longest_wait(self) -> float:
        """Seconds that the longest waiting session has waited."""
        with self._changed:
            since = min((share.asked for share in self._waiting), default=0.0)
        return time.perf_counter() - since if since else 0.0

    def begin(self, share: Share) -> None:
        """Wait for a turn."""
        with self._lock:
            awaited = self._awaited
            free = not self._taken and not self._waiting
            if free and (awaited is None or awaited is share or awaited.used >= share.used):
                self.clock = max(self.clock, share.used)
                share.used, self._taken, self._awaited = self.clock, True, None
                return
        share.asked = time.perf_counter()
        with self._changed:
            share.used = max(share.used, self.clock)
            self._waiting.append(share)
            while (patience := self._patience(share)) != 0.0:
                self._changed.wait(patience)
            self._waiting.remove(share)
            self._taken, self.clock, self._awaited = True, share.used, None

    def end(self, share: Share, seconds: float) -> None:
        """End a turn that took `seconds`; the next one begins."""
        with self._lock:
            share.used += seconds
            self._taken = False
            if self._waiting:
                self._awaited, self._until = share, time.perf_counter() + self.moment
                self._changed.notify_all()

    def _patience(self, share: Share) -> float | None:
        """Seconds that `share` has to wait: 0 if it may run now; None: until the queue changes."""
        if self._taken or min(self._waiting, key=lambda other: other.used) is not share:
            return None
        awaited = self._awaited
        if awaited is None or awaited is share or awaited.used >= share.used:
            return 0.0
        return max(self._until - time.perf_counter(), 0.0)
