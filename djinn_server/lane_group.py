"""Submissions of one session that run in lanes at the same time, during one turn of the session."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final, Protocol, Self

import attrs

from djinn_core.hookspecs.transports import Frame
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.running.device_turn import DeviceTurn
from djinn_server.running.fair_share import Steps
from djinn_server.running.lanes import Access
from djinn_server.running.run import RunOutcome, TemplateRun
from djinn_server.running.run_request import RunRequest
from djinn_server.shared_device import SharedDevice

GROUP_SECONDS: Final = 10.0  # after which no submission joins, so that the session does its other tasks
TOGETHER: Final = 4  # submissions a lane without a reply that the client has read
_FIRST_LOOK_SECONDS: Final = (
    0.0005  # after which a free lane looks for arrived submissions; the next time after twice as long
)

Send = Callable[[Frame], None]


class LaneRuns(Protocol):
    """Begins and finishes the runs of a session, while other runs are in lanes."""

    def begin_in_lane(self, turn: DeviceTurn) -> TemplateRun | None:
        """Return the run of a submission; None if it has failed, with its outcome set."""

    def finish_in_lane(self, turn: DeviceTurn, run: TemplateRun, error: Exception | None) -> None:
        """Store the results of a run, and set its outcome."""

    def pause(self, random: bool, *works: RunRequest) -> Steps:
        """Yield the device in the middle of `works`. `random`: True if they draw random numbers."""


@attrs.define(eq=False)
class LaneRun:
    """A submission of a group.

    Attributes:
        turn: the submission.
        access: the storages that it uses.
        run: its run; None before it begins.
        seconds: its share of the device time so far.
        has_ended: True once its outcome is set.
    """

    turn: DeviceTurn
    access: Access
    run: TemplateRun | None = None
    seconds: float = 0.0
    has_ended: bool = False


class LaneGroup:
    """Submissions that run at the same time, and join while others run. They are answered in the order in which they joined.

    A submission may join if it uses no storage that a submission without a reply changes, or the other way round. It may not
    change what an earlier submission of the group has fetched either, because the reply borrows that memory.

    Attributes:
        ended: submissions whose replies are begun and not sent.
        met: True if two submissions have run at the same time.
    """

    def __init__(self, device: SharedDevice, runs: LaneRuns, lock: threading.Lock) -> None:
        """`lock`: of the session's values."""
        self._turns, self._lanes = device.turns, device.lanes
        self._runs, self._lock = runs, lock
        self.ended: deque[LaneRun] = deque()
        self.met = False
        self._unanswered: deque[LaneRun] = deque()
        self._ready: deque[LaneRun] = deque()
        self._running: dict[Future[bool], LaneRun] = {}
        self._paused: list[LaneRun] = []
        self._has_begun = False  # True once runs have begun in this turn on the device
        self._fetched: set[int] = set()
        self._charged_until = time.perf_counter()
        self._open_until = self._charged_until + GROUP_SECONDS
        self._look_seconds = _FIRST_LOOK_SECONDS

    def steps(
        self,
        join: Callable[[], bool | None],
        begin_reply: Callable[[DeviceTurn], None],
        answer: Callable[[LaneRun], None],
        sender: ReplySender,
    ) -> Steps:
        """Run the submissions. Answer those that end while others run; `ended` holds the last ones.

        `join`: adds the next submission. Returns False if it cannot join, None if none has arrived.
        `begin_reply`: called with an ended submission while the session has the device. `answer`: sends the reply with `sender`.
        """
        try:
            while self._running or self._ready or self._paused:
                while self._has_room(sender.unsent) and (joined := join()) is not None:
                    if not joined:
                        self._open_until = 0.0  # it is handled after the group
                yield from self._advance()
                with self._lock:
                    self._begin_replies(begin_reply)
                    while self.ended and (self._running or self._ready or self._paused):
                        answer(self.ended.popleft())
        finally:
            wait(self._running)  # no run outlives the turn

    def _has_room(self, unsent: int) -> bool:
        """Return True if a submission may join. `unsent`: number of replies that the client has not taken."""
        count = self._lanes.count
        is_open = not (self._paused or self._turns.waiting) and time.perf_counter() < self._open_until
        is_short = len(self._running) + len(self._ready) < 2 * count
        return is_open and is_short and len(self._unanswered) + unsent < TOGETHER * count

    def _begin_replies(self, begin_reply: Callable[[DeviceTurn], None]) -> None:
        while self._unanswered and self._unanswered[0].has_ended:
            one = self._unanswered.popleft()
            self._fetched |= one.access.fetches
            begin_reply(one.turn)
            self.ended.append(one)

    def admits(self, access: Access) -> bool:
        """Return True if a submission with this access may run beside the unanswered ones."""
        return access.writes.isdisjoint(self._fetched) and all(access.may_join(one.access) for one in self._unanswered)

    def add(self, turn: DeviceTurn, access: Access) -> None:
        """Add a submission."""
        run = LaneRun(turn, access)
        self._unanswered.append(run)
        self._look_seconds = _FIRST_LOOK_SECONDS
        turn.begun = turn.executed = time.perf_counter()
        if turn.bound is None:
            turn.outcome, run.has_ended = RunOutcome(), True
        else:
            self._ready.append(run)

    def _advance(self) -> Steps:
        """Begin runs in free lanes, and wait until one ends or another submission may have arrived. Yield the device if needed."""
        if not self._running and self._must_yield():
            yield from self._runs.pause(False, *[one.turn.work for one in self._unanswered])
            self._ready.extendleft(reversed(self._paused))
            self._paused, self._has_begun = [], False
            self._charged_until = time.perf_counter()
        self._begin_ready()
        is_full = len(self._running) >= self._lanes.count or self._open_until == 0.0
        done, _ = wait(self._running, None if is_full else self._look_seconds, FIRST_COMPLETED)
        self._look_seconds *= 2.0
        self._charge()
        for future in done:
            self._end(self._running.pop(future), future)

    def _must_yield(self) -> bool:
        """Return True if no run may begin before the session has yielded the device."""
        return bool(self._paused) or (self._has_begun and self._turns.waiting > 0)

    def _begin_ready(self) -> None:
        while self._ready and not self._must_yield() and len(self._running) < self._lanes.count:
            one = self._ready.popleft()
            one.run = one.run or self._runs.begin_in_lane(one.turn)
            self._charge()
            if one.run is None:
                one.has_ended = True
            else:
                self._running[self._lanes.start(one.run.advance)] = one
        self._has_begun |= bool(self._running)
        self.met |= len(self._running) > 1

    def _end(self, one: LaneRun, future: Future[bool]) -> None:
        assert one.run is not None
        error = future.exception()
        if error is None and not future.result():
            self._paused.append(one)
            return
        if error is not None and not isinstance(error, Exception):
            raise error
        one.turn.executed = time.perf_counter()
        self._runs.finish_in_lane(one.turn, one.run, error)
        one.has_ended = True

    def _charge(self) -> None:
        """Divide the time since the last call among the runs in lanes."""
        now = time.perf_counter()
        for one in self._running.values():
            one.seconds += (now - self._charged_until) / len(self._running)
        self._charged_until = now


class ReplySender:
    """Sends replies in a thread, in order: a client that does not read keeps no device."""

    def __init__(self, connection: ExecutorChannel) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "djinn-reply")
        self._sends: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            for send in self._sends:
                send.result()

    @property
    def unsent(self) -> int:
        """Number of replies that are not sent yet."""
        while self._sends and self._sends[0].done() and self._sends[0].exception() is None:
            self._sends.popleft()
        return len(self._sends)

    def send(self, frame: Frame) -> None:
        """Send a frame after earlier ones."""
        self._sends.append(self._thread.submit(self._connection.send, frame))
