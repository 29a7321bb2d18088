"""Sessions that share weights have the same template run together; what one of them does, or suffers, is its own."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time

import pytest
import torch

from djinn_core.errors import StartupError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Constant, Form, ListArg, Operand, SlotArg
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.frame_order import Prefix, split
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Completed, Goodbye, InitialBindings, Submit, Template, decode, encode
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.templates import digest_of
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.memory.limited import LimitedRuntime
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.run_strategies import begin_strategies
from djinn_server.running.drawing import draws_of
from djinn_server.running.fair_share import FairShare
from djinn_server.running.input_aliases import aliases_of
from djinn_server.running.run import TemplateRun
from djinn_server.running.template_compiler import compile_template
from djinn_server.session import ExecutorSession
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.weights.shared_weights import Origin, WeightKey
from djinn_strategies.batches import Batches
from djinn_strategies.batching import trial as trials
from djinn_strategies.batching.batch import BatchedTemplate, PendingRun
from djinn_strategies.batching.joined_runs import JoinedRuns
from djinn_strategies.batching.products import find_products
from djinn_strategies.batching.rows import find_chains, find_rows
from djinn_strategies.batching.trial import BatchTrial

GIVEN, WEIGHT, CACHE = (number << 32 | 1 for number in (1, 2, 3))
ROUNDS = trials.CHECKS + 2
_MM = Form("aten::mm", (Operand(), Operand()), (), ("new",), False)
_CAT = Form("aten::cat", (ListArg((Operand(), Operand())),), (), ("new",), False)
_GROW = Form("aten::add_.Tensor", (Operand(), Operand()), (), ("none",), False)
# What a decode step does: a product with a weight, a write in place, and a longer cache.
STEP = Template(
    (_MM, _GROW, _CAT),
    (0, 1, 2),
    (0, 1, 3, 0, 3, 2, 3, 4),  # values: given, weight, cache, product, longer cache
    (0, 1, 2),
    (3, 4),
    (2,),
)
_FLAT = Form("aten::view", (Operand(), ListArg((SlotArg(), SlotArg()))), (), ("new",), False)
_DEEP = Form("aten::view", (Operand(), ListArg((SlotArg(), SlotArg(), SlotArg()))), (), ("new",), False)
_TANH = Form("aten::tanh", (Operand(),), (), ("new",), False)
_HALVE = Form("aten::mul.Tensor", (Operand(), SlotArg()), (), ("new",), False)
_ADD = Form("aten::add.Tensor", (Operand(), Operand()), (), ("new",), False)
_NORM = Form("aten::layer_norm", (Operand(), ListArg((SlotArg(),))), (), ("new",), False)
# Two products, what lies between them in a model, and a longer cache.
BLOCK = Template(
    (_MM, _TANH, _HALVE, _ADD, _NORM, _DEEP, _FLAT, _CAT),
    (0, 1, 2, 3, 4, 5, 6, 0, 3, 7),
    (0, 1, 3, 3, 4, 4, 5, 5, 0, 6, 6, 7, 7, 8, 8, 9, 9, 1, 10, 10, 6, 11, 2, 11, 12),
    (0, 1, 2),
    (11, 12),
    (2,),
)
# A product that is scaled, a product of that, and a cache that keeps what was scaled.
SCALED = Template((_MM, _HALVE, _CAT), (0, 1, 0, 2), (0, 1, 3, 3, 4, 4, 1, 5, 2, 4, 6), (0, 1, 2), (5, 6), (2,))
SLOTS = {digest_of(STEP): (), digest_of(BLOCK): (0.5, 4, 1, 1, 4, 1, 4), digest_of(SCALED): (0.5,)}
_ORIGIN = Origin("file:model", WeightKey(bytes(32), "weight", 0, 64))


def output_handles(step):
    """Return the handles of the product and the cache of a step."""
    return [(2 * step + position) << 32 | 1 for position in (10, 11)]


class Client:
    """A client of an in-process executor session, without a network."""

    def __init__(self, context, weight, rows, exact=False, template=STEP, channel=PlainExecutorChannel):
        self.limits, self._frames, self._given = Limits(), [], threading.Semaphore(0)
        self.answers, self.submitted, self.length, self.template = [], 0, rows, template
        self.broken = False
        self.slots = SLOTS[digest_of(template)]
        self.session = ExecutorSession(context)
        for handle, value in ((GIVEN, torch.ones(1, 4) * rows), (WEIGHT, weight), (CACHE, torch.zeros(rows, 4))):
            self.session.values[handle] = value
        self.session._reads.shares.add(WEIGHT, _ORIGIN)
        self._thread = threading.Thread(target=self._serve, args=(channel(self),))
        self._thread.start()
        if not exact:
            self.enqueue(NumericSettings(exact=False))

    def _serve(self, channel):
        with contextlib.suppress(TransportError):
            self.session.serve(channel)

    def enqueue(self, *messages):
        for message in messages:
            self._frames.append(Frame(encode(message)))
            self._given.release()

    def receive(self, timeout=None):
        if not self._given.acquire(timeout=timeout):
            raise TimeoutError
        return self._frames.pop(0)

    def send(self, frame):
        if self.broken:
            raise TransportError("the client is gone")
        message = decode(frame.head)
        assert isinstance(message, Completed)
        self.answers.append((message, [bytes(part) for part in frame.body]))

    def step(self):
        self.submitted += 1
        cache = CACHE if self.submitted == 1 else output_handles(self.submitted - 1)[1]
        handles, made = pack_handles([GIVEN, WEIGHT, cache]), pack_handles(output_handles(self.submitted))
        digest = digest_of(self.template)
        first = InitialBindings(self.slots, handles)
        self.enqueue(
            Submit(self.submitted, digest=digest, template=self.template, first=first, outputs=made, fetch=made)
        )

    def results(self):
        message, body = self.answers[-1]
        data = iter(body)
        return [
            one
            if isinstance(one, Failure)
            else torch.frombuffer(bytearray(next(data)), dtype=torch.float32).view(one.shape)
            for one in message.results
        ]

    def leave(self):
        self.enqueue(Goodbye())
        self._thread.join()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def submit_together(context, clients):
    """Submit a step of each client while another session computes, and wait for their answers."""
    answered = [len(one.answers) for one in clients]
    with context.device.turns.share():
        for one in clients:
            one.step()
        wait_until(lambda: context.device.turns.waiting == len(clients))
    wait_until(lambda: all(len(one.answers) > before for one, before in zip(clients, answered, strict=True)))


def batch_strategy(context):
    """Return the batch strategy of an executor."""
    (found,) = [one for one in context.device.arbiter.strategies if isinstance(one, Batches)]
    return found


@pytest.fixture(params=trials.METHODS)
def context(request, monkeypatch):
    """Return an executor that always batches, by one method of joining products."""
    monkeypatch.setattr(trials, "GAIN", float("inf"))
    monkeypatch.setattr(trials, "METHODS", (request.param,))
    found = ExecutorContext.of(CpuRuntime())
    begin_strategies(found, [Batches()])
    return found


@pytest.fixture
def weight():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def close(clients):
    for one in clients:
        one.leave()


def test_sessions_of_one_model_are_batched_with_caches_of_any_length(context, weight):
    clients = [Client(context, weight, rows) for rows in (1, 2, 5)]
    expected = [[torch.ones(1, 4) * one.length, torch.zeros(one.length, 4)] for one in clients]
    for _ in range(ROUNDS):
        submit_together(context, clients)
        for one, values in zip(clients, expected, strict=True):
            product = values[0] @ weight
            values[:] = values[0] + product, torch.cat([values[1], product])
            found = one.results()
            torch.testing.assert_close(found[0], product)
            torch.testing.assert_close(found[1], values[1])
    counts = batch_strategy(context).counts
    assert (counts.batches, counts.batched_submissions) == (ROUNDS, 3 * ROUNDS)
    assert counts.batched_products == ROUNDS
    storages = [one.session.values[output_handles(one.submitted)[0]].untyped_storage() for one in clients]
    assert [storage.nbytes() for storage in storages] == [16] * 3, "each result has memory of its own"
    close(clients)


def expected_block(given, weight, cache):
    """Return the expected results of a step of `BLOCK`."""
    residual = 0.5 * torch.tanh(given @ weight) + given
    row = torch.nn.functional.layer_norm(residual, [4]) @ weight + residual
    return row, torch.cat([cache, row])


def test_ops_between_two_products_run_once_for_all_sessions(context, weight):
    clients = [Client(context, weight, rows, template=BLOCK) for rows in (1, 2, 5)]
    caches = [torch.zeros(one.length, 4) for one in clients]
    for _ in range(ROUNDS):
        submit_together(context, clients)
        for number, one in enumerate(clients):
            row, caches[number] = expected_block(torch.ones(1, 4) * one.length, weight, caches[number])
            torch.testing.assert_close(one.results(), [row, caches[number]])
    counts, decided = batch_strategy(context).counts, ROUNDS - trials.CHECKS
    assert counts.batched_products == 2 * ROUNDS
    assert counts.batched_rows == 7 * decided, "all but the products and the cache"
    storages = [one.session.values[output_handles(one.submitted)[0]].untyped_storage() for one in clients]
    assert [storage.nbytes() for storage in storages] == [16] * 3, "each result has memory of its own"
    assert len({storage.data_ptr() for storage in storages}) == 3
    close(clients)


def test_batch_separates_numbers_by_type_and_sign(context, weight):
    clients = [Client(context, weight, rows, template=SCALED) for rows in (1, 2, 3)]
    for _ in range(ROUNDS):
        submit_together(context, clients)
    assert batch_strategy(context).counts.batched_rows
    for slots in ((0.0, -0.0, 0.0), (-0.0, 0.0, 0), (0, -0.0, 0.0)):
        for one, slot in zip(clients, slots, strict=True):
            one.slots = (slot,)
        submit_together(context, clients)
        for one in clients:
            scaled = torch.ones(1, 4) * one.length @ weight * one.slots[0]
            assert torch.equal(one.results()[1][-1:].signbit(), scaled.signbit())
    close(clients)


def test_mismatched_operand_fails_only_its_session(context, weight):
    clients = [Client(context, weight, rows, template=BLOCK) for rows in (1, 2, 3)]
    for _ in range(ROUNDS):
        submit_together(context, clients)
    counts = batch_strategy(context).counts
    before = counts.batched_rows
    clients[1].session.values[GIVEN] = torch.ones(1, 5)
    for _ in range(3):
        submit_together(context, clients)
    assert all(isinstance(one, Failure) for one in clients[1].results())
    for one in (clients[0], clients[2]):
        row, _ = expected_block(torch.ones(1, 4) * one.length, weight, torch.zeros(1, 4))
        torch.testing.assert_close(one.results()[0], row)
        assert one.results()[1].shape == (one.length + one.submitted, 4)
    assert counts.batched_rows == before + 3 * 7, "the others are still computed together"
    close(clients)


def test_killed_client_does_not_affect_its_batch(context, weight, monkeypatch):
    clients = [Client(context, weight, rows, template=BLOCK) for rows in (1, 2, 3)]
    for _ in range(ROUNDS):
        submit_together(context, clients)
    dead, left = clients[1], [clients[0], clients[2]]
    plain = JoinedRuns.scatter

    def die_before_growth(joined, stop):
        plain(joined, stop)
        if not dead.broken:  # before the caches grow
            dead.broken = True
            dead.session.stop()

    monkeypatch.setattr(JoinedRuns, "scatter", die_before_growth)
    answered = [len(one.answers) for one in left]
    with context.device.turns.share():
        for one in clients:
            one.step()
        wait_until(lambda: context.device.turns.waiting == 3)
    wait_until(lambda: all(len(one.answers) > before for one, before in zip(left, answered, strict=True)))
    dead._thread.join()
    submit_together(context, left)
    for one in left:
        row, _ = expected_block(torch.ones(1, 4) * one.length, weight, torch.zeros(1, 4))
        torch.testing.assert_close(one.results()[0], row)
        assert one.results()[1].shape == (one.length + one.submitted, 4)
    assert batch_strategy(context).counts.batched_submissions == 3 * (ROUNDS + 1) + 2
    close(left)


class NumberedConnection:
    """A connection with numbered frames, so that another connection can resume its session."""

    def __init__(self, end, sent=0):
        self.end, self.limits, self.bytes_sent, self.bytes_received = end, Limits(), 0, 0
        self._sent, self._received = sent, 0

    def receive(self, timeout=None):
        frame = self.end.receive(timeout)
        self._sent += 1
        return Frame(Prefix(self._sent, self._received).encode() + frame.head, frame.body)

    def send(self, frame):
        self._received += 1
        self.end.send(Frame(split(frame)[1], frame.body))

    def close(self):
        """As `Connection.close`."""


def test_recovered_session_continues_from_batched_values(context, weight, monkeypatch, tmp_path):
    plain = BatchTrial._multiply
    monkeypatch.setattr(
        BatchTrial, "_multiply", lambda *given: None if (found := plain(*given)) is None else found + 1e-6
    )
    path, again = tmp_path / "one.journal", tmp_path / "two.journal"
    owner, channels = SessionIdentity("name", "a client", "secret", NO_TENANT), []

    def lease(line, journal):
        channels.append(LeasedConnection(line, 1.0, UsageMetrics(), journal=journal))
        return channels[-1]

    def lease_with_journal(end):
        return lease(NumberedConnection(end), Journal.begin(path, owner, 1 << 20, DiskQuota()))

    def recovered(end):
        past = JournalReader(again)
        channel = lease(NumberedConnection(end, past.taken), Journal.resume(again, past, 1 << 20, DiskQuota()))
        channel.replay(0)
        return channel

    clients = [
        Client(context, weight, 1, template=BLOCK, channel=lease_with_journal),
        Client(context, weight, 2, template=BLOCK),
    ]
    for _ in range(ROUNDS):
        submit_together(context, clients)
    shutil.copy(path, again)  # as the executor was killed here
    next_one = Client(context, weight, 1, exact=True, template=BLOCK, channel=recovered)
    wait_until(lambda: len(next_one.answers) == ROUNDS or not next_one._thread.is_alive())
    before, after = clients[0].results(), next_one.results()
    torch.testing.assert_close(after, before)
    assert not torch.equal(after[0], before[0]), "computed alone"
    next_one.submitted = ROUNDS
    next_one.step()
    wait_until(lambda: len(next_one.answers) == ROUNDS + 1)
    close([*clients, next_one])
    for channel in channels:
        channel.close()


def test_exact_sessions_and_other_weights_are_not_batched(context, weight):
    clients = [Client(context, weight, rows) for rows in (1, 2)]
    alone = [Client(context, weight, 3, exact=True), Client(context, weight.clone(), 4)]
    for _ in range(ROUNDS):
        submit_together(context, [*clients, *alone])
    counts = batch_strategy(context).counts
    assert (counts.batches, counts.batched_submissions) == (ROUNDS, 2 * ROUNDS)
    given = torch.ones(1, 4) * 3
    for _ in range(ROUNDS):
        product = given @ weight
        given += product
    assert torch.equal(alone[0].results()[0], product), "to the bit"
    close([*clients, *alone])


def test_template_with_faster_strategy_is_not_batched(context, weight):
    class WholeStrategy(RunStrategy, RunOffer):
        name = "whole"

        def acts_on(self, template):
            return self

        def run(self, run):
            yield from run.advance()

    context.device.arbiter.register(WholeStrategy())
    clients, counts = [Client(context, weight, rows) for rows in (1, 2)], batch_strategy(context).counts
    submit_together(context, clients)
    assert counts.batches == 1
    (choice,) = context.device.arbiter._choices.values()
    choice.candidates[0].used = True
    submit_together(context, clients)
    assert counts.batches == 1
    close(clients)


def test_failure_and_cancellation_stay_in_their_session(context, weight):
    clients = [Client(context, weight, rows) for rows in (1, 2, 3, 4)]
    clients[1].session.values[CACHE] = torch.zeros(2, 5)  # as long as nothing fits
    for _ in range(ROUNDS):
        submit_together(context, clients)
    failed, cancelled = clients[1], clients[2]
    assert isinstance(failed.results()[1], Failure), "its cache does not fit"
    answered = [len(one.answers) for one in clients]
    with context.device.turns.share():
        for one in clients:
            one.step()
        wait_until(lambda: context.device.turns.waiting == len(clients))
        cancelled.session.stop()
    wait_until(lambda: all(len(one.answers) > before for one, before in zip(clients, answered, strict=True)))
    assert {result.kind for result in cancelled.results()} == {"ProgramStopped"}
    for one in (clients[0], clients[3]):
        assert one.results()[1].shape == (one.length + one.submitted, 4)
        assert not one.answers[-1][0].failures
    assert batch_strategy(context).counts.batched_submissions == 4 * (ROUNDS + 1)
    close(clients)


def test_internal_error_fails_only_its_session(context, weight, monkeypatch):
    clients = [Client(context, weight, rows) for rows in (1, 2, 3)]
    broken = clients[1].session.values
    monkeypatch.setattr(
        "djinn_strategies.batching.batch.TemplateRun.finish",
        lambda run, plain=TemplateRun.finish: (
            (_ for _ in ()).throw(KeyError("broken")) if run._values is broken else plain(run)
        ),
    )
    submit_together(context, clients)
    assert {result.kind for result in clients[1].results()} == {"KeyError"}
    assert all(isinstance(result, torch.Tensor) for one in (clients[0], clients[2]) for result in one.results())
    close(clients)


@pytest.mark.parametrize(("owner", "method"), [(BatchedTemplate, "join"), (PendingRun, "ended")])
def test_raising_batch_is_disabled_and_fails_no_session(context, weight, monkeypatch, caplog, owner, method):
    def fail(self, *_):
        raise KeyError("broken")

    monkeypatch.setattr(owner, method, fail)
    clients = [Client(context, weight, rows) for rows in (1, 2)]
    for _ in range(2):
        submit_together(context, clients)
        assert all(isinstance(result, torch.Tensor) for one in clients for result in one.results())
    assert context.device.arbiter.strategies == []
    assert sum("switched off" in record.getMessage() for record in caplog.records) == 1
    close(clients)


def test_batch_time_is_charged_in_equal_parts(context, weight):
    clients = [Client(context, weight, rows) for rows in (1, 2)]
    for _ in range(3):
        submit_together(context, clients)
    assert len({one.answers[-1][0].timing.execute for one in clients}) == 1
    close(clients)


def test_slow_batch_is_disabled_and_retried_with_twice_the_sessions(context, weight, monkeypatch):
    monkeypatch.setattr(trials, "GAIN", 0.0)
    clients = [Client(context, weight, rows) for rows in (1, 2, 3, 4)]
    counts = batch_strategy(context).counts
    for _ in range(ROUNDS):
        submit_together(context, clients[:2])
    assert counts.batches == trials.CHECKS
    assert not batch_strategy(context).packed.nbytes, "unused copies are freed"
    for _ in range(2):
        submit_together(context, clients[:3])
    assert counts.batches == trials.CHECKS
    submit_together(context, clients)
    assert counts.batches == trials.CHECKS + 1
    close(clients)


def test_different_batch_results_are_not_used(context, weight, monkeypatch):
    plain = trials.BatchTrial._multiply
    monkeypatch.setattr(
        trials.BatchTrial, "_multiply", lambda *given: None if (found := plain(*given)) is None else found + 1e-3
    )
    clients = [Client(context, weight, rows) for rows in (1, 2)]
    for _ in range(ROUNDS):
        submit_together(context, clients)
    assert all(torch.equal(one.results()[1][-1], one.results()[0][0]) for one in clients)
    given = torch.ones(1, 4) * 2
    for _ in range(ROUNDS):
        product = given @ weight
        given += product
    assert torch.equal(clients[1].results()[0], product)
    close(clients)


def test_single_session_does_not_wait_for_batch(context, weight):
    clients = [Client(context, weight, rows) for rows in (1, 2)]
    submit_together(context, clients)
    assert len(clients[0].session._turn.group) == 2
    clients[1].leave()
    for _ in range(2):
        submit_together(context, clients[:1])
    assert not clients[0].session._turn.group
    close(clients[:1])


def test_started_submission_is_not_batched():
    turns = FairShare(moment=0.0)
    lead, paused, whole = turns.share(), turns.share(), turns.share()
    done, asked = [], []

    def take(name, parts):
        for _ in range(parts):
            yield
        done.append(name)

    def gather_others():
        wait_until(lambda: turns.waiting == 2)
        turns.gather(lead, lambda pending: asked.append(pending) or True, 0.0, range(1, 32))
        turns.release(lead)
        done.append("lead")
        yield from ()

    with turns.share():
        threads = [
            threading.Thread(target=turns.run, args=(one, steps, name))
            for one, steps, name in ((paused, take("paused", 1), "a"), (lead, gather_others(), "b"))
        ]
        threads[0].start()
        wait_until(lambda: turns.waiting == 1)
        threads[1].start()
        wait_until(lambda: turns.waiting == 2)
    threads.append(threading.Thread(target=turns.run, args=(whole, take("whole", 0), "c")))
    threads[2].start()
    for thread in threads:
        thread.join(60)
    assert asked == ["c"]
    assert done == ["whole", "lead", "paused"]


def test_products_by_written_weights_are_not_batched():
    dropout = Form(
        "aten::scaled_dot_product_attention",
        (Operand(), Operand(), Operand(), Constant(None), SlotArg()),
        (),
        ("new",),
        False,
    )
    view = Form("aten::t", (Operand(),), (), ("new",), False)
    written = Template((view, _MM, _GROW), (0, 1, 1, 2), (1, 3, 0, 3, 4, 4, 2, 5, 2, 5), (0, 1, 2), (5,))
    own = ExecutorContext.of(CpuRuntime()).device.own
    compiled = compile_template(written, torch.device("cpu"), own)
    products = find_products(compiled, aliases_of(compiled, own))
    assert [(one.step, one.source) for one in products] == [(1, 1)], "not by a weight that is written"
    attention = Template((dropout,), (0,), (0, 1, 2, 3), (0, 1, 2), (3,))
    draws = draws_of(compile_template(attention, torch.device("cpu"), own))
    assert draws.first_draw([0.0]) is None
    assert draws.first_draw([0.1]) == 0


def test_only_row_wise_ops_without_shared_memory_are_joined():
    own = ExecutorContext.of(CpuRuntime()).device.own
    compiled = compile_template(BLOCK, torch.device("cpu"), own)
    rows = find_rows(compiled, aliases_of(compiled, own).written_inputs)
    assert [row.step for row in rows.steps] == [1, 2, 3, 4, 5, 6, 8]
    products = find_products(compiled, aliases_of(compiled, own))
    assert find_chains(products, rows.steps, None) == (range(9),)
    assert find_chains(products, rows.steps, {1, 2, 5, 8}) == (range(3), range(7, 9))
    assert find_chains(products, rows.steps, {3, 5}) == (range(1), range(7, 8))
    # a view of an input, one of two outputs in the same memory, and a value that is written
    viewed = Template((_FLAT, _TANH, _GROW), (0, 1, 0, 1, 2), (0, 1, 1, 2, 2, 3, 0, 4, 4, 0), (0,), (1, 2, 3))
    compiled = compile_template(viewed, torch.device("cpu"), own)
    assert [row.step for row in find_rows(compiled, aliases_of(compiled, own).written_inputs).steps] == [1]


def test_batches_are_refused_with_memory_limit():
    context = ExecutorContext.of(LimitedRuntime(CpuRuntime(), 1 << 20, DiskQuota()))
    with pytest.raises(StartupError, match="--memory-gib"):
        begin_strategies(context, [Batches()])
