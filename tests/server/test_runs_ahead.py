"""Runs ahead in a session of this process, message by message: which submissions have run before they came, and which not."""

from __future__ import annotations

import contextlib
import socket
import threading

import attrs
import pytest
import torch
from bound_changes import changes
from servers import wait_for

from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Form, Operand, SlotArg
from djinn_core.protocol.net.sockets import SocketConnection
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.messages import (
    Claim,
    Completed,
    Goodbye,
    InitialBindings,
    StatsReply,
    StatsRequest,
    Submit,
    Template,
    decode,
    encode,
)
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.compilers import Compiler
from djinn_server.memory.limited import LimitedRuntime
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.run_strategies import begin_strategies
from djinn_server.running import arbiter, expected_runs, runs_ahead
from djinn_server.running.arbiter import TrialLimits
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import ValueTable
from djinn_server.session import ExecutorSession
from djinn_server.weights.shared_weights import Origin, WeightKey
from djinn_strategies.compiled import CompiledTemplates
from djinn_strategies.compiling import region
from djinn_strategies.compiling.hot_template import AdoptedPhase, CheckingPhase, Thresholds

SECONDS = 60.0
ORIGIN = Origin("file:x", WeightKey(bytes(32), "x", 0, 16))
MATRIX, FIRST = 1 << 32 | 1, 2 << 32 | 1


def form(op, *arguments, made="new"):
    return Form(f"aten::{op}", arguments, (), (made,), False)


# x @ w + n: over the result of the time before, with a number that grows.
STEP = Template(
    (form("mm", Operand(), Operand()), form("add.Scalar", Operand(), SlotArg())), (0, 1), (0, 1, 2, 2, 3), (0, 1), (3,)
)
RANDOM = Template((form("rand_like", Operand()),), (0,), (0, 1), (0,), (1,))
WRITING = Template((form("mul_.Scalar", Operand(), SlotArg(), made="none"),), (0,), (0,), (0,), ())


class InProcessClient:
    """A client of a session in a thread of this process."""

    def __init__(self, ahead_bytes, limit=None, compiler=None):
        ours, theirs = socket.socketpair()
        runtime = CpuRuntime() if limit is None else LimitedRuntime(CpuRuntime(), limit, DiskQuota())
        self.context = attrs.evolve(ExecutorContext.of(runtime), ahead_bytes=ahead_bytes)
        if compiler is not None:
            limits = Thresholds(runs=2, seconds=0.0, observed=2, checks=1)
            begin_strategies(self.context, [CompiledTemplates(limits)], (compiler,))
        self.session = ExecutorSession(self.context)
        self.connection = SocketConnection(ours, Limits(), "test")
        self.channel = PlainExecutorChannel(SocketConnection(theirs, Limits(), "test"))
        self.thread = threading.Thread(target=self.session.serve, args=(self.channel,))
        self.thread.start()
        self.bound = {}  # by template: inputs and slots
        self.submissions = 0
        self.made = FIRST
        self.latest = FIRST
        self.values = {}
        for handle, value in ((MATRIX, torch.eye(2) * 2), (FIRST, torch.ones(2, 2))):
            self.upload(handle, value)

    def send(self, message, body=()):
        self.connection.send(Frame(encode(message), body))

    def upload(self, handle, value):
        self.send(UploadPart(handle, "float32", (2, 2), (2, 1), 16), [value.numpy().tobytes()])
        self.values[handle] = value

    def submit(self, template, inputs, slots=(), outputs=(), **others):
        digest = digest_of(template)
        before = self.bound.get(digest)
        given = {"template": template, "first": InitialBindings(tuple(slots), pack_handles(inputs))}
        if before is not None:
            of_inputs, of_slots = changes(before, (inputs, slots))
            given = {"slot_changes": of_slots, "input_changes": of_inputs}
        self.bound[digest] = list(inputs), list(slots)
        self.submissions += 1
        self.send(Submit(self.submissions, digest=digest, outputs=pack_handles(outputs), **given, **others))
        return self.answer()

    def answer(self):
        frame = self.connection.receive(SECONDS)
        message = decode(frame.head)
        if isinstance(message, Completed):
            assert not message.failures, message.failures
            return [torch.frombuffer(bytearray(one), dtype=torch.float32).reshape(2, 2) for one in frame.body]
        return message

    def step(self, number, given=None, matrix=MATRIX, **others):
        """Run STEP once. Fetch its result and compare it."""
        given = self.latest if given is None else given
        self.made += 1 << 32
        fetched = self.submit(STEP, [given, matrix], [number], [self.made], fetch=pack_handles([self.made]), **others)
        self.values[self.made] = self.values[given] @ self.values[matrix] + number
        self.latest = self.made
        assert torch.equal(fetched[0], self.values[self.made])

    @property
    def pending(self):
        return self.session._runs.ahead.pending

    @property
    def counts(self):
        return self.session._counts.runs_ahead, self.session._counts.runs_ahead_dropped

    def end(self):
        with contextlib.suppress(OSError):
            self.send(Goodbye())
        self.thread.join(SECONDS)
        self.session.close()
        self.connection.close()
        self.channel.close()


