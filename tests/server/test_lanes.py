"""Lanes: submissions of one session that do not depend on each other run at the same time, with the values of one after another."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from bound_changes import changes

from djinn_core.errors import QuotaExceeded
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Form, Operand, SlotArg
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Goodbye, InitialBindings, Submit, Template, decode, encode
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.hookspecs.quotas import Quota
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.running import lanes as lanes_module
from djinn_server.running import responses
from djinn_server.running.fair_share import FairShare
from djinn_server.running.lanes import Lanes
from djinn_server.running.run import TemplateRun
from djinn_server.session import ExecutorSession

SECONDS = 60.0
_MM = Form("aten::mm", (Operand(), Operand()), (), ("new",), False)
_MUL = Form("aten::mul_.Tensor", (Operand(), SlotArg()), (), ("none",), False)
_T = Form("aten::t", (Operand(),), (), ("new",), False)
PRODUCT = Template((_MM,), (0,), (0, 1, 2), (0, 1), (2,))
CONSUME = Template((_MM,), (0,), (0, 1, 2), (0, 1), (2,), (1,))
SCALE = Template((_MUL,), (0,), (0,), (0,), ())
COPY = Template((Form("aten::copy_", (Operand(), Operand()), (), ("none",), False),), (0,), (0, 1), (0, 1), ())
TRANSPOSE = Template((_T,), (0,), (0, 1), (0,), (1,))


def handle(number, view=1):
    return number << 32 | number + view


class FakeClient:
    """A fake client whose submissions have all arrived before the first one runs."""

    quota = Quota()

    def __init__(self):
        self.limits, self.answers = Limits(), []
        self._frames, self._bound, self._count = [], {}, 0

    def submit(self, template, inputs, outputs=(), slots=(), fetch=(), free=()):
        self._count += 1
        digest, bound = digest_of(template), (tuple(inputs), tuple(slots))
        given = {"template": template, "first": InitialBindings(bound[1], pack_handles(inputs))}
        if digest in self._bound:
            of_inputs, of_slots = changes(self._bound[digest], bound)
            given = {"slot_changes": of_slots, "input_changes": of_inputs}
        self._bound[digest] = bound
        packed = {"outputs": pack_handles(outputs), "fetch": pack_handles(fetch), "free": pack_handles(free)}
        self._frames.append(Frame(encode(Submit(self._count, digest=digest, **packed, **given))))

    def upload(self, number, tensor):
        part = UploadPart(number, "float32", tuple(tensor.shape), tensor.stride(), tensor.nbytes)
        self._frames.append(Frame(encode(part), [bytearray(tensor.numpy().tobytes())]))

    def fetch(self, *handles):
        self._count += 1
        self._frames.append(Frame(encode(Submit(self._count, fetch=pack_handles(handles)))))

    def cancel(self, *numbers):
        self._frames.append(Frame(encode(CancelSubmissions(numbers))))

    def receive(self, timeout=None):
        if self._frames:
            return self._frames.pop(0)
        if len(self.answers) < self._count:
            raise TimeoutError
        return Frame(encode(Goodbye()))

    def send(self, frame):
        message, body = decode(frame.head), iter([bytes(part) for part in frame.body])
        results = [one if isinstance(one, Failure) else next(body) for one in message.results]
        self.answers.append((message.sequence, [failure.op for failure in message.failures], results))

    def run(self, lanes, values):
        """Return the answers, and the number of runs in lanes."""
        self.context = context = ExecutorContext.of(CpuRuntime())
        context.usage.quota, context.device.lanes = self.quota, Lanes(torch.device("cpu"), lanes)
        start, runs = context.device.lanes.start, []
        context.device.lanes.start = lambda call: (runs.append(call), start(call))[1]
        served = ExecutorSession(context)
        for number, value in values.items():
            served.values[number] = value.clone()
        served.serve(PlainExecutorChannel(self))
        served.close()
        return self.answers, len(runs)


@pytest.fixture(autouse=True)
def brief_runs_join(monkeypatch):
    monkeypatch.setattr(lanes_module, "MIN_RUN_SECONDS", 0.0)
    monkeypatch.setattr(lanes_module, "MIN_MEAN_OP_SECONDS", 0.0)


def matrices(count):
    generator = torch.Generator().manual_seed(0)
    return {handle(number): torch.randn(4, 4, generator=generator) for number in range(1, count + 1)}


def products(program, count, inputs=None):
    for number in range(count):
        program.submit(
            PRODUCT, inputs or [handle(1), handle(2 + number)], [handle(100 + number)], fetch=[handle(100 + number)]
        )


def test_value_is_uploaded_again_after_it_was_freed():
    """A router copies a value to an executor for each part that reads it."""
    program, copied = FakeClient(), handle(9)
    for factor in (2.0, 3.0):
        program.upload(copied, factor * torch.eye(4))
        made = handle(100 + int(factor))
        program.submit(PRODUCT, [handle(1), copied], [made], fetch=[made], free=[copied])
    values = matrices(1)
    answers, _ = program.run(2, values)
    assert answers == [
        (number, [], [(factor * values[handle(1)]).numpy().tobytes()]) for number, factor in ((1, 2.0), (2, 3.0))
    ]


def test_independent_submissions_run_concurrently(monkeypatch):
    program, both, plain = FakeClient(), threading.Barrier(2), TemplateRun.advance

    def meeting(run, stop=None):
        both.wait(SECONDS)  # breaks if one run ends before the other one begins
        return plain(run, stop)

    monkeypatch.setattr(TemplateRun, "advance", meeting)
    products(program, 2)
    values = matrices(4)
    answers, runs = program.run(2, values)
    assert runs == 2
    expected = [(values[handle(1)] @ values[handle(number)]).numpy().tobytes() for number in (2, 3)]
    assert answers == [(1, [], expected[:1]), (2, [], expected[1:])]


def test_submissions_of_small_ops_run_one_after_another(monkeypatch):
    monkeypatch.setattr(lanes_module, "MIN_MEAN_OP_SECONDS", SECONDS)
    program = FakeClient()
    products(program, 40)
    answers, runs = program.run(2, matrices(41))
    assert len(answers) == 40
    assert runs < 20, "the first ones run before the template's time is known"


class AnsweringClient(FakeClient):
    """A fake client whose later submissions arrive after `after` replies. `later`: number of waiting frames."""

    def __init__(self, after):
        super().__init__()
        self.after, self.later = after, 1

    def receive(self, timeout=None):
        if self._frames and len(self._frames) <= self.later and len(self.answers) < self.after:
            raise TimeoutError
        return super().receive(timeout)


def run_waits_for(monkeypatch, number, event, seconds=SECONDS):
    """Let the run of a submission begin its ops once an event has happened, or after `seconds`."""
    plain = TemplateRun.advance

    def waiting(run, stop=None):
        if run.work.sequence == number:
            event.wait(seconds)
        return plain(run, stop)

    monkeypatch.setattr(TemplateRun, "advance", waiting)


def test_submission_joins_once_an_earlier_one_is_answered(monkeypatch):
    program, plain, third = AnsweringClient(after=1), TemplateRun.finish, threading.Event()
    run_waits_for(monkeypatch, 2, third, 5.0)
    ended = []

    def noting(run):
        ended.append(run.work.sequence)
        if run.work.sequence == 3:
            third.set()
        return plain(run)

    monkeypatch.setattr(TemplateRun, "finish", noting)
    products(program, 3)
    answers, runs = program.run(2, matrices(4))
    assert [number for number, _, _ in answers] == [1, 2, 3]
    assert ended == [1, 3, 2], "the client sends the third one after the first answer, while the second one runs"
    assert runs == 3


def test_client_that_does_not_read_keeps_no_device():
    begun = []

    class Slow(FakeClient):
        def send(self, frame):
            if not begun:
                turns = self.context.device.turns
                share, until = turns.share(), time.monotonic() + 10.0
                while not turns.begin_if_free(share) and time.monotonic() < until:
                    time.sleep(0.001)
                begun.append(turns.busy)
                if time.monotonic() < until:
                    turns.leave(share)
            super().send(frame)

    program, until = Slow(), time.monotonic() + 10.0
    products(program, 12)
    answers, _ = program.run(2, matrices(13))
    assert time.monotonic() < until, "the reply waited for a turn that waited for the reply"
    assert [number for number, _, _ in answers] == [*range(1, 13)]


def other_session(program, order):
    """Return a thread that takes the device once and appends to `order`."""

    def use():
        with program.context.device.turns.share():
            order.append("other session")

    return threading.Thread(target=use)


def test_waiting_session_precedes_runs_that_have_not_begun(monkeypatch):
    program, order, plain = FakeClient(), [], TemplateRun.advance

    waiting = other_session(program, order)

    def noting(run, stop=None):
        order.append(run.work.sequence)
        if run.work.sequence == 1:
            waiting.start()
        while run.work.sequence < 3 and not program.context.device.turns.waiting:
            time.sleep(0.001)
        return plain(run, stop)

    monkeypatch.setattr(TemplateRun, "advance", noting)
    products(program, 4)
    answers, runs = program.run(2, matrices(5))
    waiting.join(SECONDS)
    assert [number for number, _, _ in answers] == [1, 2, 3, 4]
    assert runs == 4
    assert order.index("other session") == 2, order


def test_uploads_wait_while_another_session_waits(monkeypatch):
    program, order, plain, leave = FakeClient(), [], ExecutorSession.take_at_once, FairShare.leave

    waiting = other_session(program, order)

    def noting(session, message, frame):
        if "upload" not in order:
            waiting.start()
            while not program.context.device.turns.waiting:
                time.sleep(0.001)
        order.append("upload")
        plain(session, message, frame)

    monkeypatch.setattr(ExecutorSession, "take_at_once", noting)
    monkeypatch.setattr(FairShare, "leave", lambda *given, **named: (order.append("end"), leave(*given, **named)))
    products(program, 2)
    for number in range(20):
        program.upload(handle(200 + number), torch.eye(4))
    program.submit(PRODUCT, [handle(1), handle(219)], [handle(300)], fetch=[handle(300)])
    values = matrices(3)
    answers, _ = program.run(2, values)
    waiting.join(SECONDS)
    assert answers[2] == (3, [], [values[handle(1)].numpy().tobytes()])
    assert order[:2] == ["upload", "end"], "the turn ends before further uploads are taken"


def test_memory_of_unsent_reply_is_not_written(monkeypatch):
    sending, scaled, plain = threading.Event(), threading.Event(), TemplateRun.finish
    monkeypatch.setattr(responses, "COPIED_AT_ONCE", 0)  # small values are borrowed, too
    run_waits_for(monkeypatch, 3, scaled, 1.0)

    def noting(run):
        outcome = plain(run)
        if run.work.sequence == 4:
            scaled.set()
        return outcome

    class Slow(FakeClient):
        def receive(self, timeout=None):
            if len(self._frames) == 1 and not sending.is_set():
                raise TimeoutError  # the client has not sent the last submission yet
            return super().receive(timeout)

        def send(self, frame):
            if len(self.answers) == 1:
                sending.set()
                scaled.wait(1.0)
            super().send(frame)

    monkeypatch.setattr(TemplateRun, "finish", noting)
    program, values = Slow(), matrices(4)
    program.submit(SCALE, [handle(4)], slots=[1.0])  # so that its template is known
    products(program, 2)
    program.submit(SCALE, [handle(100)], slots=[2.0], fetch=[handle(100)])
    answers, _ = program.run(2, values)
    product = values[handle(1)] @ values[handle(2)]
    assert answers[1][2] == [product.numpy().tobytes()]
    assert answers[3][2] == [(product * 2.0).numpy().tobytes()]


def test_random_programs_equal_one_lane():
    joined = 0
    for seed in range(30):
        found = []
        for lanes in (1, 3):
            choose, program, known = random.Random(seed), FakeClient(), list(matrices(6))
            for number in range(40):
                kind = choose.choice(["product", "product", "product", "scale", "transpose", "fetch"])
                made = handle(100 + number)
                if kind == "product":
                    program.submit(PRODUCT, choose.choices(known, k=2), [made], fetch=[made] if number % 3 else [])
                    known.append(made)
                elif kind == "scale":
                    program.submit(SCALE, [choose.choice(known)], slots=[choose.choice([0.5, -1.0])])
                elif kind == "transpose":
                    source = choose.choice(known)
                    program.submit(TRANSPOSE, [source], [made := handle(source >> 32, 1000 + number)])
                    known.append(made)
                else:
                    program.fetch(choose.choice(known))
            program.fetch(*known)
            answers, runs = program.run(lanes, matrices(6))
            found.append(answers)
            joined += runs
        assert found[0] == found[1], seed
    assert joined > 100


@pytest.mark.parametrize("lanes", [1, 2])
def test_failing_op_does_not_poison_other_lanes(lanes):
    program, values = FakeClient(), matrices(5)
    values[handle(3)] = torch.ones(5, 5)
    products(program, 4)
    answers, _ = program.run(lanes, values)
    assert [failures for _, failures, _ in answers] == [[], ["aten::mm"], [], []]
    assert [isinstance(results[0], Failure) for _, _, results in answers] == [False, True, False, False]


def test_cancelled_submission_stops_alone():
    program = FakeClient()
    products(program, 1)
    program.cancel(2)
    products(program, 3)
    answers, _ = program.run(2, matrices(6))
    assert [bool(failures) for _, failures, _ in answers] == [False, True, False, False]


def test_submissions_keep_own_slots_and_inputs():
    program, values = FakeClient(), matrices(4)
    for number, factor in enumerate((2.0, 3.0, 4.0), start=1):
        program.submit(SCALE, [handle(number)], slots=[factor], fetch=[handle(number)])
    answers, runs = program.run(2, values)
    assert runs == 3
    expected = [(values[handle(n)] * factor).numpy().tobytes() for n, factor in enumerate((2.0, 3.0, 4.0), start=1)]
    assert [results[0] for _, _, results in answers] == expected


@pytest.mark.parametrize("place", ["__init__", "advance"])
def test_internal_error_fails_one_submission(monkeypatch, place):
    plain = getattr(TemplateRun, place)

    def broken(run, *given, **named):
        if (given[1] if place == "__init__" else run.work).sequence == 2:
            raise MemoryError("no room")
        return plain(run, *given, **named)

    monkeypatch.setattr(TemplateRun, place, broken)
    program = FakeClient()
    products(program, 4)
    answers, runs = program.run(2, matrices(5))
    assert runs >= 3
    assert [bool(failures) for _, failures, _ in answers] == [False, True, False, False]


@pytest.mark.parametrize("lanes", [1, 2])
def test_submissions_before_quota_end_are_answered(lanes):
    program, values = FakeClient(), matrices(5)
    program.quota = Quota(values=len(values) + 1)
    products(program, 4)
    with pytest.raises(QuotaExceeded):
        program.run(lanes, values)
    assert [number for number, _, _ in program.answers] == [1, 2]


def test_submissions_before_a_quota_that_begins_meanwhile_are_answered(monkeypatch):
    begun, plain = threading.Event(), TemplateRun.advance

    class Limited(FakeClient):
        def receive(self, timeout=None):
            if len(self._frames) == 1 and not begun.is_set():
                raise TimeoutError  # the last submission arrives after the quota has begun
            return super().receive(timeout)

    def limiting(run, stop=None):
        if run.work.sequence == 2:
            program.context.usage.quota = Quota(values=1)
            begun.set()
            time.sleep(0.2)  # the last submission arrives in the middle of the group
        return plain(run, stop)

    program = Limited()
    monkeypatch.setattr(TemplateRun, "advance", limiting)
    products(program, 4)
    with pytest.raises(QuotaExceeded):
        program.run(2, matrices(5))
    assert [number for number, _, _ in program.answers] == [1, 2, 3]


def test_fetch_precedes_later_consumption():
    program, values = FakeClient(), matrices(4)
    program.submit(CONSUME, [handle(1), handle(2)], [handle(100)])
    products(program, 1)
    program.fetch(handle(3))
    program.submit(CONSUME, [handle(1), handle(3)], [handle(101)], fetch=[handle(101)])
    answers, _ = program.run(2, values)
    expected = values[handle(3)], values[handle(1)] @ values[handle(3)]
    assert [results for _, _, results in answers[2:]] == [[one.numpy().tobytes()] for one in expected]
