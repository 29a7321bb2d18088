"""Cancellation: work that no wait needs any more stops between two ops, its values are poison, and the session lives on."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import djinn
from djinn_client.interception.deadlines import wait_deadline
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.runtime_interface import port
from djinn_core.errors import ConfigurationError, DeadlineExceeded, ProgramStopped, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Form, Operand
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.frame_order import Prefix, split
from djinn_core.wire.messages import Completed, Goodbye, InitialBindings, Submit, Template, decode, encode
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.disk_quota import DiskQuota
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.running import cancellation
from djinn_server.running.cancellation import CancellationState, poll_connection
from djinn_server.running.fair_share import FairShare
from djinn_server.running.poisoning import STOPPED
from djinn_server.running.run_request import RunRequest
from djinn_server.session import ExecutorSession
from djinn_server.session_pauses import Wakeup
from djinn_server.usage_metrics import UsageMetrics

DEVICE = "remote_accelerator:0"
LONG = 600  # ops of several milliseconds each: the tests do not wait for the end of them
SIDE = 500


@pytest.fixture
def matrix(over_tcp):
    return torch.full((SIDE, SIDE), 0.001, device=DEVICE)


def long_program(matrix):
    for _ in range(LONG):
        matrix = matrix @ matrix
    return matrix


def test_deadline_ends_wait_and_stops_program(matrix):
    kept, written, early = torch.arange(4.0).to(DEVICE), torch.zeros(6, device=DEVICE), torch.ones(2, device=DEVICE)
    part = written[1:3]
    early.add_(1)
    djinn.synchronize()
    last = long_program(matrix)
    part[:1].add_(1)  # through a view that the program would have made
    early.mul_(3)
    with pytest.raises(DeadlineExceeded, match="before the deadline"), djinn.deadline(0.3):
        last.sum().item()
    assert kept.sum().item() == 6.0, "what was there is untouched, and the session lives on"
    for value in (last, written, part, early):
        with pytest.raises(ProgramStopped, match="its program was stopped before this op"):
            value.sum().item()
    djinn.synchronize()  # the waiting thread has heard of it
    written.zero_()
    assert (written.sum().item(), part.sum().item()) == (0.0, 0.0), "what is written again is a value again"
    assert (matrix[0, 0] * 1000).item() == pytest.approx(1.0)


def test_deadline_does_not_stop_programs_of_other_threads(matrix):
    found = []
    mine = torch.ones(3, device=DEVICE)

    def other():
        value = torch.full((4,), 2.0, device=DEVICE)
        waiting.wait()
        found.append(value.sum().item())

    waiting = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    last = long_program(matrix)
    waiting.set()
    with pytest.raises(DeadlineExceeded), djinn.deadline(0.3):
        last.sum().item()
    thread.join()
    assert found == [8.0]
    assert mine.sum().item() == 3.0


def test_deadline_ends_wait(matrix):
    last = long_program(matrix)
    with pytest.raises(DeadlineExceeded, match="before the deadline"), djinn.deadline(0.3):
        torch.remote_accelerator.memory_allocated()
    with pytest.raises(ProgramStopped):
        last.sum().item()
    assert torch.remote_accelerator.memory_allocated() >= matrix.nbytes, "the late reply answers no later question"
    assert (matrix[0, 0] * 1000).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wait",
    [lambda one: one.sum().item(), lambda one: torch.remote_accelerator.memory_allocated()],
    ids=["fetch", "question"],
)
def test_deadline_holds_while_other_thread_waits(matrix, wait):
    mine, answered = torch.ones(3, device=DEVICE), []
    last = long_program(matrix)
    asking = threading.Thread(target=lambda: answered.append(torch.remote_accelerator.memory_allocated()))
    asking.start()
    while port.lock.acquire(blocking=False):  # until the other thread has it
        port.lock.release()
        time.sleep(0.001)
    with pytest.raises(DeadlineExceeded, match="another thread"), djinn.deadline(0.3):
        wait(mine * 2)
    djinn.cancel()
    asking.join(300)
    assert len(answered) == 1
    assert mine.sum().item() == 3.0
    del last


def test_earliest_deadline_applies():
    assert wait_deadline() is None
    with djinn.deadline(1.0):
        outer = wait_deadline()
        with djinn.deadline(100.0):
            assert wait_deadline() == outer
        with djinn.deadline(0.1):
            assert wait_deadline() < outer
    assert wait_deadline() is None
    with pytest.raises(ConfigurationError), djinn.deadline(0.0):
        pass


def test_wait_timeout_setting_ends_wait(monkeypatch):
    monkeypatch.setattr(device_state, "wait_timeout", 0.0)
    djinn.shut_down()
    djinn.configure(wait_timeout=5000)
    assert 4000.0 < wait_deadline() - time.monotonic() <= 5000.0
    with djinn.deadline(1000.0):
        assert wait_deadline() - time.monotonic() <= 1000.0
    djinn.shut_down()
    djinn.configure()
    assert wait_deadline() is None


GIVEN, MADE = 1 << 32 | 1, 2 << 32 | 1
MANY = Template(
    (Form("aten::mm", (Operand(), Operand()), (), ("new",), False),),
    (0,) * LONG,
    tuple(n for step in range(LONG) for n in (step, step, step + 1)),
    (0,),
    (LONG,),
)
EIGHT = Template((Form("aten::relu_", (Operand(),), (), ("none",), False),), (0,) * 8, (0,) * 8, (0,), ())


def submission(sequence, template=MANY, outputs=(MADE,)):
    bound = {"outputs": pack_handles(outputs), "first": InitialBindings((), pack_handles([GIVEN]))}
    return encode(Submit(sequence, digest=digest_of(template), template=template, **bound))


def upload(side=SIDE):
    return UploadPart(GIVEN, "float32", (side, side), (side, 1), 4 * side * side)


class FakeConnection:
    """A fake network connection that delivers the test's frames, and then nothing."""

    def __init__(self):
        self.limits = Limits()
        self.bytes_sent = self.bytes_received = 0
        self.frames, self.sent, self.broken = [], [], False
        self.numbered = self._taken = 0
        self._changed = threading.Condition()

    def put(self, head, body=()):
        with self._changed:
            self.numbered += 1
            self.frames.append(Frame(Prefix(self.numbered, 0).encode() + head, list(body)))
            self._changed.notify_all()

    def end(self):
        with self._changed:
            self.broken = True
            self._changed.notify_all()

    def receive(self, timeout=None):
        with self._changed:
            if not self._changed.wait_for(lambda: self.frames[self._taken :] or self.broken, timeout):
                raise TimeoutError
            if self.frames[self._taken :]:
                self._taken += 1
                return self.frames[self._taken - 1]
            raise TransportError("the other end is gone")

    def send(self, frame):
        if self.broken:
            raise TransportError("the other end is gone")
        _, head = split(frame)
        if head:
            self.sent.append(decode(head))

    def close(self):
        self.end()


