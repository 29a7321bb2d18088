"""Turns of sessions on a device, in the order of `turn_queue.py`.

The ops of all sessions are issued by one thread, the device thread. A session hands it the steps of a submission and waits for them. On a
CPU, where threads compute alike, the session's own thread takes the steps if nobody else has or wants the device: a hand-over would take
longer than a small submission. Sessions that move values without computing hold the device in their own threads (`with share:`).
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import attrs

from djinn_server.running.issued_turns import IssuedTurns
from djinn_server.running.turn_queue import MOMENT_SECONDS, Account, TurnQueue

IDLE_SECONDS: Final = 5.0  # after which the device thread of a CPU ends
_ENDED: Final = object()
Steps = Iterator[None]  # of a submission; each `None` offers the device to sessions that wait


@attrs.define(eq=False)
class Share(Account):
    """One session's share of a device; as a context manager, one turn.

    Attributes:
        turns: the device's queue.
        began: when its turn began, on the clock `time.perf_counter`.
        steps: what the device thread does for it; None: the session's own thread computes. ended: True once they have ended.
        error: what ended them. context: of the session's thread.
        pending: what another session may do in its own turn in place of the steps, until they begin.
        group: the sessions of which one did the work of all the last time.
        woken: notified when the steps have ended, or the turn of the session's own thread begins.
    """

    turns: FairShare = attrs.field(kw_only=True)
    began: float = 0.0
    steps: Steps | None = None
    ended: bool = False
    error: BaseException | None = None
    context: contextvars.Context | None = None
    pending: object | None = None
    group: Sequence[Share] = ()
    woken: threading.Condition = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.turns.condition(), takes_self=True)
    )

    def run(self, steps: Steps, pending: object | None = None) -> None:
        """Take steps in turns of the device until they end. `pending`: as the attribute."""
        self.turns.run(self, steps, pending)

    def begin_if_free(self) -> bool:
        """Begin a turn that must not keep another session waiting; False if the device is not free."""
        return self.turns.begin_if_free(self)

    def leave(self, seconds: float) -> None:
        """End such a turn, which took `seconds`."""
        self.turns.leave(self, seconds)

    def __enter__(self) -> None:
        self.turns.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turns.leave(self, time.perf_counter() - self.began, returns=True)


class FairShare:
    """The queue of a device, and the thread that issues its ops."""

    def __init__(self, issued: IssuedTurns | None = None, *, moment: float = MOMENT_SECONDS) -> None:
        """`issued`: the turns of an accelerator; None: ops have run when their calls return. `moment`: as in `TurnQueue`."""
        self._issued = issued
        self._queue = TurnQueue(moment)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the device thread
        self._gathered = threading.Condition(self._lock)
        self._gathering = False
        self._thread: threading.Thread | None = None

    def share(self) -> Share:
        """The share of a new session."""
        return Share(turns=self)

    def condition(self) -> threading.Condition:
        """A condition of the queue."""
        return threading.Condition(self._lock)

    @property
    def busy(self) -> bool:
        """True if a session has its turn, or waits for one."""
        return self._queue.running is not None or self._queue.waiting > 0

    @property
    def waiting(self) -> int:
        """Number of sessions that wait."""
        return self._queue.waiting

    @property
    def longest_wait(self) -> float:
        """Seconds that the longest waiting session has waited."""
        with self._lock:
            return self._queue.longest_wait(time.perf_counter())

    def run(self, share: Share, steps: Steps, pending: object | None = None) -> None:
        """As `Share.run`."""
        share.steps, share.pending, share.ended, share.error = steps, pending, False, None
        share.context = contextvars.copy_context()
        try:
            here = self._issued is None and self._start(share)
            if here and self._take(share, steps):
                return
            with self._lock:
                self._wake() if here else self._ask(share)
                while not share.ended:
                    share.woken.wait()
        finally:
            share.steps = None
        _raise_error(share)

    def begin(self, share: Share) -> None:
        """Wait for a turn of the calling thread."""
        if not self._start(share):
            with self._lock:
                self._ask(share)
                while self._queue.running is not share:
                    share.woken.wait()
            share.began = time.perf_counter()

    def begin_if_free(self, share: Share) -> bool:
        """Begin a turn if no session has one or waits for one; False if one does."""
        return not self._queue.waiting and self._start(share)

    def _start(self, share: Share) -> bool:
        with self._lock:
            free = self._queue.start_at_once(share)
        share.began = time.perf_counter()
        return free

    def leave(self, share: Share, seconds: float, *, returns: bool = False) -> None:
        """End a turn that took `seconds`. `returns`: sessions that wait may have to wait for the next one of `share`."""
        with self._lock:
            self._queue.end(share, seconds, time.perf_counter(), returns=returns)
            if self._queue.waiting:
                self._changed.notify()

    def _ask(self, share: Share) -> None:
        self._queue.ask(share, time.perf_counter())
        if self._gathering:
            self._gathered.notify()
        self._wake()

    def _wake(self) -> None:
        """Wake the device thread, or start it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="djinn-device", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _take(self, share: Share, steps: Steps) -> bool:
        """Take steps of a session whose turn it is, as far as the next offer; then end the turn. False if there are more."""
        begun = self._issued.begin() if self._issued is not None else None
        share.pending = None
        ended = True
        try:
            ended = next(steps, _ENDED) is _ENDED
        finally:
            measured = self._issued is not None and self._issued.end(share, begun)
            with self._lock:
                now = time.perf_counter()
                self._queue.end(share, 0.0 if measured else now - share.began, now, again=not ended)
                if self._queue.waiting:
                    self._changed.notify()
        return ended

    def _serve(self) -> None:
        """The device thread."""
        while (share := self._next()) is not None:
            assert share.context is not None
            assert share.steps is not None
            try:
                ended = share.context.run(self._take, share, share.steps)
            except BaseException as error:  # the session's thread raises it
                share.error, ended = error, True
            if ended:
                self._end_steps(share)

    def _next(self) -> Share | None:
        """Wait for a turn of the device thread. Threads of sessions are woken for theirs. None: the thread is to end."""
        while True:
            with self._lock:
                while (patience := self._queue.patience(time.perf_counter())) != 0.0:
                    changed = self._changed.wait(IDLE_SECONDS if patience is None else patience)
                    if not changed and not self.busy and self._issued is None:
                        self._thread = None
                        return None
            settled = self._issued.settle() if self._issued is not None else ()
            with self._lock:
                for account, seconds in settled:
                    self._queue.charge(account, seconds)
                share: Any = self._queue.start(now := time.perf_counter())
                if share is not None and share.steps is None:
                    share.woken.notify()
                elif share is not None:
                    share.began = now
                    return share  # type: ignore[no-any-return]

    def _end_steps(self, share: Share) -> None:
        with self._lock:
            share.ended = True
            share.woken.notify()

    def gather(self, share: Share, wanted: Callable[[object], bool], patience: float, others: range) -> Sequence[Share]:
        """Take waiting sessions whose `pending` is wanted out of the queue. `others`: how many, at least and at most.

        Those of the group of `share` that do not wait for their turns yet are waited for: as long as another one comes within `patience`
        seconds, and four times as long at most.
        """
        with self._lock:
            until = time.perf_counter() + 4 * patience
            while True:
                found = [other for other in self._waiting() if other.pending is not None and wanted(other.pending)]
                if len(found) + 1 >= others.stop or not self._comes(share, min(patience, until - time.perf_counter())):
                    break
            if len(found) < others.start:
                return ()
            joined = found[: others.stop - 1]
            for other in joined:
                self._queue.withdraw(other)
            return joined

    def _waiting(self) -> list[Share]:
        return [account for account in self._queue.accounts() if isinstance(account, Share)]

    def _comes(self, share: Share, patience: float) -> bool:
        """Wait for one of the group of `share` that does not wait for its turn; False if there is none, or none came."""
        if patience <= 0.0 or all(other is share or other.asked is not None for other in share.group):
            return False
        self._gathering, count = True, self._queue.waiting
        try:
            return self._gathered.wait_for(lambda: self._queue.waiting > count, patience)
        finally:
            self._gathering = False

    def release(self, share: Share, joined: Sequence[Share], seconds: float) -> None:
        """Take the steps of sessions whose work `share` has done in `seconds` of its turn. The time is charged to all in equal parts."""
        each = seconds / (len(joined) + 1)
        share.used -= seconds - each
        for other in joined:
            other.used += each
            assert other.context is not None
            assert other.steps is not None
            try:
                other.context.run(_exhaust, other.steps)
            except BaseException as error:
                other.error = error
            self._end_steps(other)


def _raise_error(share: Share) -> None:
    error, share.error = share.error, None  # not kept: it has the frames that it was raised in
    if error is not None:
        raise error


def _exhaust(steps: Steps) -> None:
    for _ in steps:
        pass