@pytest.fixture
def dialogue(monkeypatch):
    monkeypatch.setattr(expected_runs, "MIN_STEP_SECONDS", 0.0)
    begun = []

    def begin(ahead_bytes=1 << 20, limit=None, compiler=None):
        begun.append(InProcessClient(ahead_bytes, limit, compiler))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def run_until_ahead(found):
    """Run six steps. Wait until the seventh has run before its submission."""
    for number in range(6):
        found.step(number)
    wait_for(lambda: len(found.pending) == 1 and found.pending[0].is_finished, "the run ahead")
    assert found.counts[1] == 0
    return found


@pytest.fixture
def client_ahead(dialogue):
    """Return a client whose seventh step has run before its submission."""
    return run_until_ahead(dialogue())


def test_expected_submission_uses_run_ahead(client_ahead):
    taken = client_ahead.counts[0]
    assert taken <= 3, "a relation is relied on once it was found again"
    for number in range(6, 20):
        result = client_ahead.pending and client_ahead.pending[0].output(0)
        client_ahead.step(number)
        assert client_ahead.session.values[client_ahead.latest] is result
        wait_for(lambda: client_ahead.pending and client_ahead.pending[0].is_finished, "the next run ahead")
    assert client_ahead.counts == (taken + 14, 0)


@pytest.mark.parametrize(
    "others",
    [
        {"given": FIRST},
        {"number": 7},
        {"number": 6.0},
        {"claims": (Claim(1, 0, (2, 2), (2, 1), "float32"),)},
    ],
)
def test_other_submission_drops_run_ahead(client_ahead, others):
    taken, _ = client_ahead.counts
    if "claims" in others:
        others = {"given": client_ahead.latest} | others
    client_ahead.step(**{"number": 6} | others)
    assert client_ahead.counts == (taken, 1)
    assert not client_ahead.pending


@pytest.mark.parametrize("handle", [MATRIX, FIRST, None])
def test_run_ahead_over_written_value_is_dropped(client_ahead, handle):
    written = client_ahead.latest if handle is None else handle
    taken, _ = client_ahead.counts
    client_ahead.submit(WRITING, [written], [3.0])
    client_ahead.values[written] = client_ahead.values[written] * 3.0
    assert client_ahead.counts == (taken, 1)
    for number in range(6, 12):
        client_ahead.step(number)


def test_write_of_other_session_keeps_run_ahead(dialogue, client_ahead):
    other = dialogue()
    other.step(0)
    memory = client_ahead.session.values[MATRIX].untyped_storage()
    with torch.inference_mode():
        other.session.values[MATRIX] = torch.empty(0).set_(memory, 0, (2, 2), (2, 1))
    for one in (client_ahead, other):
        one.session._reads.shares.add(MATRIX, ORIGIN)
    other.submit(WRITING, [MATRIX], [3.0])
    other.values[MATRIX] = other.values[MATRIX] * 3.0
    taken, _ = client_ahead.counts
    client_ahead.step(6)  # which had run ahead
    assert client_ahead.counts == (taken + 1, 0)
    for number in range(1, 4):
        wait_for(lambda: client_ahead.pending and client_ahead.pending[0].is_finished, "the next run ahead")
        client_ahead.step(6 + number)
        other.step(number)
    assert client_ahead.counts == (taken + 4, 0)


def test_replaced_values_drop_run_ahead(client_ahead):
    taken, _ = client_ahead.counts
    value = client_ahead.session.values[MATRIX]
    client_ahead.session.values.free([MATRIX])
    client_ahead.session.values[MATRIX] = value.clone()  # as after another upload, or a value that comes back from disk
    client_ahead.step(6)
    assert client_ahead.counts == (taken, 1)


