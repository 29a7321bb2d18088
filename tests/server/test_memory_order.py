"""Order in which sessions make room and values are restored, on one device with a limit, without a process around them."""

from __future__ import annotations

import errno
import itertools

import attrs
import pytest
import torch

from djinn_core.ir.form import Form, Operand
from djinn_core.ir.handles import make_handle
from djinn_core.wire.messages import Template
from djinn_core.wire.peer_messages import Item, View
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.disk_quota import DiskQuota
from djinn_server.memory.ledger import CRITICAL, NONE, WARNING, Ledger
from djinn_server.memory.limited import LimitedRuntime
from djinn_server.memory.process import ProcessMemory
from djinn_server.memory.session_memory import SessionMemory
from djinn_server.memory.spill import FileSpill
from djinn_server.memory.uses import PAST_RUNS, UNSEEN
from djinn_server.peers.packed_values import pack_copies, pack_storages, unpack_item
from djinn_server.running.run import TemplateRun, run_template
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import ValueTable
from djinn_server.value_kinds import ValueKinds

MIB = 1 << 20
CPU = torch.device("cpu")
RELU, NEG, ABS, EXP = (
    Form(f"aten::{name}", (Operand(),), (), ("new",), False) for name in ("relu", "neg", "abs", "exp")
)
ADD = Form("aten::add.Tensor", (Operand(), Operand()), (), ("new",), False)
CLEAR = Form("aten::zero_", (Operand(),), (), (), False)


@attrs.define
class Program:
    """Steps over numbered values. The inputs have the first numbers."""

    inputs: int
    steps: list

    def template(self):
        forms = tuple(dict.fromkeys(form for form, *_ in self.steps))
        code = tuple(forms.index(form) for form, *_ in self.steps)
        references = tuple(itertools.chain.from_iterable(places for _, *places in self.steps))
        return Template(forms, code, references, tuple(range(self.inputs)), (references[-1],))


