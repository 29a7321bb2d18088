"""Sessions share a device fairly: counted in turns, so that nothing here depends on how fast the machine is."""

from __future__ import annotations

import threading
import time

from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Form, Operand
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.messages import Completed, Goodbye, InitialBindings, Submit, Template, UploadPart, decode, encode
from djinn_core.wire.templates import digest_of
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.running.fair_share import FairShare
from djinn_server.session import ExecutorSession

RELU = Template((Form("aten::relu", (Operand(),), (), ("new",), False),), (0,), (0, 1), (0,), (1,))
GIVEN, MADE = 1 << 32 | 1, 2 << 32 | 1


def order_of(lengths, total):
    """Order of turns among sessions that always want one and whose turns take `lengths` seconds, by their own account."""
    turns, had = FairShare(moment=60.0), []

    def session(index):
        share = turns.share()
        while len(had) < total:
            turns.begin(share, 0.0)
            had.append(index)
            while turns.waiting < len(lengths) - 1 and len(had) < total:  # until all others want one, too
                time.sleep(0)
            if len(had) >= total:
                turns.moment = 0.0
            turns.end(share, share.began + lengths[index])

    threads = [threading.Thread(target=session, args=(index,)) for index in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return had[:total]


def test_short_pieces_have_more_turns_than_long_ones():
    had = order_of([1.0, 0.1], 110)
    assert 9 <= had.count(0) <= 12, had
    assert 98 <= had.count(1) <= 101, had


def test_equal_pieces_take_turns():
    had = order_of([1.0, 1.0, 1.0], 60)
    assert all(19 <= had.count(index) <= 21 for index in range(3)), had


class Looked(FairShare):
    """Counts how often a waiting session's thread looks for its turn."""

    looks = 0

    def _patience(self, share):
        type(self).looks += 1
        return super()._patience(share)


def test_the_end_of_a_turn_wakes_one_thread(monkeypatch):
    monkeypatch.setattr(Looked, "looks", 0)
    turns, sessions, rounds = Looked(moment=0.0), 8, 10

    def session():
        share = turns.share()
        for number in range(rounds):
            turns.begin(share, 0.0)
            if number < rounds - 1:
                until(lambda: turns.waiting == sessions - 1)
            turns.end(share, share.began + 1.0)

    threads = [threading.Thread(target=session) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sessions * rounds - 1 <= Looked.looks <= 2 * sessions * rounds, (
        "when it begins to wait, and when it is woken"
    )


def test_who_comes_late_begins_level():
    turns = FairShare()
    old, late = turns.share(), turns.share()
    for _ in range(5):
        turns.begin(old, 0.0)
        turns.end(old, old.began + 10.0)
    turns.begin(late, 0.0)
    assert late.used == 40.0, "what was not used is not saved up"
    turns.end(late, late.began + 1.0)


class Noting(CpuRuntime):
    """Notes whose turn it is when a submission asks to wait for the device."""

    def __init__(self):
        super().__init__()
        self.had = []

    def synchronize(self):
        self.had.append(threading.current_thread().name)


class Waiting:
    """Stands for a connection: one frame after the other, each when the test says so."""

    def __init__(self):
        self.answers = []
        self.limits = Limits()
        self.frames, self.allowed = [], threading.Semaphore(0)

    def give(self, *frames):
        self.frames += frames
        for _ in frames:
            self.allowed.release()

    def receive(self, timeout=None):
        self.allowed.acquire()
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


def until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_whoever_had_less_of_the_device_goes_first():
    runtime = Noting()
    context = ExecutorContext.of(runtime)
    sessions = {name: (ExecutorSession(context), Waiting()) for name in ("greedy", "modest")}
    threads = [
        threading.Thread(target=s.serve, args=(PlainExecutorChannel(c),), name=name)
        for name, (s, c) in sessions.items()
    ]
    (one, greedy), (_, modest) = sessions.values()
    for thread, connection in zip(threads, (greedy, modest), strict=True):
        thread.start()
        connection.give(Frame(encode(UploadPart(GIVEN, "float32", (2,), (1,), 8)), [memoryview(bytearray(8))]))
    greedy.give(*[submission(number) for number in range(1, 9)])
    until(lambda: len(greedy.answers) == 8)
    turns = one.device.turns
    with turns.share():  # another session computes
        greedy.give(submission(9))
        until(lambda: turns.waiting == 1)
        modest.give(submission(1))
        until(lambda: turns.waiting == 2)
    until(lambda: len(greedy.answers) + len(modest.answers) == 10)
    for connection, thread in zip((greedy, modest), threads, strict=True):
        connection.give(Frame(encode(Goodbye())))
        thread.join()
    assert runtime.had == [*["greedy"] * 8, "modest", "greedy"]
    last = greedy.answers[-1].timing
    assert min(last.queue, last.decode, last.execute, last.encode) > 0
