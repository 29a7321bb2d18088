"""Fair-share scheduling of a device among sessions: of those that wait, the one with the least device time runs next.

A turn is one submission: a piece of a program. Turns differ in length, so the share is counted in seconds: a session of short
pieces has several of them for each long one of another session. A session that arrives, or returns, begins level with the one
that is having a turn: unused time is not saved up.

The next piece of a program comes a moment after the last one. So the device waits this moment for a session that has had less
than all that wait, or each of its short pieces would wait for a long one of another session. And a long one is interrupted
between two ops while another session waits (`cancellation.py`).
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
    """One session's part of a device: a context that lasts as long as a turn."""

    turns: FairShare
    used: float = 0.0  # seconds, on the clock of those who compute
    began: float = 0.0
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
    """The queue of a device. `moment`: for how many seconds the device may wait for the next piece of a session."""

    moment: float = MOMENT_SECONDS
    clock: float = 0.0  # what the one who has the turn had used when it began
    _changed: threading.Condition = attrs.field(factory=threading.Condition)
    _taken: bool = False
    _waiting: list[Share] = attrs.field(factory=list)
    _awaited: Share | None = None  # who has just had a turn, and may go on
    _until: float = 0.0  # how long it is awaited

    def share(self) -> Share:
        """For one more session."""
        return Share(self)

    @property
    def waiting(self) -> int:
        """Number of sessions that wait."""
        return len(self._waiting)

    @property
    def longest_wait(self) -> float:
        """For how many seconds the one has waited that has waited longest."""
        with self._changed:
            since = min((share.asked for share in self._waiting), default=0.0)
        return time.perf_counter() - since if since else 0.0

    def begin(self, share: Share) -> None:
        """Wait for a turn."""
        share.asked = time.perf_counter()
        with self._changed:
            share.used = max(share.used, self.clock)
            self._waiting.append(share)
            while (patience := self._patience(share)) != 0.0:
                self._changed.wait(patience)
            self._waiting.remove(share)
            self._taken, self.clock, self._awaited = True, share.used, None

    def end(self, share: Share, seconds: float) -> None:
        """The turn took so long; the next one begins."""
        with self._changed:
            share.used += seconds
            self._taken = False
            if self._waiting:
                self._awaited, self._until = share, time.perf_counter() + self.moment
                self._changed.notify_all()

    def _patience(self, share: Share) -> float | None:
        """Seconds that `share` has to wait: 0 where it may run now; None: until the queue changes."""
        if self._taken or min(self._waiting, key=lambda other: other.used) is not share:
            return None
        awaited = self._awaited
        if awaited is None or awaited is share or awaited.used >= share.used:
            return 0.0
        return max(self._until - time.perf_counter(), 0.0)