@pytest.fixture
def start_session(monkeypatch):
    """Return a function that starts a session in a thread, with a long program under way.

    It returns the session, its connection, its thread and its errors.
    """
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 0.05)
    ended = []

    def start_session(context, template=MANY, outputs=(MADE,), lease=0.1):
        found, connection = make_session(context, template, outputs, lease)
        ended.append((*found, connection))
        return found

    yield start_session
    for session, line, thread, _, connection in ended:
        line.put(encode(Goodbye()))
        connection.close()
        thread.join(60)
        session.close()


@pytest.fixture
def session(start_session):
    return start_session(ExecutorContext.of(CpuRuntime()))


def make_session(context, template, outputs, lease):
    line, errors = FakeConnection(), []
    connection = LeasedConnection(line, lease, UsageMetrics())
    session = ExecutorSession(context)

    def serve():
        try:
            session.serve(connection)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    line.put(encode(upload()), [memoryview(bytearray(4 * SIDE * SIDE))])
    line.put(submission(1, template, outputs))
    return (session, line, thread, errors), connection


def test_expired_lease_stops_program(session):
    executor, line, thread, errors = session
    while executor.submissions < 1:
        time.sleep(0.01)
    line.end()
    thread.join(300)
    assert not thread.is_alive()
    assert "did not reconnect" in str(errors[0]) or "gone" in str(errors[0])


class GarbledConnection(FakeConnection):
    """A fake connection that delivers bytes that are no frames."""

    def receive(self, timeout=None):
        raise ProtocolError("no frame begins like this")


@pytest.mark.parametrize("kind", [FakeConnection, GarbledConnection], ids=["broken", "garbled"])
@pytest.mark.parametrize(
    "channel",
    [PlainExecutorChannel, lambda line: LeasedConnection(line, 600.0, UsageMetrics())],
    ids=["plain", "leased"],
)
def test_broken_connection_wakes_session(kind, channel):
    wakeup, line = Wakeup(), kind()
    line.end()
    poll_connection(CancellationState(FairShare().share(), UsageMetrics(), wakeup), channel(line))
    assert wakeup.called, "it may have paused meanwhile, and its connection tells it nothing more"