class Session:
    """A client session with values of 1 MB each."""

    def __init__(self, ledger, number):
        self.values = ValueTable()
        self.memory = SessionMemory(ledger, self.values, ValueKinds(self.values, at_once=True))
        self.handles = (make_handle(number * 1000 + n, 1) for n in itertools.count())
        self.ledger = ledger

    def give(self, value):
        self.ledger.admit(MIB)
        handle = next(self.handles)
        with torch.inference_mode():
            self.values[handle] = torch.full((MIB // 4,), float(value))
        return handle

    def run(self, program, inputs, name=b"p"):
        output = next(self.handles)
        work = RunRequest(1, [output], [], [], [], (), False, list(inputs))
        template = compile_template(program.template(), CPU, {})
        run = self.memory.run(name, template, work, [], lambda: run_template(template, work, [], self.values))
        assert not run.failures, run.failures
        return output

    def is_here(self, handle):
        return not self.ledger.is_evicted(self.values[handle])

    def read(self, handle):
        self.ledger.reload(self.values[handle])
        return self.values[handle][0].item()


@pytest.fixture
def ledger():
    """Return the memory ledger of a device with 16 MiB, 2 of them reserved for ops."""
    made = Ledger(CpuRuntime(), 16 * MIB, (FileSpill(DiskQuota()),))
    made.process = ProcessMemory(16 * MIB, None, reserve=2 * MIB)
    yield made
    made.spill_spaces[0].close()


def sum_in_order(count):
    """Return a program that adds up its inputs in order."""
    steps, total = [], 0
    for n in range(1, count):
        steps.append((ADD, total, n, count + n))
        total = count + n
    return Program(count, steps)


def test_pressure_follows_held_memory(ledger):
    session = Session(ledger, 1)
    levels = []
    for n in range(20):
        session.give(n)
        levels.append(ledger.pressure.level)
    assert levels[10] == NONE
    assert levels[12] == WARNING
    assert levels[-1] == CRITICAL
    session.memory.close()
    Session(ledger, 2).give(1)
    assert ledger.pressure.level == NONE


def test_value_used_last_is_evicted_first(ledger):
    session = Session(ledger, 1)
    given = [session.give(n) for n in range(20)]
    program = sum_in_order(20)
    for _ in range(3):
        assert session.read(session.run(program, given)) == sum(range(20))
    # The next run begins with the first ones again: what was used last is furthest from being used.
    here = [session.is_here(handle) for handle in given]
    assert sum(here[:10]) > sum(here[10:])
    # Half of what does not fit has to be fetched once a run, as little as can be.
    before = ledger.counts.restored
    session.run(program, given)
    assert ledger.counts.restored - before <= 12 * MIB


def test_uses_far_from_limit_are_noted_lazily(ledger):
    session = Session(ledger, 1)
    first, second, third = given = [session.give(n) for n in range(3)]
    program = Program(1, [(RELU, 0, 1)])

    def use(handle):
        session.values.free([session.run(program, [handle])])

    def steps_since():
        ledger.survey()
        return [ledger.clock - session.memory.uses.last([handle], ledger.clock) for handle in given]

    use(first)
    for _ in range(PAST_RUNS):
        use(second)
    use(third)
    assert steps_since() == [PAST_RUNS + 1, 2, 1], "of the first run it is only known that it was before the others"
    use(second)
    assert steps_since() == [PAST_RUNS + 2, 1, 2]


def test_idle_session_is_evicted_first(ledger):
    rests, works = Session(ledger, 1), Session(ledger, 2)
    resting = [rests.give(n) for n in range(8)]
    for _ in range(2):
        rests.values.free([rests.run(sum_in_order(8), resting)])
    given = [works.give(n) for n in range(6)]
    ledger.clock += 2 * UNSEEN  # steps of others
    works.values.free([works.run(sum_in_order(6), given)])
    before = ledger.counts.restored
    given += [works.give(n) for n in range(6, 9)]
    works.run(sum_in_order(9), given, b"larger")
    assert ledger.counts.restored == before
    assert all(works.is_here(handle) for handle in given[:6])
    assert [rests.read(handle) for handle in resting] == list(range(8))


def test_results_inherit_use_of_last_run(ledger):
    """Each run makes new storages. The uses of the first ones predict those of later ones."""
    session = Session(ledger, 1)
    make, use = Program(1, [(RELU, 0, 1)]), Program(1, [(NEG, 0, 1)])
    source = session.give(1)
    for turn in range(3):
        made = session.run(make, [source], b"make")
        for _ in range(4):
            session.values.free([session.run(use, [source], b"between")])
        if turn == 2:
            found = {h: holding for holding in ledger.survey().values() for h in holding.holders[session.memory]}
            now = ledger.clock - 4
            assert ledger.steps_until_use(found[made], now) == 4
            return
        session.values.free([session.run(use, [made], b"use"), made])
    raise AssertionError


def fan(width, between=()):
    """Return a program that makes `width` values of one, and adds them up in reverse order."""
    steps = [((RELU, NEG, ABS, EXP)[n % 4], 0, n + 1) for n in range(width)]
    steps += between
    total = width
    for n in range(width - 1, 0, -1):
        steps.append((ADD, total, n, 2 * width - n + 1))
        total = 2 * width - n + 1
    return Program(1, steps)


def expected(width):
    x = torch.full((MIB // 4,), 2.0)
    made = [(torch.relu, torch.neg, torch.abs, torch.exp)[n % 4](x) for n in range(width)]
    total = made[-1]
    for value in reversed(made[:-1]):
        total = total + value
    return total


def test_temporaries_spill_and_return(ledger):
    session = Session(ledger, 1)
    output = session.run(fan(20, [(CLEAR, 0)]), [session.give(2)])
    ledger.reload(session.values[output])
    assert torch.equal(session.values[output], expected(20))
    assert ledger.counts.spilled
    assert ledger.peak <= 16 * MIB


def test_values_in_use_are_not_evicted_by_request():
    """A program without a memory guard pauses between ops, while other sessions share its weights."""
    runtime = LimitedRuntime(CpuRuntime(), 0, DiskQuota())
    asks, runs = Session(runtime.ledger, 1), Session(runtime.ledger, 2)
    given = asks.give(3)
    shared, output = make_handle(2001, 1), make_handle(2002, 1)
    runs.values[shared] = asks.values[given].detach()
    work = RunRequest(1, [output], [], [], [], (), False, [shared])
    template = compile_template(Program(1, [(NEG, 0, 1), (ADD, 1, 0, 2)]).template(), CPU, {})
    with runs.memory.on_demand(b"p", template, work) as guard:
        run = TemplateRun(template, work, [], runs.values, guard=guard)
        run.advance(1)
        asks.memory.caches("evict", [given])
        run.advance()
        assert not run.finish().failures
    assert runs.values[output].eq(0.0).all()
    deliver = runtime.start_delivery(asks.values[given])
    asks.memory.caches("evict", [given])
    assert deliver().eq(3.0).all()
    assert asks.memory.caches("evict", [given]).resident == 0, "now nothing uses it"


def test_full_disk_lets_weights_of_files_make_room(ledger, monkeypatch):
    session = Session(ledger, 1)
    given = [session.give(n) for n in range(14)]
    weight = given[0]  # used last, so the others go first

    class File:
        def unchanged(self):
            return True

        def read_into(self, buffer):
            buffer[:] = bytes(len(buffer))

    def refuse(data):
        raise OSError(errno.ENOSPC, "No space left on device")

    session.run(sum_in_order(2), [weight, weight])
    ledger.set_source(session.values[weight], File())
    monkeypatch.setattr(ledger.spill_spaces[0], "write", refuse)
    here = [handle for handle in given if session.is_here(handle)]
    assert weight in here
    session.give(99)
    assert [handle for handle in here if not session.is_here(handle)] == [weight]


@pytest.mark.parametrize("pack", [pack_copies, pack_storages])
def test_spilled_value_is_transferred_whole(pack):
    runtime = LimitedRuntime(CpuRuntime(), 16 * MIB, DiskQuota())
    ledger = runtime.ledger
    ledger.process = ProcessMemory(16 * MIB, None)
    session = Session(ledger, 1)
    given = []
    for n in range(20):
        handle = session.give(n)
        session.values[handle + 1] = session.values[handle].view(512, 512)[:, :256]  # with gaps between its elements
        given.append(handle)
    assert not all(session.is_here(handle) for handle in given)
    wanted = [handle + 1 for handle in given] if pack is pack_copies else given
    for item, data in pack(wanted, session.values, runtime, 0):
        for handle, value in unpack_item(item, data, CpuRuntime()):
            number = given.index(handle if handle in given else handle - 1)
            assert value.eq(number).all()
            assert value.shape == session.values[handle].shape
    ledger.spill_spaces[0].close()


def test_received_value_without_memory_is_lost_alone():
    small = LimitedRuntime(CpuRuntime(), 1024, DiskQuota())
    item = Item(4096, (View(5, "float32", (1024,), (1,)),))
    ((handle, value),) = unpack_item(item, memoryview(bytearray(4096)), small)
    assert handle == 5
    assert value.failure.kind == "OutOfMemoryError"


def test_oversized_layout_loses_its_value_only():
    item = Item(8, (View(5, "float32", (2,), (1 << 60,)),), dense=True)
    ((handle, value),) = unpack_item(item, memoryview(bytearray(8)), CpuRuntime())
    assert handle == 5
    assert value.failure.kind == "OutOfMemoryError"


def test_shrunken_program_is_not_refused(ledger):
    session = Session(ledger, 1)
    large, small = session.give(1), next(session.handles)
    with torch.inference_mode():
        session.values[small] = torch.ones(8)
    doubled = Program(1, [(ADD, 0, 0, 1), (ADD, 1, 1, 2), (ADD, 2, 2, 3)])
    session.run(doubled, [large])
    ledger.limit, ledger.process.reserve = 3 * MIB // 4, MIB // 4  # no room for one of a megabyte
    output = session.run(doubled, [small])
    assert session.values[output].tolist() == [8.0] * 8


def test_refused_run_does_not_count_as_small(ledger):
    session, outcomes = Session(ledger, 1), []
    large = next(session.handles)
    with torch.inference_mode():
        session.values[large] = torch.ones(9 * MIB // 4)  # no room for another one
    template = compile_template(Program(1, [(ADD, 0, 0, 1)]).template(), CPU, {})
    for _ in range(2):
        work = RunRequest(1, [next(session.handles)], [], [], [], (), False, [large])
        outcomes.append(session.memory.run(b"p", template, work, [], run_template))
    assert [[failure.kind for failure in one.failures] for one in outcomes] == [["OutOfMemoryError"]] * 2
    assert ledger.peak <= 16 * MIB
