"""Threads of an executor's sessions: idle sessions have none, and what ends a pause reaches its session."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time

import psutil
import pytest

from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.wire.messages import Attach, Attached, Goodbye, StatsReply, StatsRequest, encode
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.running import cancellation
from djinn_server.running.cancellation import CancellationState
from djinn_server.running.fair_share import FairShare
from djinn_server.session_pauses import Pause, Wakeup, wait_here
from djinn_server.session_threads import SPARE_THREADS, SessionThreads
from djinn_server.usage_metrics import UsageMetrics

SECONDS = 300.0


def test_idle_sessions_need_no_threads(executor, dial, ask, wait_for):
    process, url = psutil.Process(executor.process_id), executor.ready.urls[0]
    connections = []

    def attach(count):
        while len(connections) < count:
            connections.append(dial(url))
            assert isinstance(ask(connections[-1], Attach(executor.issue_ticket(), "")), Attached)

    attach(2)
    few = process.num_threads()  # two of them may linger
    attach(32)
    wait_for(lambda: process.num_threads() <= few + SPARE_THREADS, "the end of the threads of idle sessions")
    for connection in connections:
        assert isinstance(ask(connection, StatsRequest()), StatsReply), "an idle session answers"
        connection.send(Frame(encode(Goodbye())))
        connection.close()
    wait_for(lambda: not executor.status().sessions, "the end of the sessions")


class SilentConnection(Connection):
    """A connection that receives nothing, with a descriptor or without one."""

    def __init__(self, number=None):
        self.number = number

    def descriptor(self):
        return self.number

    def send(self, frame):
        raise NotImplementedError

    def receive(self, timeout=None):
        raise TimeoutError

    def close(self):
        pass


def run(threads, pauses, wakeup):
    """Run a session in a thread. Return an event that is set at its end."""
    ended, wanted = threading.Event(), CancellationState(FairShare().share(), UsageMetrics(), wakeup)

    def session():
        with threads.polling(wanted, PlainExecutorChannel(SilentConnection())):
            yield from pauses()
        ended.set()

    threads.run(session(), wakeup)
    return ended


def test_wakeup_ends_pause_in_other_thread():
    wakeup, inside, seen = Wakeup(), threading.Event(), []

    def pauses():
        seen.append(threading.current_thread())
        yield Pause()
        seen.append(threading.current_thread())
        inside.set()

    ended = run(SessionThreads(), pauses, wakeup)
    assert not inside.is_set()
    wakeup()
    assert ended.wait(SECONDS)
    assert seen[0] is threading.current_thread() is not seen[1]


def test_early_wakeup_is_not_lost():
    wakeup = Wakeup()

    def pauses():
        wakeup()
        yield Pause()

    assert run(SessionThreads(), pauses, wakeup).wait(SECONDS)


def test_a_pause_ends_at_its_deadline():
    def pauses():
        yield Pause(until=0.001)

    assert run(SessionThreads(), pauses, Wakeup()).wait(SECONDS)


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
def test_wakeup_ends_pause_with_distant_deadline(seconds):
    threads, wakeup = SessionThreads(), Wakeup()

    def pauses():
        yield Pause(until=time.monotonic() + seconds)

    ended = run(threads, pauses, wakeup)
    assert run(threads, lambda: iter([Pause(until=0.001)]), Wakeup()).wait(SECONDS), "another session goes on"
    assert not ended.is_set()
    wakeup()
    assert ended.wait(SECONDS)


def alternate(threads, pairs, handle, used=lambda _: 0.0):
    """Run brief sessions. Each calls `handle` with its number for each byte, until its connection ends.

    `used`: device seconds by session.
    """
    ended = []
    for number, (near, _) in enumerate(pairs):

        def pauses(number=number, near=near):
            near.setblocking(False)
            while True:
                yield Pause(connection=PlainExecutorChannel(SilentConnection(near.fileno())), used=used(number))
                with contextlib.suppress(BlockingIOError):
                    if not near.recv(1):
                        return
                    handle(number)

        ended.append(run(threads, pauses, Wakeup()))
    return ended


def test_brief_sessions_share_the_thread_that_waits(monkeypatch):
    monkeypatch.setattr(
        cancellation, "LOOK_SECONDS", 60.0
    )  # a busy machine may interrupt the thread for longer than it is
    threads, pairs, seen = SessionThreads(), [socket.socketpair() for _ in range(2)], []
    handled = threading.Semaphore(0)

    def handle(number):
        seen.append((number, threading.get_ident()))
        time.sleep(0.001)  # another thread would wait for the next message by then
        handled.release()

    ended = alternate(threads, pairs, handle)
    for _ in range(10):
        for _, far in pairs:
            far.send(b"x")
            assert handled.acquire(timeout=SECONDS)
    assert [number for number, _ in seen] == [0, 1] * 10
    assert len({thread for _, thread in seen}) == 1
    for _, far in pairs:
        far.close()
    assert all(one.wait(SECONDS) for one in ended)
    for near, _ in pairs:
        near.close()


def test_brief_sessions_take_turns_by_device_time(monkeypatch):
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 60.0)
    threads, pairs, seconds, full = SessionThreads(), [socket.socketpair() for _ in range(4)], (0.0002, 0.0008), 0.08
    clock, done = [0.0] * 4, threading.Semaphore(0)

    def handle(number):
        clock[number] += seconds[number % 2]
        if max(clock) < full:
            pairs[number][1].send(b"x")  # the next message of the session is there before another session runs
        else:
            done.release()

    ended = alternate(threads, pairs, handle, clock.__getitem__)
    for _, far in pairs:
        far.send(b"x")
    assert done.acquire(timeout=SECONDS)
    assert min(clock) > 0.97 * full - 2 * 0.001, "within 3 %, and two looks for other sessions"
    for _, far in pairs:
        far.close()
    assert all(one.wait(SECONDS) for one in ended)
    for near, _ in pairs:
        near.close()


@pytest.mark.parametrize("promotes", [True, False], ids=["promotes", "does_not_promote"])
def test_blocking_brief_session_does_not_delay_others(promotes):
    threads, pairs, go_on, seen = SessionThreads(), [socket.socketpair() for _ in range(2)], threading.Event(), []
    other = threading.Event()

    def handle(number):
        if number == 0:
            if promotes:
                threads.promote_follower()
            seen.append(go_on.wait(SECONDS))
        else:
            other.set()

    ended = alternate(threads, pairs, handle)
    for _, far in pairs:
        far.send(b"x")
    assert other.wait(SECONDS)
    assert not seen, "the first session still blocks"
    go_on.set()
    for _, far in pairs:
        far.close()
    assert all(one.wait(SECONDS) for one in ended)
    assert seen == [True]
    for near, _ in pairs:
        near.close()


def test_caller_wait_with_distant_deadline():
    wakeup = Wakeup()
    timer = threading.Timer(0.05, wakeup)
    timer.start()
    wait_here(Pause(until=time.monotonic() + 1e12), wakeup)
    assert wakeup.called
    timer.join()


@pytest.mark.parametrize("number", [None, -1], ids=["none", "closed"])
def test_session_without_descriptor_keeps_thread(number):
    threads, wakeup, seen = SessionThreads(), Wakeup(), []

    def pauses():
        for _ in range(2):
            seen.append(threading.current_thread())
            yield Pause(connection=PlainExecutorChannel(SilentConnection(number)), lingers=True)

    assert run(threads, pauses, wakeup).is_set(), "it has run to its end before `run` returned"
    assert set(seen) == {threading.current_thread()}


def test_reused_descriptor_wakes_both_sessions():
    threads, (near, far), (other, beyond) = SessionThreads(), socket.socketpair(), socket.socketpair()
    number = near.fileno()

    def pauses():
        yield Pause(connection=PlainExecutorChannel(SilentConnection(number)))

    first = run(threads, pauses, Wakeup())
    near.close()
    assert other.fileno() != number
    os.dup2(other.fileno(), number)
    second = run(threads, pauses, Wakeup())
    assert first.wait(SECONDS)
    beyond.send(b"x")
    assert second.wait(SECONDS)
    os.close(number)
    for one in (far, other, beyond):
        one.close()


def test_threads_end_with_the_last_session():
    threads, wakeup = SessionThreads(), Wakeup()

    def pauses():
        yield Pause()

    ended = run(threads, pauses, wakeup)
    mine = [thread for thread in threading.enumerate() if thread.name == "djinn-session"]
    assert mine
    wakeup()
    assert ended.wait(SECONDS)
    for thread in mine:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def no_thread_starts(monkeypatch):
    """Yield an event. While it is set, no thread of a session can be started."""
    refuse, start = threading.Event(), threading.Thread.start

    def start_or_refuse(thread):
        if refuse.is_set() and thread.name == "djinn-session":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    return refuse


def one_pause():
    yield Pause()


def test_sessions_continue_while_no_thread_can_be_started(no_thread_starts, wait_for):
    threads, wakeups = SessionThreads(), [Wakeup() for _ in range(3)]
    before = {thread for thread in threading.enumerate() if thread.name == "djinn-session"}
    ended = [run(threads, one_pause, wakeup) for wakeup in wakeups]
    no_thread_starts.set()
    for one, wakeup in zip(ended[:2], wakeups, strict=False):
        wakeup()
        assert one.wait(SECONDS), "the only thread runs the session, and then waits again"
    no_thread_starts.clear()
    wakeups[2]()
    assert ended[2].wait(SECONDS)
    wait_for(
        lambda: before.issuperset(thread for thread in threading.enumerate() if thread.name == "djinn-session"),
        "the end of the threads",
    )


def test_a_session_is_refused_if_no_thread_waits_for_it(no_thread_starts):
    threads, wakeup = SessionThreads(), Wakeup()
    no_thread_starts.set()
    with pytest.raises(RuntimeError, match="can't start"):
        run(threads, one_pause, Wakeup())
    no_thread_starts.clear()
    ended = run(threads, one_pause, wakeup)
    wakeup()
    assert ended.wait(SECONDS), "the next session is served"


@pytest.mark.parametrize("place", [(selectors, "DefaultSelector"), (socket, "socketpair")], ids=["selector", "pair"])
def test_a_session_is_refused_if_no_descriptor_is_free(monkeypatch, place):
    threads, wakeup = SessionThreads(), Wakeup()

    def refuse():
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(*place, refuse)
        with pytest.raises(OSError, match="too many open files"):
            run(threads, one_pause, Wakeup())
    ended = run(threads, one_pause, wakeup)
    wakeup()
    assert ended.wait(SECONDS), "the next session is served"


def test_a_session_that_raises_systemexit_leaves_the_threads_usable():
    threads, before, ended = SessionThreads(), set(threading.enumerate()), threading.Event()

    def exits():
        try:
            yield Pause()
            raise SystemExit
        finally:
            ended.set()

    wakeups = Wakeup(), Wakeup()
    run(threads, exits, wakeups[0])
    wakeups[0]()
    assert ended.wait(SECONDS)
    for thread in set(threading.enumerate()) - before:
        if thread.name == "djinn-session":
            thread.join(SECONDS)
    ended = run(threads, one_pause, wakeups[1])
    wakeups[1]()
    assert ended.wait(SECONDS), "the next session is served"