def test_only_uploads_keep_run_ahead(client_ahead):
    taken, _ = client_ahead.counts
    client_ahead.upload(90 << 32 | 1, torch.ones(2, 2))
    client_ahead.step(6)
    assert client_ahead.counts == (taken + 1, 0)
    wait_for(lambda: client_ahead.pending and client_ahead.pending[0].is_finished, "the run ahead")
    client_ahead.send(CancelSubmissions((99,)))
    client_ahead.send(StatsRequest())
    assert isinstance(client_ahead.answer(), StatsReply)
    assert client_ahead.counts == (taken + 1, 1)
    client_ahead.step(7)


def test_miss_raises_required_confidence(client_ahead):
    for number in range(6, 40):
        client_ahead.step(number if number % 4 else 0)
    assert client_ahead.counts[1] <= 4


def test_unused_run_ahead_expires(dialogue, monkeypatch):
    monkeypatch.setattr(runs_ahead, "MAX_RESULT_AGE", 0.01)
    found = dialogue()
    for number in range(6):
        found.step(number)
    wait_for(lambda: found.counts[1], "the end of the wait")
    assert not found.pending
    assert len(found.session.values) == 8


def test_session_end_drops_run_ahead(client_ahead):
    client_ahead.end()
    assert not client_ahead.pending
    assert len(client_ahead.session.values) == 0


def test_no_run_ahead_during_other_turn(dialogue):
    turns = dialogue().context.device.turns
    other, share = turns.share(), turns.share()
    with other:
        assert not turns.begin_if_free(share)
    assert turns.begin_if_free(share)
    waits = threading.Thread(target=other.__enter__)
    waits.start()
    wait_for(lambda: turns.waiting, "the other session")
    turns.leave(share, returns=False)
    waits.join(SECONDS)
    assert turns.take_seconds(share) > 0.0
    other.__exit__(None, None, None)


# x @ w, then a write into x, or random numbers; and its sum with the product.
PRODUCT, SUM = form("mm", Operand(), Operand()), form("add.Tensor", Operand(), Operand())
WRITING_LATER = Template(
    (PRODUCT, form("mul_.Scalar", Operand(), SlotArg(), made="none"), SUM),
    (0, 1, 2),
    (0, 1, 2, 0, 2, 0, 3),
    (0, 1),
    (3,),
)
RANDOM_LATER = Template(
    (PRODUCT, form("rand_like", Operand()), SUM), (0, 1, 2), (0, 1, 2, 2, 3, 2, 3, 4), (0, 1), (3, 4)
)


@pytest.mark.parametrize(
    ("template", "count"), [(STEP, 2), (RANDOM, 0), (WRITING, 0), (WRITING_LATER, 1), (RANDOM_LATER, 1)]
)
def test_programs_with_side_effects_do_not_run_ahead(dialogue, template, count):
    found = dialogue()
    device = found.context.device
    known = found.session._runs.bind(compile_template(template, torch.device("cpu"), device.own), b"")
    unwritten = found.session._runs.ahead._may_run(known)
    draws = known.draws.first_draw([1.0])
    assert (unwritten if draws is None else min(unwritten, draws)) == count


def until_begun(found):
    wait_for(lambda: found.pending and found.pending[0].step == 1, "the run ahead")
    assert not found.pending[0].is_finished


def test_ops_before_write_run_ahead(dialogue):
    found = dialogue()
    expected = found.values[FIRST]
    for number in range(12):
        found.made += 1 << 32
        if number > 6:
            until_begun(found)
        fetched = found.submit(
            WRITING_LATER, [FIRST, MATRIX], [3.0], [found.made], fetch=pack_handles([FIRST, found.made])
        )
        product = expected @ found.values[MATRIX]
        expected = expected * 3.0
        assert torch.equal(fetched[0], expected)
        assert torch.equal(fetched[1], expected + product)
    assert found.counts[0] >= 5
    assert found.counts[1] == 0


def draw_in_steps(found, *, ahead):
    torch.manual_seed(7)
    drawn = []
    for number in range(12):
        found.made += 2 << 32
        made = [found.made, found.made + 1]
        if ahead and number > 6:
            until_begun(found)
        drawn += found.submit(RANDOM_LATER, [FIRST, MATRIX], [], made, fetch=pack_handles(made))
    return drawn


