"""Let sessions use a device in turns, in the order of `turn_queue.py`.

One thread, the device thread, issues the ops of all sessions. A session passes the steps of a submission to it and
waits. On a CPU, the session's own thread runs the steps if no other session uses or awaits the device. Passing the steps
takes longer than a small submission. Sessions that only move values use the device in their own threads (`with share:`).
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

BRIEF_WAIT_SECONDS: Final = 0.005  # a thread waits this long for brief steps before it calls `Share.before_wait`
IDLE_SECONDS: Final = 5.0  # idle time after which the device thread of a CPU ends
_ENDED: Final = object()
Steps = Iterator[None]  # work of a submission. Each `None` offers the device to waiting sessions.


@attrs.define(eq=False)
class Share(Account):
    """One session's share of a device. A `with` block is one turn on the device in the calling thread.

    Attributes:
        turns: the queue of the device.
        charge: called with the device seconds of each turn; None if nobody is charged.
        before_wait: called before a thread waits long for a turn.
        is_brief: True if the session's turns are short.
        seconds: device time that `FairShare.take_seconds` has not returned yet.
        began_at: time (`time.perf_counter`) at which the current turn began.
        start_event: event before the turn's ops; None on a CPU.
        end_event: event after the ops of the last turn; None on a CPU.
        steps: steps that the device thread runs; None: the session's own thread computes.
        ended: True after the steps have ended.
        error: exception that ended the steps.
        context: context variables of the session's thread.
        pending: work that another session may do in its own turn until the steps begin; None if no session may.
        members: sessions whose work this session does in its turn. The turn is charged to all in equal parts.
        members_done: True after the work of the members is done.
        group: sessions of the last joint turn.
        wakeup: notified when the steps have ended, or when a turn of the session's own thread begins.
    """

    turns: FairShare = attrs.field(kw_only=True)
    charge: Callable[[float], None] | None = None
    before_wait: Callable[[], None] = lambda: None
    is_brief: bool = False
    seconds: float = 0.0
    began_at: float = 0.0
    start_event: Any = None
    end_event: Any = None
    steps: Steps | None = None
    ended: bool = False
    error: BaseException | None = None
    context: contextvars.Context | None = None
    pending: object | None = None
    members: Sequence[Share] = ()
    members_done: bool = False
    group: Sequence[Share] = ()
    wakeup: threading.Condition = attrs.field(
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
            issued: the accelerator's turns; None on a CPU, on which ops are complete when their calls return.
            moment: as in `TurnQueue`.
            simulated: returns the seconds of the turn that ends, on a device with simulated time. None: turns are timed.
        """
        self._issued_turns, self._simulated_seconds = issued, simulated
        self._used_seconds = self._reported_seconds = 0.0
        self._queue = TurnQueue(moment)
        self._lock = threading.Lock()
        self._queue_changed = threading.Condition(self._lock)  # for the device thread
        self._arrival = threading.Condition(self._lock)
        self._awaits_arrival = False
        self._thread: threading.Thread | None = None

    def share(
        self, charge: Callable[[float], None] | None = None, before_wait: Callable[[], None] = lambda: None
    ) -> Share:
        """Return a share of the device for a new session. The parameters are attributes of `Share`."""
        return Share(turns=self, charge=charge, before_wait=before_wait)

    def device_seconds(self) -> float:
        """Return the device seconds of all sessions so far, including the running turn. The result never decreases."""
        self.settle()
        with self._lock:
            self._reported_seconds = max(self._reported_seconds, self._used_seconds + self._running_seconds())
            return self._reported_seconds

    def running_seconds(self) -> float:
        """Return the seconds since the current turn began on the device; 0.0 without a turn."""
        self.settle()
        with self._lock:
            return self._running_seconds()

    def _running_seconds(self) -> float:
        if self._simulated_seconds is not None:
            return 0.0
        since = self._issued_turns.running_since() if self._issued_turns is not None else None
        running: Any = self._queue.running
        if since is None and running is None:
            return 0.0
        return max(time.perf_counter() - (running.began_at if since is None else since), 0.0)

    def take_seconds(self, share: Share) -> float:
        """Return the device seconds of `share` since the last call. Accelerator turns count once complete."""
        self.settle()
        with self._lock:
            seconds, share.seconds = share.seconds, 0.0
        return seconds

    def settle(self) -> None:
        """Charge the turns that an accelerator has completed."""
        if self._issued_turns is not None:
            for shares, seconds in self._issued_turns.take_completed():
                with self._lock:
                    self._charge(shares, seconds)
                _report_charges(shares, seconds)

    def _charge(self, shares: Sequence[Share], seconds: float) -> None:
        self._used_seconds += seconds
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
        """Number of sessions that wait for a turn."""
        return self._queue.waiting

    @property
    def longest_wait(self) -> float:
        """Seconds for which the first of the waiting sessions has waited."""
        with self._lock:
            return self._queue.longest_wait(time.perf_counter())

    def run(self, share: Share, steps: Steps, pending: object | None = None) -> None:
        """Run steps in turns on the device until they end, and raise their error. `pending`: as in `Share`."""
        share.steps, share.pending, share.ended, share.error = steps, pending, False, None
        share.context = contextvars.copy_context()
        try:
            runs_here = self._issued_turns is None and self._start(share)
            if runs_here and self._run_turn(share, steps):
                return
            running: Any = self._queue.running
            is_brief = share.is_brief and (running is None or running.is_brief)
            with self._lock:
                self._wake() if runs_here else self._enqueue(share)
                ended = is_brief and share.wakeup.wait_for(lambda: share.ended, BRIEF_WAIT_SECONDS)
            if not ended:  # the wait may be long
                share.before_wait()
                with self._lock:
                    share.wakeup.wait_for(lambda: share.ended)
        finally:
            share.steps = None
        _raise_error(share)

    def begin(self, share: Share) -> None:
        """Wait for a turn in the calling thread."""
        if not self._start(share):
            share.before_wait()
            with self._lock:
                self._enqueue(share)
                while self._queue.running is not share:
                    share.wakeup.wait()
            self._begin(share)

    def begin_if_free(self, share: Share) -> bool:
        """Begin a turn in the calling thread if the device is free and no session waits. Return False otherwise."""
        return not self._queue.waiting and self._start(share)

    def _start(self, share: Share) -> bool:
        with self._lock:
            if free := self._queue.start_at_once(share):
                share.began_at = time.perf_counter()
        if free:
            self._begin(share)
        return free

    def _begin(self, share: Share) -> None:
        if self._issued_turns is not None:
            share.start_event = self._issued_turns.begin()

    def leave(self, share: Share, *, again: bool = False, returns: bool = True) -> None:
        """End a turn. `again`: True to queue for another turn. `returns`: as in `TurnQueue.end`."""
        shares = (share, *share.members)
        if self._issued_turns is not None:
            share.end_event = self._issued_turns.end(shares, share.start_event, share.began_at)
        with self._lock:
            now = time.perf_counter()
            if share.end_event is not None:
                seconds = 0.0  # `settle` charges them
            else:
                seconds = now - share.began_at if self._simulated_seconds is None else self._simulated_seconds()
                self._charge(shares, seconds)
            self._queue.end(share, 0.0, now, again=again, returns=returns)
            if self._queue.waiting:
                self._queue_changed.notify()
        if share.end_event is None:
            _report_charges(shares, seconds)

    def _enqueue(self, share: Share) -> None:
        self._queue.enqueue(share, time.perf_counter())
        if self._awaits_arrival:
            self._arrival.notify()
        self._wake()

    def _wake(self) -> None:
        """Wake the device thread, or start it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="djinn-device", daemon=True)
            self._thread.start()
        self._queue_changed.notify()

    def _run_turn(self, share: Share, steps: Steps) -> bool:
        """Run steps of the session that has the device until they yield, then end the turn.

        Return False if steps remain.
        """
        share.pending = None
        ended = True
        try:
            ended = next(steps, _ENDED) is _ENDED
        finally:
            self.leave(share, again=not ended)
            if share.members_done:
                members, share.members, share.members_done = share.members, (), False
                for member in members:
                    self._end_steps(member)
        return ended

    def _serve(self) -> None:
        """Run the steps of one turn after another. This is the device thread."""
        while (share := self._next_turn()) is not None:
            assert share.context is not None
            assert share.steps is not None
            try:
                ended = share.context.run(self._run_turn, share, share.steps)
            except BaseException as error:  # the session's thread raises it
                share.error, ended = error, True
            if ended:
                self._end_steps(share)

    def _next_turn(self) -> Share | None:
        """Wait for a turn whose steps the device thread runs. Return its share, or None if the thread must end.

        A session that computes in its own thread is woken for its turn.
        """
        while True:
            with self._lock:
                while (patience := self._queue.patience(time.perf_counter())) != 0.0:
                    changed = self._queue_changed.wait(IDLE_SECONDS if patience is None else patience)
                    if not changed and not self.busy and self._issued_turns is None:
                        self._thread = None
                        return None
            self._keep_up()
            with self._lock:
                share: Any = self._queue.start(now := time.perf_counter())
                if share is not None:
                    share.began_at = now
                    if share.steps is None:
                        share.wakeup.notify()
                        share = None
            if share is not None:
                self._begin(share)
                return share  # type: ignore[no-any-return]

    def _keep_up(self) -> None:
        """Wait for accelerator turns that were issued too long ago, and charge completed turns."""
        if self._issued_turns is not None:
            with contextlib.suppress(RuntimeError):  # the session's own calls report the error
                while (event := self._issued_turns.overdue_event()) is not None:
                    event.synchronize()
                    self.settle()
            self.settle()

    def _end_steps(self, share: Share) -> None:
        with self._lock:
            share.ended = True
            share.wakeup.notify()

    def gather(
        self, share: Share, can_join: Callable[[object], bool], patience: float, counts: range
    ) -> Sequence[Share]:
        """Let waiting sessions join a turn of `share`. Return the sessions that joined.

        The call also waits for sessions of the last joint turn that have not queued yet. It stops when no session arrives
        within `patience` seconds, and after `4 * patience` seconds at the latest.

        Args:
            share: the session that has the device.
            can_join: returns True if a session's `pending` work can join.
            patience: seconds to wait for a further session.
            counts: allowed numbers of joining sessions. If fewer than `counts.start` can join, none joins.
        """
        with self._lock:
            until = time.perf_counter() + 4 * patience
            while True:
                joining = [
                    waiting for waiting in self._waiting() if waiting.pending is not None and can_join(waiting.pending)
                ]
                if len(joining) + 1 >= counts.stop or not self._wait_for_member(
                    share, min(patience, until - time.perf_counter())
                ):
                    break
            if len(joining) < counts.start:
                return ()
            members = joining[: counts.stop - 1]
            for waiting in members:
                self._queue.withdraw(waiting)
            share.members = members
            return members

    def _waiting(self) -> list[Share]:
        return [account for account in self._queue.accounts() if isinstance(account, Share)]

    def _wait_for_member(self, share: Share, patience: float) -> bool:
        """Wait until a further session queues, if a session of `share`'s last joint turn has not queued yet.

        Return False if all have queued, or if no session arrives within `patience` seconds.
        """
        if patience <= 0.0 or all(member is share or member.waiting_since is not None for member in share.group):
            return False
        self._awaits_arrival, count = True, self._queue.waiting
        try:
            return self._arrival.wait_for(lambda: self._queue.waiting > count, patience)
        finally:
            self._awaits_arrival = False

    def release(self, share: Share) -> None:
        """Finish the steps of the sessions that joined `share`, after it has done their work."""
        share.members_done = True
        for member in share.members:
            assert member.context is not None
            assert member.steps is not None
            try:
                member.context.run(_exhaust, member.steps)
            except BaseException as error:
                member.error = error


def _report_charges(shares: Sequence[Share], seconds: float) -> None:
    for share in shares:
        if share.charge is not None:
            share.charge(seconds / len(shares))


def _raise_error(share: Share) -> None:
    error, share.error = share.error, None  # its traceback keeps frames alive
    if error is not None:
        raise error


def _exhaust(steps: Steps) -> None:
    for _ in steps:
        pass
