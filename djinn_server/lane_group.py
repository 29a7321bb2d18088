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
UNSENT_PER_LANE: Final = 4  # maximum submissions without a sent reply, per lane
_FIRST_POLL_SECONDS: Final = 0.0005  # until a free lane polls for submissions; doubled after each poll

Send = Callable[[Frame], None]


class LaneRuns(Protocol):
    """The functions of a session that begin and finish its runs in lanes."""

    def begin_in_lane(self, turn: DeviceTurn) -> TemplateRun | None:
        """Return the run of a submission. If the submission fails at its start, set `turn.outcome` and return None."""

    def finish_in_lane(self, turn: DeviceTurn, run: TemplateRun, error: Exception | None) -> None:
        """Store the results of a run, and set `turn.outcome`. `error`: raised by the run, or None."""

    def pause(self, random: bool, *works: RunRequest) -> Steps:
        """Yield the device while `works` are unfinished. `random`: True if they draw random numbers."""


@attrs.define(eq=False)
class LaneRun:
    """A submission in a `LaneGroup`.

    Attributes:
        turn: the submission's times, operands and results.
        access: storages that the submission uses.
        run: the running template; None before the run begins.
        seconds: device time charged to the submission so far.
        has_ended: True once `turn.outcome` is set.
    """

    turn: DeviceTurn
    access: Access
    run: TemplateRun | None = None
    seconds: float = 0.0
    has_ended: bool = False


class LaneGroup:
    """Submissions that run at the same time, and are answered in the order in which they joined.

    A submission cannot join if it and an unanswered submission use a storage that one of these two writes. It also
    cannot join if it writes a storage whose values the group has fetched, because replies borrow that memory.

    Attributes:
        unsent_runs: submissions whose replies have begun and must be sent.
        ran_concurrently: True if two submissions have run at the same time.
    """

    def __init__(self, device: SharedDevice, runs: LaneRuns, lock: threading.Lock) -> None:
        """`lock`: protects the session's values."""
        self._turns, self._lanes = device.turns, device.lanes
        self._runs, self._lock = runs, lock
        self.unsent_runs: deque[LaneRun] = deque()
        self.ran_concurrently = False
        self._unanswered: deque[LaneRun] = deque()
        self._ready: deque[LaneRun] = deque()
        self._running: dict[Future[bool], LaneRun] = {}
        self._paused: list[LaneRun] = []
        self._has_begun = False  # True once runs have begun in this turn on the device
        self._fetched_storages: set[int] = set()
        self._charged_until = time.perf_counter()
        self._open_until = self._charged_until + GROUP_SECONDS
        self._poll_seconds = _FIRST_POLL_SECONDS

    def steps(
        self,
        join: Callable[[], bool | None],
        begin_reply: Callable[[DeviceTurn], None],
        answer: Callable[[LaneRun], None],
        sender: ReplySender,
    ) -> Steps:
        """Run the submissions, and answer them while others run. At the end, `unsent_runs` has the unanswered ones.

        `join`: adds the next submission. Returns False if the submission cannot join, None if no message has arrived.
        `begin_reply`: called with an ended submission while the session has the device. `answer`: sends its reply with `sender`.
        """
        try:
            while self._running or self._ready or self._paused:
                while self._is_open(sender.unsent) and (has_joined := join()) is not None:
                    if not has_joined:
                        self._open_until = 0.0  # the submission runs after the group
                yield from self._advance()
                with self._lock:
                    self._begin_replies(begin_reply)
                    while self.unsent_runs and (self._running or self._ready or self._paused):
                        answer(self.unsent_runs.popleft())
        finally:
            wait(self._running)  # no run outlives the turn

    def _is_open(self, unsent: int) -> bool:
        """Return True if a submission may join. `unsent`: number of replies that are not sent yet."""
        count = self._lanes.count
        is_open = not (self._paused or self._turns.waiting) and time.perf_counter() < self._open_until
        is_short = len(self._running) + len(self._ready) < 2 * count
        return is_open and is_short and len(self._unanswered) + unsent < UNSENT_PER_LANE * count

    def _begin_replies(self, begin_reply: Callable[[DeviceTurn], None]) -> None:
        while self._unanswered and self._unanswered[0].has_ended:
            ended_run = self._unanswered.popleft()
            self._fetched_storages |= ended_run.access.fetches
            begin_reply(ended_run.turn)
            self.unsent_runs.append(ended_run)

    def admits(self, access: Access) -> bool:
        """Return True if a submission with this access may run concurrently with the unanswered submissions."""
        is_free = access.writes.isdisjoint(self._fetched_storages)
        return is_free and all(access.may_join(run.access) for run in self._unanswered)

    def add(self, turn: DeviceTurn, access: Access) -> None:
        """Add a submission, which begins in a later step."""
        run = LaneRun(turn, access)
        self._unanswered.append(run)
        self._poll_seconds = _FIRST_POLL_SECONDS
        turn.begun = turn.executed = time.perf_counter()
        if turn.bound is None:
            turn.outcome, run.has_ended = RunOutcome(), True
        else:
            self._ready.append(run)

    def _advance(self) -> Steps:
        """Begin runs in free lanes. Wait for the end of a run or for new submissions. Yield the device if needed."""
        if not self._running and self._must_yield():
            yield from self._runs.pause(False, *[run.turn.work for run in self._unanswered])
            self._ready.extendleft(reversed(self._paused))
            self._paused, self._has_begun = [], False
            self._charged_until = time.perf_counter()
        self._begin_ready()
        is_full = len(self._running) >= self._lanes.count or self._open_until == 0.0
        done_futures, _ = wait(self._running, None if is_full else self._poll_seconds, FIRST_COMPLETED)
        self._poll_seconds *= 2.0
        self._charge()
        for future in done_futures:
            self._end(self._running.pop(future), future)

    def _must_yield(self) -> bool:
        """Return True if the session must yield the device before another run begins."""
        return bool(self._paused) or (self._has_begun and self._turns.waiting > 0)

    def _begin_ready(self) -> None:
        while self._ready and not self._must_yield() and len(self._running) < self._lanes.count:
            lane_run = self._ready.popleft()
            lane_run.run = lane_run.run or self._runs.begin_in_lane(lane_run.turn)
            self._charge()
            if lane_run.run is None:
                lane_run.has_ended = True
            else:
                self._running[self._lanes.start(lane_run.run.advance)] = lane_run
        self._has_begun |= bool(self._running)
        self.ran_concurrently |= len(self._running) > 1

    def _end(self, lane_run: LaneRun, future: Future[bool]) -> None:
        assert lane_run.run is not None
        error = future.exception()
        if error is None and not future.result():
            self._paused.append(lane_run)
            return
        if error is not None and not isinstance(error, Exception):
            raise error
        lane_run.turn.executed = time.perf_counter()
        self._runs.finish_in_lane(lane_run.turn, lane_run.run, error)
        lane_run.has_ended = True

    def _charge(self) -> None:
        """Charge the time since the last call to the runs in lanes, in equal parts."""
        now = time.perf_counter()
        for lane_run in self._running.values():
            lane_run.seconds += (now - self._charged_until) / len(self._running)
        self._charged_until = now


class ReplySender:
    """Send replies in order, in a thread, so that a client that does not read does not occupy the device."""

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
        """Send a frame after the earlier frames, without waiting."""
        self._sends.append(self._thread.submit(self._connection.send, frame))
