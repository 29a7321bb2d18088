"""`DeviceWatch` over a fake device: which op a lost device and a hung kernel are put down to, and who is stopped."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from djinn_core.errors import TransportError
from djinn_core.wire.message_base import Failure
from djinn_server.device_watch import DeviceWatch
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.responses import Responses
from djinn_server.running.run import TemplateRun
from djinn_server.running.run_request import RunRequest
from djinn_server.session import DeviceTurn, ExecutorSession
from djinn_server.session_runs import SessionRuns

ERROR = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Event:
    def __init__(self, runtime):
        self.runtime, self.reached = runtime, False

    def query(self):
        self.runtime.call()
        return self.reached


class Runtime(DeviceRuntime):
    """A fake device. The test completes its events. `error`: raised by each call. `hung`: waits never end."""

    hang_seconds = 30.0

    def __init__(self):
        super().__init__(torch.device("meta"))
        self.error, self.events, self.synchronized, self.hung, self.copies_since = None, [], 0, False, math.inf

    def call(self):
        if self.error is not None:
            raise self.error

    def mark(self, *, timing=False):
        del timing
        self.call()
        self.events.append(Event(self))
        return self.events[-1]

    def synchronize(self):
        self.synchronized += 1
        self.call()
        if self.hung:
            threading.Event().wait()

    def waits_since(self):
        return self.copies_since


class Session:
    """A fake of `CancellationState`."""

    def __init__(self, *, replaying=False):
        self.replaying, self.stopped = replaying, []

    def stop_before(self, submission, op, reason):
        self.stopped.append((submission, op, reason))


def template(*ops):
    steps = [SimpleNamespace(op=op, writes=(), reads=(), makes=(), release=()) for op in ops]
    return SimpleNamespace(steps=steps, count=len(steps))


OPS = template("aten::add", "aten::embedding", "aten::mm")


def request(sequence=1):
    return RunRequest(sequence, [], [], [], [], (), False)


class Watched:
    def __init__(self):
        self.runtime, self.reasons = Runtime(), []
        self.watch = DeviceWatch(self.runtime)  # the test looks itself
        self.watch._end_process = self.reasons.append

    def run(self, session, sequence=1, ops=OPS):
        work = request(sequence)
        self.watch.issued(self.watch.begin(session, work, ops))
        return work


def test_error_at_the_first_op_is_that_op():
    watched, session = Watched(), Session()
    watched.watch.begin(session, request(3), OPS)
    watched.runtime.error = ERROR
    watched.watch.check(ERROR, 0)
    (reason,) = watched.reasons
    assert reason == f"the device is lost: aten::add (op 0 of submission 3) failed: {ERROR}"
    assert session.stopped == [(3, 0, reason.removeprefix("the device is lost: "))]


def test_error_at_a_later_op_is_at_or_before_it():
    watched, session = Watched(), Session()
    watched.watch.begin(session, request(3), OPS)
    watched.runtime.error = ERROR
    watched.watch.check_failures([7, Failure(3, 1, "aten::embedding", "AcceleratorError", str(ERROR))], session)
    assert "an op at or before aten::embedding (op 1 of submission 3) failed" in watched.reasons[0]
    assert session.stopped[0][:2] == (3, 0)


def test_error_after_several_submissions_stops_no_session():
    watched, one, other = Watched(), Session(), Session()
    watched.run(one, 1)
    watched.run(other, 8)
    watched.runtime.error = ERROR
    watched.watch.poll()
    assert "an op in one of 2 submissions failed, at or before submission 8" in watched.reasons[0]
    assert one.stopped == other.stopped == [], "each may have caused it"


def test_completed_submissions_are_not_blamed():
    watched, one, other = Watched(), Session(), Session()
    watched.run(one, 1)
    watched.run(one, 2)
    watched.runtime.events[0].reached = watched.runtime.events[1].reached = True
    watched.watch.poll()
    watched.run(other, 8)
    watched.runtime.error = ERROR
    watched.watch.poll()
    assert not one.stopped
    assert other.stopped[0][:2] == (8, 0)
    assert "at or before aten::mm (op 2 of submission 8)" in watched.reasons[0]


def test_recovered_session_runs_ops_one_by_one():
    watched, session = Watched(), Session(replaying=True)
    work = request(5)
    watched.watch.begin(session, work, OPS)
    for op in work.progress.over(0, 3):
        begun = work.op_times.begin()
        if op:
            watched.runtime.error = ERROR
            with pytest.raises(torch.AcceleratorError):
                work.op_times.end(op, begun)
            break
        work.op_times.end(op, begun)
    watched.watch.check(ERROR, 1)
    assert session.stopped[0][:2] == (5, 1)
    assert "lost: aten::embedding (op 1 of submission 5) failed" in watched.reasons[0]


def test_loss_is_reported_once():
    watched, session = Watched(), Session()
    watched.run(session)
    watched.runtime.error = ERROR
    for _ in range(3):
        watched.watch.check(ERROR, 0)
        watched.watch.poll()
    assert len(watched.reasons) == len(session.stopped) == 1


@pytest.mark.parametrize(
    "error", [ERROR, RuntimeError("shapes cannot be multiplied"), torch.OutOfMemoryError("no room")]
)
def test_working_device_continues_after_error(error):
    watched, session = Watched(), Session()
    watched.run(session)
    watched.watch.check(error, 1)
    watched.watch.poll()
    assert not watched.reasons
    assert watched.runtime.synchronized == (error is ERROR), "only an error of the device is worth a wait"


def test_hung_kernel_is_blamed_on_oldest_submission(monkeypatch):
    watched, hung, other = Watched(), Session(), Session()
    watched.run(hung, 4)
    watched.run(other, 9)
    watched.watch.poll()
    assert not watched.reasons
    advance_clock = time.monotonic() + Runtime.hang_seconds + 1
    monkeypatch.setattr("djinn_server.device_watch.time.monotonic", lambda: advance_clock)
    watched.watch.poll()
    assert "at or before aten::mm (op 2 of submission 4) hangs: nothing completed for 30 s" in watched.reasons[0]
    assert hung.stopped[0][:2] == (4, 0)
    assert not other.stopped


def test_progressing_queue_is_not_hung(monkeypatch):
    watched, session = Watched(), Session()
    began = time.monotonic()
    for step in range(1, 6):
        watched.run(session, step)
        monkeypatch.setattr("djinn_server.device_watch.time.monotonic", lambda step=step: began + 20 * step)
        if step > 1:
            watched.runtime.events[step - 2].reached = True
        watched.watch.poll()
    assert not watched.reasons


@pytest.fixture
def advance_clock(monkeypatch):
    """Return a function that advances the clock by a number of seconds."""
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr("djinn_server.device_watch.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("djinn_server.device_watch.ANSWER_SECONDS", 0.01)

    def pass_by(seconds):
        clock.now += seconds

    return pass_by


def begin_until_op(watched, session, op, sequence=1):
    """Begin a submission and issue its ops up to `op`. Return the submission."""
    work = request(sequence)
    begun = watched.watch.begin(session, work, OPS)
    numbers = work.progress.over(0, 3)
    for _ in range(op + 1):
        next(numbers)
    watched.watch.poll()
    return begun


@pytest.mark.parametrize(
    ("replaying", "op", "named"),
    [
        (True, 1, "lost: aten::embedding (op 1 of submission 1) hangs"),
        (False, 0, "an op at or before aten::embedding (op 1 of submission 1) hangs"),
    ],
)
def test_op_blocked_by_hung_device_is_named(advance_clock, replaying, op, named):
    watched, session = Watched(), Session(replaying=replaying)
    begin_until_op(watched, session, 1)
    watched.runtime.hung = True
    advance_clock(Runtime.hang_seconds + 1)
    watched.watch.poll()
    assert named in watched.reasons[0]
    assert session.stopped[0][:2] == (1, op)


def test_hang_with_several_issuing_sessions_stops_none(advance_clock):
    watched, one, other = Watched(), Session(), Session()
    begin_until_op(watched, one, 1)
    begin_until_op(watched, other, 2)
    watched.runtime.hung = True
    advance_clock(Runtime.hang_seconds + 1)
    watched.watch.poll()
    assert "an op in one of 2 submissions hangs" in watched.reasons[0]
    assert not one.stopped + other.stopped


def test_slow_issue_is_not_a_hang(advance_clock):
    watched, session = Watched(), Session()
    begun = begin_until_op(watched, session, 0)
    for _ in range(2):
        advance_clock(Runtime.hang_seconds + 1)
        watched.watch.poll()
    watched.watch.issued(begun)
    watched.watch.poll()
    assert not watched.reasons, "the device completed all that it had"
    advance_clock(Runtime.hang_seconds + 1)
    watched.watch.poll()
    assert "submission 1) hangs" in watched.reasons[0]


def test_slowly_issuing_session_is_not_hung(advance_clock):
    watched, session, work = Watched(), Session(), request()
    watched.watch.begin(session, work, OPS)
    watched.runtime.hung = True
    for _ in work.progress.over(0, 3):
        watched.watch.poll()
        advance_clock(Runtime.hang_seconds - 1)
    assert not watched.reasons
    assert not watched.runtime.synchronized, "the device is not asked in vain"


def test_yielded_session_is_not_hung(advance_clock):
    watched, session, work = Watched(), Session(), request()
    watched.watch.begin(session, work, OPS)
    work.progress.paused = watched.runtime.hung = True
    watched.watch.poll()
    advance_clock(Runtime.hang_seconds + 1)
    watched.watch.poll()
    assert not watched.reasons


@pytest.mark.parametrize("hung", [True, False])
def test_copy_that_hangs_stops_no_session(advance_clock, hung):
    watched = Watched()
    watched.runtime.hung, watched.runtime.copies_since = hung, time.monotonic()
    advance_clock(Runtime.hang_seconds + 1)
    watched.watch.poll()
    assert [reason.partition(":")[2] for reason in watched.reasons] == hung * [
        " a copy between host and device hangs: nothing completed for 30 s"
    ]


def test_submission_during_yield_is_blamed_separately(monkeypatch):
    watched, long, short, began = Watched(), Session(), Session(), time.monotonic()
    begin_until_op = watched.watch.begin(long, request(1), OPS)
    for sequence in range(3):
        watched.run(short, sequence)
    for event in watched.runtime.events[:2]:
        event.reached = True
    watched.watch.poll()
    assert [work.submission for work in watched.watch._issued] == [2], "completed ones are not kept"
    monkeypatch.setattr("djinn_server.device_watch.time.monotonic", lambda: began + Runtime.hang_seconds + 1)
    watched.watch.poll()
    assert short.stopped[0][:2] == (2, 0), "it hangs although the long one is not issued to its end"
    watched.watch.issued(begin_until_op)
    assert [work.submission for work in watched.watch._issued] == [2, 1]
    assert not long.stopped


def test_error_names_the_op_of_the_session_that_had_it():
    watched, long, short = Watched(), Session(), Session()
    watched.run(short, 7, template("aten::relu", "aten::sin"))
    watched.watch.begin(long, request(1), OPS)
    watched.runtime.error = ERROR
    watched.watch.check_failures([Failure(7, 1, "aten::sin", "AcceleratorError", str(ERROR))], short)
    assert "one of 2 submissions failed, at or before aten::sin (op 1 of submission 7)" in watched.reasons[0]


def test_submission_is_completed_only_when_the_device_says_so():
    watched, session = Watched(), Session()
    watched.run(session, 4)
    watched.watch.completed()
    watched.runtime.error = ERROR
    watched.watch.completed()
    assert session.stopped[0][:2] == (4, 0), "a fetch that waited for nothing leaves it to be blamed"


def test_submission_whose_end_cannot_be_marked_is_not_kept():
    watched, session = Watched(), Session()
    begin_until_op = watched.watch.begin(session, request(4), OPS)
    watched.runtime.mark = lambda: (_ for _ in ()).throw(RuntimeError("no event"))
    watched.watch.issued(begin_until_op)
    assert not watched.watch._issuing
    assert not watched.watch._issued
    assert not watched.reasons


def session_of(watched, run):
    """Return the parts of `ExecutorSession` that run a submission whose ops are `run`, and its template."""
    timer, randomness = SimpleNamespace(runs_late=True), SimpleNamespace(give_back=lambda: None)
    device = SimpleNamespace(runtime=watched.runtime, watch=watched.watch, timer=timer, randomness=randomness)

    watched_session = Session()

    class FakeRuns(SessionRuns):
        def __init__(self):
            self._device, self._cancellation = device, watched_session

        def _run(self, known, work, pending):
            yield from ()
            return run()

    turn = SimpleNamespace(reached=None)
    session = SimpleNamespace(device=device, _turn=turn, _timings=None, _runs=FakeRuns(), _cancellation=watched_session)
    return session, SimpleNamespace(template=OPS, slots=[])


def run_outcome(session, known, work):
    """Return the outcome of a submission that does not pause."""
    with pytest.raises(StopIteration) as ended:
        next(session._runs.run(known, work))
    return ended.value.value


def test_hang_is_seen_while_the_session_waits_for_the_device(monkeypatch):
    watched, work = Watched(), request(6)
    work.synchronize = True
    session, known = session_of(watched, lambda: SimpleNamespace(failures=[]))

    def synchronize():
        advance_clock = time.monotonic() + Runtime.hang_seconds + 1
        monkeypatch.setattr("djinn_server.device_watch.time.monotonic", lambda: advance_clock)
        watched.watch.poll()
        raise ERROR

    turn = DeviceTurn(known, work, None, (), 0.0, 0.0, 0.0)
    turn.outcome, turn.responses = run_outcome(session, known, work), Responses()
    session._turn.end_event = SimpleNamespace(synchronize=synchronize)
    ExecutorSession._wait(session, turn)
    assert "submission 6) hangs" in watched.reasons[0]
    assert len(turn.outcome.failures) == 1


def test_aborted_submission_counts_as_issued():
    watched = Watched()

    def run():
        raise TransportError("the client is gone")

    session, known = session_of(watched, run)
    with pytest.raises(TransportError):
        run_outcome(session, known, request())
    assert not watched.watch._issuing
    assert len(watched.watch._issued) == 1


@pytest.mark.parametrize(("writes", "tries"), [((), 2), ((0,), 1)])
def test_op_that_ran_out_of_memory_runs_once_more_unless_it_writes(writes, tries):
    ran, relieved = [], []

    class Guard:
        lock = contextlib.nullcontext()

        def before(self, index, step, env): ...

        def after(self, index, step, env): ...

        def relieve(self, index, step, env):
            relieved.append(index)
            return len(relieved) == 1 and not step.writes

    def step(env):
        del env
        ran.append(1)
        raise torch.OutOfMemoryError("no room")

    steps = [SimpleNamespace(op="aten::relu_", run=step, writes=writes, reads=(0,), makes=(), release=())]
    one = SimpleNamespace(
        steps=steps,
        count=1,
        constants=[None],
        slots=0,
        inputs=0,
        computed=0,
        consumed=(),
        moves=False,
        outputs=(),
        native=lambda: None,
    )
    work = request()
    work.guard = lambda _: Guard()
    values = SimpleNamespace(
        table={},
        indexed=False,
        growing={},
        lock=contextlib.nullcontext(),
        sharing_memory=lambda *_: [],
        poison=lambda *_: None,
        moved=lambda *_: None,
        forget_addresses=lambda: None,
    )
    run = TemplateRun(one, work, [], values)
    run.advance()
    assert len(ran) == tries
    assert set(relieved) == {0}
    (failure,) = run.outcome.failures
    assert failure.kind == "OutOfMemoryError"
