"""Threads that run an executor's sessions. One thread, the leader, waits for all paused sessions.

When a session is ready, the leader runs it, and another thread becomes the leader. So no message passes from thread to
thread. (Leader/followers: Schmidt et al., Pattern-Oriented Software Architecture 2, section 5.4.) If all sessions are
idle, an executor has at most `SPARE_THREADS` of these threads. A session that lingers for its next message keeps its
thread.

If a session needs a thread only briefly, the leader runs the session and stays the leader. So short submissions cause no
thread switches. Of several ready sessions, the leader runs the one with the least device time. The session calls
`promote_follower` before longer work. A follower watches the leader, and takes its place if a session keeps the leader
for `cancellation.LOOK_SECONDS`.

A session that computes does not read its connection. So the threads also poll the connections of sessions that have been
busy with one message for `cancellation.LOOK_SECONDS`.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import attrs

from djinn_core.logs import get_logger
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.running import cancellation
from djinn_server.running.cancellation import CancellationState, poll_connection
from djinn_server.session_pauses import OFFER_SECONDS, Pause, Wakeup, clamp_timeout, wait_here

SPARE_THREADS: Final = 4
ALTERNATE_SECONDS: Final = 0.01  # between messages of two sessions that count as alternating
_log = get_logger("djinn.server")


@attrs.define(eq=False)
class SessionTask:
    """A session that these threads run.

    Attributes:
        pauses: generator that runs the session and yields its pauses.
        wakeup: ends a pause.
        context: context variables of the session.
        pause: the current pause; None while a thread runs the session.
        descriptor: file descriptor for which the pause waits, or -1.
        used: `Pause.used` of the last pause.
    """

    pauses: Iterator[Pause]
    wakeup: Wakeup
    context: contextvars.Context
    pause: Pause | None = None
    descriptor: int = -1
    used: float | None = None

    def advance(self) -> bool:
        """Run the session until its next pause that needs no thread. Return False if the session has ended."""
        while True:
            self.wakeup.clear()
            pause = self.context.run(next, self.pauses, None)
            if pause is None:
                return False
            descriptor = pause.connection.descriptor() if pause.connection is not None else None
            if descriptor is not None and descriptor < 0:
                descriptor = None  # a closed socket
            if pause.connection is None or descriptor is not None:
                self.descriptor = -1 if descriptor is None else descriptor
                self.pause = pause  # last: the thread that waits reads `descriptor` once it sees a pause
                return True
            wait_here(pause, self.wakeup)


class SessionThreads:
    """The threads of one executor. The threads end with the last session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the leader, the numbers of threads, and the sessions
        self._follower_condition = threading.Condition(self._lock)
        self._leader = 0  # ident of the leading thread, or 0
        self._runs_since = 0.0  # when the leader began to run a brief session; 0.0 while it waits
        self._brief_runs = 0
        self._is_watched = False  # True while a follower watches the leader, or has been notified to
        self._has_watcher = False  # True while a follower waits to check the leader
        self._threads = self._free = 0
        self._sessions: dict[int, tuple[CancellationState, ExecutorChannel]] = {}
        self._changed: deque[SessionTask] = deque()  # paused, or woken
        self._poke_lock = threading.Lock()  # protects `_poke` and `_is_poked`; acquired last
        self._poke: socket.socket | None = None  # a byte in it interrupts the leader's wait
        self._is_poked = False
        self._latest, self._latest_at, self._alternated_at = 0, 0.0, 0.0
        # Used by the leader.
        self._paused: set[SessionTask] = set()
        self._timed: set[SessionTask] = set()  # paused sessions whose pauses have deadlines
        self._ready: list[tuple[float, int, SessionTask]] = []  # a heap by used device seconds
        self._numbers = itertools.count()
        self._least_used = 0.0  # device seconds of the first ready session at the last poll of paused sessions
        self._next_poll = 0.0

    @contextmanager
    def polling(self, state: CancellationState, connection: ExecutorChannel) -> Iterator[None]:
        """Inside the block, let the threads poll the connection of the session whenever it is busy."""
        try:
            with self._lock:
                self._sessions[id(state)] = state, connection
                if not self._free:
                    self._start()
            self._interrupt()
            yield
        finally:
            with self._lock:
                del self._sessions[id(state)]
            self._interrupt()

    def run(self, pauses: Iterator[Pause], wakeup: Wakeup) -> None:
        """Run a session in the calling thread until its first pause, afterwards in these threads."""
        task = SessionTask(pauses, wakeup, contextvars.copy_context())
        wakeup.listener = partial(self._note_change, task)
        if task.advance():
            self._note_change(task)

    def note_message(self, session: int) -> None:
        """Note that a session begins to handle a message. `session`: unique number of the session."""
        now = time.monotonic()
        if session != self._latest:
            if now - self._latest_at < ALTERNATE_SECONDS:
                self._alternated_at = now
            self._latest = session
        self._latest_at = now

    @property
    def is_alternating(self) -> bool:
        """True if several sessions handled messages within the last `ALTERNATE_SECONDS`."""
        return time.monotonic() - self._alternated_at < ALTERNATE_SECONDS

    def promote_follower(self) -> None:
        """If the calling thread is the leader, let another thread lead, because its next work may take long."""
        if self._leader == threading.get_ident():
            with self._lock:
                if self._leader == threading.get_ident():
                    self._promote()

    def _promote(self) -> None:
        self._leader, self._runs_since = 0, 0.0
        self._free -= 1
        if not self._free:
            try:
                self._start()
            except (OSError, RuntimeError) as error:
                _log.warning(
                    "cannot start another session thread: this thread leads again after its session", error=repr(error)
                )
        self._follower_condition.notify()

    def _note_change(self, task: SessionTask) -> None:
        self._changed.append(task)
        self._interrupt()

    def _interrupt(self) -> None:
        """Wake the leader, so that it notices changes."""
        with self._poke_lock:
            if self._poke is not None and not self._is_poked:
                self._is_poked = True
                self._poke.send(b"\0")

    def _start(self) -> None:
        """Start another thread. The caller holds `_lock`, so that the counts include the thread before it runs.

        Raises:
            OSError: the process has too many open descriptors.
            RuntimeError: the process can start no thread.
        """
        if not self._threads:
            self._open()
        try:
            threading.Thread(target=self._run_thread, name="djinn-session", daemon=True).start()
        except BaseException:
            if not self._threads:
                self._close()
            raise
        self._threads, self._free = self._threads + 1, self._free + 1

    def _open(self) -> None:
        selector = selectors.DefaultSelector()
        try:
            poke, self._poked = socket.socketpair()
        except OSError:
            selector.close()
            raise
        selector.register(self._poked, selectors.EVENT_READ)
        self._selector = selector
        with self._poke_lock:
            self._poke, self._is_poked = poke, False

    def _run_thread(self) -> None:
        while self._lead():
            with self._lock:
                if self._free >= SPARE_THREADS:
                    self._threads -= 1
                    return
                self._free += 1

    def _lead(self) -> bool:
        """Become the leader, and run ready sessions until another thread leads. Return False if this thread must end."""
        self._await_lead()
        while True:
            task = self._next_task()
            if task is None:
                with self._lock:
                    if not self._sessions:
                        self._leader, self._threads, self._free = 0, self._threads - 1, self._free - 1
                        if not self._threads:
                            self._close()
                        self._follower_condition.notify()
                        return False
                self.promote_follower()
                self._poll_busy_sessions()
                return True
            if task.used is None:
                self.promote_follower()
            if not self._run(task):
                return True

    def _await_lead(self) -> None:
        """Wait until no thread leads, or until a session keeps the leader too long. Then lead."""
        with self._lock:
            while self._leader:
                if not self._is_watched or self._has_watcher:
                    self._follower_condition.wait()
                    continue
                self._has_watcher, runs = True, self._brief_runs
                self._follower_condition.wait(cancellation.LOOK_SECONDS)
                self._has_watcher = False
                if self._runs_since and time.monotonic() - self._runs_since >= cancellation.LOOK_SECONDS:
                    self._promote()
                elif not self._runs_since and runs == self._brief_runs:
                    self._is_watched = False
                    # The leader may have begun another run meanwhile, and relied on this watcher.
                    self._is_watched = runs != self._brief_runs
            self._leader, self._is_watched = threading.get_ident(), self._has_watcher

    def _run(self, task: SessionTask) -> bool:
        """Run a session until its next pause. Return True if the thread is the leader afterwards."""
        if self._leader == threading.get_ident():
            self._brief_runs += 1
            self._runs_since = time.monotonic()
            if not self._is_watched:
                self._request_watcher()
        continues = False
        try:
            continues = task.advance()
        except BaseException as error:  # also the SystemExit of a custom op: the thread continues
            _log.exception("a session ended by an internal error of the executor", error=repr(error))
        with self._lock:
            if is_leader := self._leader == threading.get_ident():
                self._runs_since = 0.0
        if continues and is_leader:
            self._changed.append(task)
        elif continues:
            self._note_change(task)
        return is_leader

    def _request_watcher(self) -> None:
        with self._lock:
            if self._free < 2:
                with suppress(OSError, RuntimeError):
                    self._start()
            self._is_watched = True
            self._follower_condition.notify()

    def _close(self) -> None:
        with self._poke_lock:
            poke, self._poke = self._poke, None
        assert poke is not None
        for resource in (self._selector, poke, self._poked):
            resource.close()

    def _next_task(self) -> SessionTask | None:
        """Wait for a ready session, and return it. Return None to poll busy sessions, or if no sessions exist.

        Poll paused sessions first if one of them may have used `OFFER_SECONDS` less device time than the ready session.
        """
        has_polled = False
        while True:
            self._take_changes()
            if self._ready and (has_polled or self._ready[0][0] < self._least_used + OFFER_SECONDS):
                if has_polled:
                    self._least_used = self._ready[0][0]
                return heapq.heappop(self._ready)[2]
            now = time.monotonic()
            with self._lock:
                count = len(self._sessions)
            if not count:
                return None
            deadlines = [task.pause.until for task in self._timed if task.pause is not None and task.pause.until]
            if count > len(self._paused):
                if now >= self._next_poll:
                    self._next_poll = now + cancellation.LOOK_SECONDS
                    return None
                deadlines.append(self._next_poll)
            until = now if self._ready else min(deadlines, default=None)
            for key, _ in self._selector.select(None if until is None else clamp_timeout(until - now)):
                if key.data is not None:
                    self._resume(key.data)
                else:
                    self._poked.recv(64)
                    self._is_poked = False
            now = time.monotonic()
            for task in [task for task in self._timed if task.pause is not None and (task.pause.until or now) < now]:
                self._resume(task)
            has_polled = True

    def _take_changes(self) -> None:
        while self._changed:
            task = self._changed.popleft()
            if task.pause is None or (task in self._paused and not task.wakeup.called):
                continue
            if task.wakeup.called or not self._watch(task):
                self._resume(task)

    def _watch(self, task: SessionTask) -> bool:
        """Add a paused session to the selector. Return False if its descriptor was closed."""
        self._paused.add(task)
        if task.pause is not None and task.pause.until is not None:
            self._timed.add(task)
        if task.descriptor < 0:
            return True
        try:
            if task.descriptor in self._selector.get_map():  # the system has reused the number of a closed descriptor
                self._resume(self._selector.get_key(task.descriptor).data)
            self._selector.register(task.descriptor, selectors.EVENT_READ, task)
        except (OSError, ValueError):
            task.descriptor = -1
            return False
        return True

    def _resume(self, task: SessionTask) -> None:
        self._paused.discard(task)
        self._timed.discard(task)
        if task.descriptor >= 0:
            with suppress(KeyError, ValueError, OSError):
                if self._selector.get_key(task.descriptor).data is task:
                    self._selector.unregister(task.descriptor)
        task.used = None if task.pause is None else task.pause.used
        task.pause, task.descriptor = None, -1
        heapq.heappush(self._ready, (-1.0 if task.used is None else task.used, next(self._numbers), task))

    def _poll_busy_sessions(self) -> None:
        """Poll the connections of busy sessions."""
        with self._lock:
            sessions = list(self._sessions.values())
        for state, connection in sessions:
            if state.is_busy():
                try:
                    poll_connection(state, connection)
                    state.yield_device()
                except BaseException as error:  # also the SystemExit of a plugin's transport
                    _log.exception("polling the connection of a busy session failed", error=repr(error))
                    state.wakeup()  # in case the session has paused meanwhile
