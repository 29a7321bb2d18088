"""Sessions share a device fairly: counted in turns, so that nothing here depends on how fast the machine is."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Form, Operand
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.messages import Completed, Goodbye, InitialBindings, Submit, Template, decode, encode
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.running.fair_share import FairShare
from djinn_server.running.issued_turns import IssuedTurns
from djinn_server.running.turn_queue import Account, TurnQueue
from djinn_server.session import ExecutorSession

RELU = Template((Form("aten::relu", (Operand(),), (), ("new",), False),), (0,), (0, 1), (0,), (1,))
NAME = ContextVar("NAME")  # of the session that computes, on whichever thread
GIVEN, MADE = 1 << 32 | 1, 2 << 32 | 1


def order_of(lengths, total):
    """Return the order of turns among sessions that always wait and whose turns take `lengths` seconds."""
    queue, had = TurnQueue(), []
    sessions = [Account() for _ in lengths]
    for session in sessions:
        queue.enqueue(session, 0.0)
    while len(had) < total:
        session = queue.start(0.0)
        had.append(sessions.index(session))
        queue.end(session, lengths[had[-1]], 0.0, again=True)
    return had


def test_short_pieces_get_more_turns():
    had = order_of([1.0, 0.1], 110)
    assert 9 <= had.count(0) <= 12, had
    assert 98 <= had.count(1) <= 101, had


def test_equal_pieces_take_turns():
    had = order_of([1.0, 1.0, 1.0], 60)
    assert all(19 <= had.count(index) <= 21 for index in range(3)), had


def test_end_of_turn_wakes_one_thread(monkeypatch):
    turns, sessions, rounds, woken = FairShare(moment=0.0, simulated=lambda: 1.0), 8, 10, []

    class CountingCondition(threading.Condition):
        def notify(self, n=1):
            woken.append(n)
            super().notify(n)

    monkeypatch.setattr(turns, "condition", lambda: CountingCondition(turns._lock))

    def session():
        share = turns.share()
        for number in range(rounds):
            turns.begin(share)
            if number < rounds - 1:
                wait_until(lambda: turns.waiting == sessions - 1)
            turns.leave(share)

    threads = [threading.Thread(target=session) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(woken) == {1}
    assert len(woken) <= sessions * rounds


def test_late_session_starts_level():
    queue, old, late = TurnQueue(), Account(), Account()
    for _ in range(5):
        assert queue.start_at_once(old)
        queue.end(old, 10.0, 0.0)
    queue.enqueue(late, 0.0)
    assert late.used_seconds == 40.0, "what was not used is not saved up"


def test_less_served_session_is_awaited():
    queue, quick, slow = TurnQueue(moment=1.0), Account(), Account(used_seconds=5.0)
    assert queue.start_at_once(quick)
    queue.enqueue(slow, 0.0)
    queue.end(quick, 0.5, 0.0)
    assert queue.start(0.5) is None
    assert queue.patience(0.5) == 0.5
    assert queue.start(1.0) is slow


def test_turn_begins_when_granted():
    began = time.perf_counter()
    turns, woken, may_go_on = FairShare(), threading.Event(), threading.Event()
    late = turns.share()

    class Slow(threading.Condition):
        def wait(self, timeout=None):
            super().wait(timeout)
            self.release()
            woken.set()
            may_go_on.wait(60.0)
            self.acquire()

    late.wakeup = Slow(turns._lock)

    def session():
        with late:
            pass

    thread = threading.Thread(target=session)
    with turns.share():
        thread.start()
        wait_until(lambda: turns.waiting == 1)
    woken.wait(60.0)
    assert 0.0 < turns.device_seconds() <= time.perf_counter() - began
    may_go_on.set()
    thread.join()
    assert turns.device_seconds() <= time.perf_counter() - began


def steps(name, had, count):
    for _ in range(count):
        had.append((name, threading.current_thread().name))
        yield


def test_long_submissions_alternate_on_one_thread():
    turns, had = FairShare(moment=0.0), []
    threads = [threading.Thread(target=turns.run, args=(turns.share(), steps(name, had, 5))) for name in "ab"]
    with turns.share():
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: turns.waiting == number + 1)
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in had) == ["a"] * 5 + ["b"] * 5
    assert {name for name, _ in had[:3]} == {"a", "b"}
    assert {thread for _, thread in had} == {"djinn-device"}


def test_uncontended_submission_runs_on_reading_thread():
    turns, had = FairShare(), []
    turns.run(turns.share(), steps("a", had, 1))
    assert had == [("a", threading.current_thread().name)]


@pytest.mark.parametrize("brief", [(True, True), (True, False), (False, True)])
def test_before_wait_is_called_while_another_session_keeps_the_device(brief):
    turns, called = FairShare(), threading.Event()
    holder, waiter = turns.share(), turns.share(before_wait=called.set)
    holder.is_brief, waiter.is_brief = brief
    thread = threading.Thread(target=turns.run, args=(waiter, iter(())))
    with holder:
        thread.start()
        assert called.wait(60.0)
        assert thread.is_alive()
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("taken", [False, True])
def test_error_of_a_submission_is_its_sessions_own(taken):
    def broken():
        yield from ()
        raise KeyError("a bug")

    turns, raised = FairShare(), []

    def session(share):
        try:
            turns.run(share, broken())
        except KeyError as error:
            raised.append(error)

    thread = threading.Thread(target=session, args=(turns.share(),))
    with turns.share() if taken else nullcontext():
        thread.start()
        wait_until(lambda: turns.waiting == 1 if taken else raised)
    thread.join()
    assert len(raised) == 1
    assert not turns.busy


class FakeEvents:
    """A fake device with prepared op times, and events on its clock."""

    ahead_seconds = reached = 0.0
    device = SimpleNamespace(type="cuda")

    def __init__(self):
        self.now, self.waits = 0.0, 0

    def mark(self, *, timing):
        assert timing
        return SimpleNamespace(
            at=(at := self.now), query=lambda: at <= self.reached, synchronize=lambda: self._wait(at),
            elapsed_time=lambda end: 1e3 * (end.at - at),
        )  # fmt: skip

    def _wait(self, at):
        self.waits += 1
        self.reached = max(self.reached, at)


def test_turns_issued_ahead_are_measured_by_events_and_bounded():
    device, one, other = FakeEvents(), object(), object()
    issued = IssuedTurns(device)
    for shares, seconds in (([one], 3.0), ([other], 0.25)):
        begun = issued.begin()
        device.now += seconds
        assert issued.end(shares, begun, 0.0) is not None
    device.ahead_seconds = 60.0
    assert issued.overdue_event() is None
    assert not issued.take_completed(), "the device may be behind"
    device.reached = 3.0
    assert issued.take_completed() == [([one], 3.0)]
    device.ahead_seconds = 0.0
    issued.overdue_event().synchronize()
    assert issued.take_completed() == [([other], 0.25)]
    assert issued.overdue_event() is None
    assert issued.running_since() is None


def test_turn_of_several_sessions_is_charged_in_equal_parts():
    told = []
    turns = FairShare(simulated=lambda: 6.0)
    lead, *others = (turns.share(told.append) for _ in range(3))

    def work():
        lead.members = others
        yield from ()

    turns.run(lead, work())
    assert told == [2.0] * 3
    assert [turns.take_seconds(one) for one in (lead, *others)] == [2.0] * 3
    assert turns.take_seconds(lead) == 0.0
    assert turns.device_seconds() == 6.0


class RecordingRuntime(CpuRuntime):
    """A runtime that records which session has the turn at each device wait."""

    def __init__(self):
        super().__init__()
        self.had = []

    def synchronize(self):
        self.had.append(NAME.get())


class PacedConnection:
    """A fake connection that delivers each frame when the test says so."""

    def __init__(self):
        self.answers = []
        self.limits = Limits()
        self.frames, self.allowed = [], threading.Semaphore(0)

    def give(self, *frames):
        self.frames += frames
        for _ in frames:
            self.allowed.release()

    def receive(self, timeout=None):
        if not self.allowed.acquire(timeout=timeout):
            raise TimeoutError
        return self.frames.pop(0)

    def send(self, frame):
        message = decode(frame.head)
        assert isinstance(message, Completed)
        self.answers.append(message)


def submission(sequence):
    first = InitialBindings((), pack_handles([GIVEN]))
    bound = {"outputs": pack_handles([MADE]), "free": pack_handles([MADE])}
    return Frame(
        encode(Submit(sequence, digest=digest_of(RELU), template=RELU, first=first, synchronize=True, **bound))
    )


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_least_served_session_goes_first():
    runtime = RecordingRuntime()
    context = ExecutorContext.of(runtime)
    sessions = {name: (ExecutorSession(context), PacedConnection()) for name in ("greedy", "modest")}

    def serve(name, session, connection):
        NAME.set(name)
        session.serve(PlainExecutorChannel(connection))

    threads = [threading.Thread(target=serve, args=(name, *both)) for name, both in sessions.items()]
    (one, greedy), (_, modest) = sessions.values()
    for thread, connection in zip(threads, (greedy, modest), strict=True):
        thread.start()
        connection.give(Frame(encode(UploadPart(GIVEN, "float32", (2,), (1,), 8)), [memoryview(bytearray(8))]))
    greedy.give(*[submission(number) for number in range(1, 9)])
    wait_until(lambda: len(greedy.answers) == 8)
    turns = one.device.turns
    with turns.share():  # another session computes
        greedy.give(submission(9))
        wait_until(lambda: turns.waiting == 1)
        modest.give(submission(1))
        wait_until(lambda: turns.waiting == 2)
    wait_until(lambda: len(greedy.answers) + len(modest.answers) == 10)
    for connection, thread in zip((greedy, modest), threads, strict=True):
        connection.give(Frame(encode(Goodbye())))
        thread.join()
    assert runtime.had == [*["greedy"] * 8, "modest", "greedy"]
    last = greedy.answers[-1].timing
    assert min(last.queue, last.decode, last.execute, last.encode) > 0