def test_ops_before_random_numbers_run_ahead(dialogue):
    found = dialogue()
    expected = draw_in_steps(dialogue(0), ahead=False)
    assert all(map(torch.equal, draw_in_steps(found, ahead=True), expected))
    assert found.counts[0] >= 5
    assert found.counts[1] == 0
    assert len({float(one.sum()) for one in expected}) == 24


def test_random_numbers_follow_submission_order(dialogue):
    found = dialogue()
    drawn = []
    for _ in range(8):
        found.made += 1 << 32
        drawn += found.submit(RANDOM, [FIRST], [], [found.made], fetch=pack_handles([found.made]))
    assert found.counts == (0, 0)
    assert len({float(one.sum()) for one in drawn}) == 8


def test_zero_limit_disables_run_ahead(dialogue):
    found = dialogue(0)
    for number in range(8):
        found.step(number)
    assert found.session._runs.ahead is None


def test_oversized_program_runs_ahead_once(dialogue):
    found = dialogue(1)
    for number in range(20):
        found.step(number)
    assert found.counts[0] <= 1


class CountingCompiler(Compiler):
    """A fake compiler that counts the runs of unchanged graphs."""

    name, runs = "as it is", 0

    def compile(self, context):
        def replay(inputs):
            self.runs += 1
            return context.graph_module(*inputs)

        return replay


@pytest.fixture
def compiled_client(dialogue, monkeypatch):
    """Return a client with a compiler whose next step has run ahead, and the compiler."""
    monkeypatch.setattr(region, "SHORTEST", 1)
    monkeypatch.setattr(arbiter, "TrialLimits", lambda: TrialLimits(max_timed=1, max_ratio=float("inf")))
    compiler = CountingCompiler()
    found = dialogue(compiler=compiler)
    for number in range(20):
        found.step(0.5)
        if number == 3:
            wait_for(lambda: type(hot_template(found).phase).__name__ != "CompilingPhase", "the compiler")
    assert type(hot_template(found).phase) is AdoptedPhase
    wait_for(lambda: found.pending and found.pending[0].is_finished, "the run ahead")
    return found, compiler


def hot_template(dialogue):
    return next(iter(dialogue.context.device.arbiter.strategies[0].templates))


def test_compiled_program_runs_ahead(compiled_client):
    found, compiler = compiled_client
    (taken, dropped), runs = found.counts, compiler.runs
    for _ in range(4):
        found.step(0.5)
        wait_for(lambda: found.pending and found.pending[0].is_finished, "the next run ahead")
    assert found.counts == (taken + 4, dropped)
    assert compiler.runs == runs + 4


def test_started_run_ahead_continues_compiled(compiled_client):
    found, compiler = compiled_client
    pending, runs = found.pending[0], compiler.runs
    again = runs_ahead.RunAhead(pending.bound, pending.expected, pending.slots, pending.inputs, pending.stop)
    assert again.step == 0
    work = RunRequest(0, outputs=[5 << 32 | 1], fetch=[], describe=[], free=[], claims=(), synchronize=False)
    work.inputs = list(pending.bound.inputs)
    again.finish(work, ValueTable(), 1 << 20)
    assert compiler.runs == runs + 1
    assert torch.equal(again.output(0), pending.output(0))


def test_watched_template_does_not_run_ahead(compiled_client):
    found, _ = compiled_client
    (known,) = [known for _, known in found.session._templates.entries()]
    assert found.session._runs.ahead._may_run(known)
    compilation = hot_template(found)
    compilation.phase = CheckingPhase(compilation, compilation.phase.job, compilation.phase.compiled)
    assert not found.session._runs.ahead._may_run(known)


def test_long_compiled_program_does_not_run_ahead(compiled_client, monkeypatch):
    found, _ = compiled_client
    monkeypatch.setattr(runs_ahead, "MAX_COMPILED_SECONDS", 0.0)
    taken = found.counts[0]
    for _ in range(4):
        found.step(0.5)
    assert found.counts[0] == taken + 1


def test_no_run_ahead_under_memory_limit(dialogue):
    found = dialogue(limit=1 << 30)
    for number in range(14):
        found.step(number)
    assert found.session._runs.ahead is None
