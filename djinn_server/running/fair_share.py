"""Let sessions use a device in turns, in the order of `turn_queue.py`.

One thread, the device thread, issues the ops of all sessions. A session passes the steps of a submission to it and
waits. On a CPU, the session's own thread runs the steps if no other session uses or wants the device, because passing
them takes longer than a small submission. Sessions that only move values use the device in their own threads
(`with share:`).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import attrs

from djinn_server.running.issued_turns import IssuedTurns
from djinn_server.running.turn_queue import MOMENT_SECONDS, Account, TurnQueue

BRIEF_WAIT_SECONDS: Final = 0.005  # for which a thread waits for a turn without `Share.before_wait`
IDLE_SECONDS: Final = 5.0  # after which the device thread of a CPU ends
_ENDED: Final = object()
Steps = Iterator[None]  # of a submission; each `None` yields the device to waiting sessions


@attrs.define(eq=False)
class Share(Account):
    """One session's share of a device. Used as a context manager, it is one turn on the device.

    Attributes:
        turns: the queue of the device.
        charge: called with used device seconds.
        before_wait: called before a thread waits long for a turn.
        is_brief: True if the session's turns are short.
        seconds: device time that `FairShare.take_seconds` has not returned yet.
        began: time (`time.perf_counter`) at which the current turn began.
        begun: event before the turn's ops; None on a CPU.
        reached: event after the ops of the last turn.
        steps: steps that the device thread runs; None: the session's own thread computes.
        ended: True after the steps have ended.
        error: exception that ended the steps.
        context: context variables of the session's thread.
        pending: work that another session may do in its own turn, until the steps begin.
        joined: sessions whose work this session does in its turn. The turn is charged to all in equal parts.
        released: True after the joined work is done.
        group: sessions of the last joint turn.
        woken: notified when the steps have ended, or when a turn of the session's own thread begins.
    """

    turns: FairShare = attrs.field(kw_only=True)
    charge: Callable[[float], None] | None = None
    before_wait: Callable[[], None] = lambda: None
    is_brief: bool = False
    seconds: float = 0.0
    began: float = 0.0
    begun: Any = None
    reached: Any = None
    steps: Steps | None = None
    ended: bool = False
    error: BaseException | None = None
    context: contextvars.Context | None = None
    pending: object | None = None
    joined: Sequence[Share] = ()
    released: bool = False
    group: Sequence[Share] = ()
    woken: threading.Condition = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.turns.condition(), takes_self=True)
    )

    def __enter__(self) -> None:
        self.turns.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turns.leave(self)


class FairShare:
    """Queue of sessions for a device, and the thread that issues the device's ops."""

    def __init__(
        self,
        issued: IssuedTurns[Share] | None = None,
        *,
        moment: float = MOMENT_SECONDS,
        simulated: Callable[[], float] | None = None,
    ) -> None:
        """Create the queue of a device.

        Args:
            issued: turns that an accelerator has not completed; None: ops are complete when their calls return.
            moment: as in `TurnQueue`.
            simulated: returns the seconds of a turn on a device with simulated time.
        """
        self._issued, self._simulated = issued, simulated
        self._used = self._reported = 0.0
        self._queue = TurnQueue(moment)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the device thread
        self._gathered = threading.Condition(self._lock)
        self._gathering = False
        self._thread: threading.Thread | None = None

    def share(
        self, charge: Callable[[float], None] | None = None, before_wait: Callable[[], None] = lambda: None
    ) -> Share:
        """Return a share of the device for a new session. The parameters are explained at `Share`."""
        return Share(turns=self, charge=charge, before_wait=before_wait)

    def device_seconds(self) -> float:
        """Device seconds of all sessions so far, including the running turn."""
        self.settle()
        with self._lock:
            self._reported = max(self._reported, self._used + self._running_seconds())
            return self._reported

    def running_seconds(self) -> float:
        """Return the seconds since the current turn began on the device; 0.0 without a turn."""
        self.settle()
        with self._lock:
            return self._running_seconds()

    def _running_seconds(self) -> float:
        if self._simulated is not None:
            return 0.0
        since = self._issued.running_since() if self._issued is not None else None
        running: Any = self._queue.running
        if since is None and running is None:
            return 0.0
        return max(time.perf_counter() - (running.began if since is None else since), 0.0)

    def take_seconds(self, share: Share) -> float:
        """Return the device seconds of `share` since the last call. On a CPU, all past turns are included."""
        self.settle()
        with self._lock:
            seconds, share.seconds = share.seconds, 0.0
        return seconds

    def settle(self) -> None:
        """Charge the turns that an accelerator has completed."""
        if self._issued is not None:
            for shares, seconds in self._issued.settle():
                with self._lock:
                    self._charge(shares, seconds)
                _tell(shares, seconds)

    def _charge(self, shares: Sequence[Share], seconds: float) -> None:
        self._used += seconds
        for share in shares:
            self._queue.charge(share, seconds / len(shares))
            share.seconds += seconds / len(shares)

    def condition(self) -> threading.Condition:
        """Return a new condition variable with the queue's lock."""
        return threading.Condition(self._lock)

    @property
    def busy(self) -> bool:
        """True if a session has a turn or waits for one."""
        return self._queue.running is not None or self._queue.waiting > 0

    @property
    def waiting(self) -> int:
        """Number of sessions that wait."""
        return self._queue.waiting

    @property
    def longest_wait(self) -> float:
        """Return the seconds that the longest waiting session has waited."""
        with self._lock:
            return self._queue.longest_wait(time.perf_counter())

    def run(self, share: Share, steps: Steps, pending: object | None = None) -> None:
        """Run steps in turns on the device until they end. `pending`: as in `Share`."""
        share.steps, share.pending, share.ended, share.error = steps, pending, False, None
        share.context = contextvars.copy_context()
        try:
            runs_here = self._issued is None and self._start(share)
            if runs_here and self._take(share, steps):
                return
            running: Any = self._queue.running
            is_brief = share.is_brief and (running is None or running.is_brief)
            with self._lock:
                self._wake() if runs_here else self._ask(share)
                ended = is_brief and share.woken.wait_for(lambda: share.ended, BRIEF_WAIT_SECONDS)
            if not ended:  # sessions that have used less come first
                share.before_wait()
                with self._lock:
                    share.woken.wait_for(lambda: share.ended)
        finally:
            share.steps = None
        _raise_error(share)

    def begin(self, share: Share) -> None:
        """Wait for a turn in the calling thread."""
        if not self._start(share):
            share.before_wait()
            with self._lock:
                self._ask(share)
                while self._queue.running is not share:
                    share.woken.wait()
            self._begin(share)

    def begin_if_free(self, share: Share) -> bool:
        """Begin a turn if the device is free and no session waits. Return False otherwise."""
        return not self._queue.waiting and self._start(share)

    def _start(self, share: Share) -> bool:
        with self._lock:
            if free := self._queue.start_at_once(share):
                share.began = time.perf_counter()
        if free:
            self._begin(share)
        return free

    def _begin(self, share: Share) -> None:
        if self._issued is not None:
            share.begun = self._issued.begin()

    def leave(self, share: Share, *, again: bool = False, returns: bool = True) -> None:
        """End a turn. `again`: True to queue for another turn. `returns`: as in `TurnQueue.end`."""
        shares = (share, *share.joined)
        if self._issued is not None:
            share.reached = self._issued.end(shares, share.begun, share.began)
        with self._lock:
            now = time.perf_counter()
            if share.reached is not None:
                seconds = 0.0  # `settle` charges them
            else:
                seconds = now - share.began if self._simulated is None else self._simulated()
                self._charge(shares, seconds)
            self._queue.end(share, 0.0, now, again=again, returns=returns)
            if self._queue.waiting:
                self._changed.notify()
        if share.reached is None:
            _tell(shares, seconds)

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
        """Run steps of the session that has the device until they yield, then end the turn.

        Return False if steps remain.
        """
        share.pending = None
        ended = True
        try:
            ended = next(steps, _ENDED) is _ENDED
        finally:
            self.leave(share, again=not ended)
            if share.released:
                joined, share.joined, share.released = share.joined, (), False
                for member in joined:
                    self._end_steps(member)
        return ended

    def _serve(self) -> None:
        """Run the device thread."""
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
        """Wait for the next turn of the device thread. Wake the threads of other sessions for their turns.

        Return None if the thread must end.
        """
        while True:
            with self._lock:
                while (patience := self._queue.patience(time.perf_counter())) != 0.0:
                    changed = self._changed.wait(IDLE_SECONDS if patience is None else patience)
                    if not changed and not self.busy and self._issued is None:
                        self._thread = None
                        return None
            self._keep_up()
            with self._lock:
                share: Any = self._queue.start(now := time.perf_counter())
                if share is not None:
                    share.began = now
                    if share.steps is None:
                        share.woken.notify()
                        share = None
            if share is not None:
                self._begin(share)
                return share  # type: ignore[no-any-return]

    def _keep_up(self) -> None:
        """Wait for accelerator turns that were issued too long ago, and charge completed turns."""
        if self._issued is not None:
            with contextlib.suppress(RuntimeError):  # the session's own calls report the error
                while (late := self._issued.late()) is not None:
                    late.synchronize()
                    self.settle()
            self.settle()

    def _end_steps(self, share: Share) -> None:
        with self._lock:
            share.ended = True
            share.woken.notify()

    def gather(self, share: Share, wanted: Callable[[object], bool], patience: float, others: range) -> Sequence[Share]:
        """Let waiting sessions join a turn of `share`. Return the sessions that joined.

        The call also waits for sessions of the last joint turn that have not queued yet: until none arrives within `patience`
        seconds, and at most `4 * patience`.

        Args:
            share: the session that has the device.
            wanted: returns True if a session's `pending` work can join.
            patience: seconds to wait for a further session.
            others: minimum and maximum number of sessions that join.
        """
        with self._lock:
            until = time.perf_counter() + 4 * patience
            while True:
                joining = [
                    waiting for waiting in self._waiting() if waiting.pending is not None and wanted(waiting.pending)
                ]
                if len(joining) + 1 >= others.stop or not self._comes(
                    share, min(patience, until - time.perf_counter())
                ):
                    break
            if len(joining) < others.start:
                return ()
            joined = joining[: others.stop - 1]
            for waiting in joined:
                self._queue.withdraw(waiting)
            share.joined = joined
            return joined

    def _waiting(self) -> list[Share]:
        return [account for account in self._queue.accounts() if isinstance(account, Share)]

    def _comes(self, share: Share, patience: float) -> bool:
        """Wait for a session of `share`'s last joint turn that has not queued yet.

        Return False if none arrives within `patience` seconds.
        """
        if patience <= 0.0 or all(member is share or member.asked is not None for member in share.group):
            return False
        self._gathering, count = True, self._queue.waiting
        try:
            return self._gathered.wait_for(lambda: self._queue.waiting > count, patience)
        finally:
            self._gathering = False

    def release(self, share: Share) -> None:
        """Finish the steps of the sessions that joined `share`, after it has done their work."""
        share.released = True
        for member in share.joined:
            assert member.context is not None
            assert member.steps is not None
            try:
                member.context.run(_exhaust, member.steps)
            except BaseException as error:
                member.error = error


def _tell(shares: Sequence[Share], seconds: float) -> None:
    for share in shares:
        if share.charge is not None:
            share.charge(seconds / len(shares))


def _raise_error(share: Share) -> None:
    error, share.error = share.error, None  # not kept: it references the frames of its traceback
    if error is not None:
        raise error


def _exhaust(steps: Steps) -> None:
    for _ in steps:
        pass