@pytest.mark.parametrize("behind", [0, 100])
def test_goodbye_before_a_broken_connection_ends_a_busy_session(start_session, behind):
    executor, line, thread, errors = start_session(ExecutorContext.of(CpuRuntime()), lease=600.0)
    while executor.submissions < 1:
        time.sleep(0.01)
    for sequence in range(2, 2 + behind):
        line.put(submission(sequence))
    line.put(encode(Goodbye()))
    line.end()
    thread.join(300)
    assert not thread.is_alive()
    assert not errors
    assert executor.submissions == 1, "nothing else was begun"


def test_cancellation_queued_during_a_reply_stops_its_submission():
    context = ExecutorContext.of(CpuRuntime())
    line, session = FakeConnection(), ExecutorSession(context)
    connection = LeasedConnection(line, 1.0, UsageMetrics())
    line.put(encode(upload()), [memoryview(bytearray(4 * SIDE * SIDE))])
    bound = {"digest": digest_of(EIGHT), "template": EIGHT, "first": InitialBindings((), pack_handles([GIVEN]))}
    line.put(encode(Submit(1, fetch=pack_handles([GIVEN]), **bound)))  # a large reply: acknowledgements are looked for
    line.put(submission(2))
    line.put(encode(CancelSubmissions((2,))))
    line.put(encode(Goodbye(finish=True)))
    session.serve(connection)
    session.close()
    assert context.usage.report(context.usage.holdings()).values["submissions_stopped"] == 1


def test_queued_submissions_are_cancelled(session):
    _, line, _, _ = session
    line.put(submission(2))
    line.put(encode(CancelSubmissions((1, 2))))
    deadline = time.monotonic() + 300
    while len([m for m in line.sent if isinstance(m, Completed)]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first, second = (m for m in line.sent if isinstance(m, Completed))
    assert [f.kind for f in (*first.failures, *second.failures)] == ["ProgramStopped"] * 2
    assert second.failures[0].instruction == 0, "it did not begin"


def test_long_program_yields_turns(start_session):
    context = ExecutorContext.of(CpuRuntime())
    long, slow, *_ = start_session(context)
    while not (long._cancellation.is_busy() and context.device.turns.busy):
        time.sleep(0.01)
    _, quick, *_ = start_session(context, EIGHT, ())
    deadline = time.monotonic() + 300
    while not slow.sent:
        assert time.monotonic() < deadline
        if quick.sent:
            slow.put(encode(CancelSubmissions((1,))))  # what was to be seen was seen
        time.sleep(0.01)
    assert quick.sent, "a short program has waited until a long one was through"
    (stopped,) = slow.sent
    assert stopped.failures[0].instruction > 0
    assert stopped.timing.queue > 0, "what it rested is not counted as its own"


def test_number_of_pending_stops_is_bounded():
    wanted = CancellationState(FairShare().share(), UsageMetrics())
    wanted.stop(range(10 * limits.STOPS))
    work = RunRequest(10 * limits.STOPS - 1, [], [], [], [], (), False)
    wanted.begin(work)
    assert len(wanted._cancelled) == limits.STOPS
    assert work.halt


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [("", "ProgramStopped", STOPPED), ("aten::add failed", "AcceleratorError", "aten::add failed")],
)
def test_replay_stops_at_same_op(tmp_path, reason, kind, text):
    journal = Journal.begin(
        tmp_path / "name.journal", SessionIdentity("name", "client", "secret", NO_TENANT), 1 << 20, DiskQuota()
    )
    journal.frame(Frame(encode(upload(2)), [memoryview(bytearray(16))]))
    journal.frame(Frame(submission(1, EIGHT, ())))
    journal.stopped(1, 3, reason)
    journal.leave()
    past, line, session = (
        JournalReader(tmp_path / "name.journal"),
        FakeConnection(),
        ExecutorSession(ExecutorContext.of(CpuRuntime())),
    )
    line.numbered = past.taken
    journal = Journal.resume(tmp_path / "name.journal", past, 1 << 20, DiskQuota())
    connection = LeasedConnection(line, 1.0, UsageMetrics(), journal=journal)
    connection.replay(0)
    line.put(encode(Goodbye()))
    session.serve(connection)
    (completed,) = line.sent
    assert [(f.kind, f.instruction, f.message) for f in completed.failures] == [(kind, 3, text)]
    session.close()
    connection.close()
