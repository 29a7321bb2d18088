"""Two programs that differ in what a plugin may look at never share an entry: programs changed at random in one place."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.hooks import Pattern
from djinn.planning import PatternMatch
from djinn.testing import ProgramBuilder, random_graph, topology
from djinn_client.interception.native.calls import number_of
from djinn_client.interception.native.entries import RecordedProgram
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import current
from djinn_client.runtime.planning.plan_cache import PlanCache
from djinn_core.ir.form import Form
from djinn_core.ir.handles import make_handle, new_storage, storage_of, view_of
from djinn_core.ir.module_path import ForwardCalls
from djinn_core.ir.program import Program, Signature
from djinn_core.ir.slot_arrays import encoded_slots
from djinn_core.ir.values import tensor_meta
from djinn_core.planning.request import Request
from djinn_core.registry.registry import Registry
from djinn_profiler.plans.analysis_cache import AnalysisCache
from djinn_profiler.plans.cached_plans import planned
from djinn_profiler.plans.fingerprint import fingerprint

UNKNOWN = 1  # a handle that no program mentions


class ReadsEverything(Pattern):
    """A pattern that reads all graph properties. Its match differs for programs that differ in anything."""

    name = "curious"

    def __init__(self, graph):
        self.operations = frozenset(graph.by_op)

    def match(self, graph, candidates):
        seen = [
            (
                n.op,
                n.form,
                n.slots,
                [type(s) for s in n.slots],
                n.random,
                [graph.meta(v) for v in (*n.inputs, *n.outputs)],
            )
            for n in graph.nodes
        ]
        numbers = {}
        flow = [
            [(numbers.setdefault(v, len(numbers)), numbers.setdefault(-storage_of(v), len(numbers))) for v in n.inputs]
            for n in graph.nodes
        ]
        kept = [v in graph.outputs for n in graph.nodes for v in n.outputs]
        yield PatternMatch(self.name, (0,), 1.0, repr((seen, flow, kept)))


def another_size(program, at, _):
    """Return the program with another size of one operand."""
    call = program.calls[at]
    if not call.operands or not call.operands[0].shape:
        return None
    meta = call.operands[0]
    bigger = tensor_meta((meta.shape[0] + 1, *meta.shape[1:]), meta.stride, meta.offset, meta.dtype)
    return with_call(program, at, attrs.evolve(call, operands=(bigger, *call.operands[1:])))


def another_dtype(program, at, _):
    call = program.calls[at]
    if not call.operands:
        return None
    meta = call.operands[0]
    other = tensor_meta(meta.shape, meta.stride, meta.offset, torch.float16)
    return with_call(program, at, attrs.evolve(call, operands=(other, *call.operands[1:])))


def another_layout(program, at, _):
    call = program.calls[at]
    if not call.operands or not call.operands[0].shape:
        return None
    meta = call.operands[0]
    other = tensor_meta(meta.shape, tuple(s + 1 for s in meta.stride), meta.offset, meta.dtype)
    return with_call(program, at, attrs.evolve(call, operands=(other, *call.operands[1:])))


def another_op(program, at, _):
    call = program.calls[at]
    old = call.signature.form
    form = Form("aten::neg" if old.op != "aten::neg" else "aten::abs", old.args, old.kwargs, old.results, old.sequence)
    return with_call(program, at, attrs.evolve(call, signature=Signature(form, call.signature.operand_classes)))


def another_number(program, _, at):
    if not program.slots:
        return None
    slots = list(program.slots)
    slots[at % len(slots)] += 1
    return attrs.evolve(program, slots=tuple(slots))


def a_float_for_an_int(program, _, at):
    if not program.slots:
        return None
    slots = list(program.slots)
    slot = slots[at % len(slots)]
    slots[at % len(slots)] = float(slot) if isinstance(slot, int) else int(slot)
    return attrs.evolve(program, slots=tuple(slots))


def another_edge(program, at, which):
    """Return the program with one input replaced by a value that exists by then."""
    start = sum(c.operand_count + c.new_count for c in program.calls[:at])
    earlier = [v for v in dict.fromkeys(program.operands[:start]) if v != program.operands[start]]
    if not earlier or not program.calls[at].operand_count:
        return None
    return attrs.evolve(
        program, operands=(*program.operands[:start], earlier[which % len(earlier)], *program.operands[start + 1 :])
    )


def another_death(program, _, at):
    value = program.operands[at % len(program.operands)]
    return attrs.evolve(program, dead=program.dead ^ {value})


def separate_storage(program, _, at):
    """Return the program with a value moved to its own storage, or None if it has one."""
    value = program.operands[at % len(program.operands)]
    alone = sum(storage_of(v) == storage_of(value) for v in set(program.operands)) == 1
    if alone:
        return None
    moved = make_handle(new_storage(), 0)
    return attrs.evolve(
        program,
        operands=tuple(moved if v == value else v for v in program.operands),
        dead=frozenset(moved if v == value else v for v in program.dead),
    )


def shared_storage(program, _, at):
    """Return the program with an input moved to another input's storage, or None if there is no such input."""
    made = {v for i in program.instructions() for v in i.outputs}
    outside = [v for v in dict.fromkeys(program.operands) if v not in made]
    if len(outside) < 2:
        return None
    value, other = outside[at % len(outside)], outside[at % len(outside) - 1]
    if any(storage_of(v) == storage_of(value) for v in set(program.operands) - {value}):
        return None
    moved = make_handle(storage_of(other), 1000)
    return attrs.evolve(
        program,
        operands=tuple(moved if v == value else v for v in program.operands),
        dead=frozenset(moved if v == value else v for v in program.dead),
    )


def with_call(program: Program, at: int, call) -> Program:
    return attrs.evolve(program, calls=(*program.calls[:at], call, *program.calls[at + 1 :]))


CHANGES = [
    another_size, another_dtype, another_layout, another_op, another_number, a_float_for_an_int, another_edge,
    another_death, separate_storage, shared_storage,
]  # fmt: skip


@settings(max_examples=150)
@given(seed=st.integers(0, 40), change=st.sampled_from(CHANGES), at=st.integers(0, 500))
def test_changed_program_has_other_fingerprint(seed, change, at):
    program = random_graph(seed, length=12).program
    other = change(program, at % len(program.calls), at)
    if other is None:
        return
    one, two = fingerprint(program), fingerprint(other)
    operand_indexes = tuple(map(one.values.index, program.operands)) == tuple(map(two.values.index, other.operands))
    if change is another_edge and operand_indexes:
        return  # the same flow under another name
    assert (one.topology, one.shapes) != (two.topology, two.shapes)


@settings(max_examples=150)
@given(seed=st.integers(0, 40), change=st.sampled_from(CHANGES), at=st.integers(0, 500))
def test_session_does_not_reuse_plan_of_changed_program(seed, change, at):
    program = random_graph(seed, length=12).program
    other = change(program, at % len(program.calls), at)
    if other is None or (change is separate_storage and contradicts_calls(program, other)):
        return
    if change in {another_size, another_number, a_float_for_an_int}:
        return  # plans serve ranges of them
    for way in (lambda p: p, round_trip_through_cpp):
        plans = PlanCache[str]()
        plans.find(way(program))[0].append("the first one's")
        for again in (program, renumbered(program)):
            variants, values = plans.find(way(again))
            assert variants == ["the first one's"]
            assert values.tolist() == list(dict.fromkeys(again.operands))
        if operand_indexes(program) == operand_indexes(other) and change is another_edge:
            continue  # the same flow under another name
        assert plans.find(way(other))[0] == []


def round_trip_through_cpp(program):
    """Return the program as C++ returns it."""
    bits, kinds = encoded_slots(program.slots)
    numbers = [number_of(call) for call in program.calls]
    ops.take(current().program, -1)  # what an earlier test has recorded and not sent
    ops.append_entries(numbers, program.operands, bits, kinds, [*program.dead, UNKNOWN])
    packed = ops.take(current().program, -1)
    made = RecordedProgram(packed, {}, ForwardCalls())
    assert UNKNOWN in made.free  # beside tensors of other tests that have died meanwhile
    assert set(made.free).isdisjoint(program.operands)
    for part in ("calls", "operands", "slots", "dead"):
        assert getattr(RecordedProgram(packed, {}, ForwardCalls()), part) == getattr(program, part)
    made = RecordedProgram(packed, {}, ForwardCalls())
    assert (len(made), made.size) == (len(program), program.size)
    return made


def contradicts_calls(program, other):
    """Return True if a result or its view was moved. Calls state which storage each result uses."""
    moved = {storage_of(v) for v in set(program.operands) - set(other.operands)}
    return any(storage_of(v) in moved for i in program.instructions() for v in i.outputs)


def operand_indexes(program):
    values = list(dict.fromkeys(program.operands))
    return [values.index(v) for v in program.operands]


def renumbered(program):
    """Return the program with new value ids, as the next step of a loop records it."""
    storages = {}
    names = {
        v: make_handle(storages.setdefault(storage_of(v), new_storage()), view_of(v))
        for v in dict.fromkeys(program.operands)
    }
    operands = tuple(names[v] for v in program.operands)
    return attrs.evolve(program, operands=operands, dead=frozenset(names[v] for v in program.dead))


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_plugin_results_are_not_shared_between_programs(change):
    cache, request = AnalysisCache(), Request(topology(2), until="annotate")
    for seed in range(6):
        graph = random_graph(seed, length=12)
        plugins = Registry(patterns=(ReadsEverything(graph),))
        for at in range(8):
            other = change(graph.program, at, 3 * at + seed)
            for program in filter(None, (graph.program, other)):
                found = planned(program, plugins, request, cache)
                fresh = planned(program, plugins, request, AnalysisCache())
                assert [m.reason for m in found.profile.patterns] == [m.reason for m in fresh.profile.patterns]
    assert cache.statistics()["plan_hits"] > 0


def test_key_includes_plugin_versions_and_settings():
    cache, request = AnalysisCache(), Request(topology(2), until="annotate")
    graph = random_graph(1, length=12)
    for plugins in (Registry(patterns=(ReadsEverything(graph),)), Registry(patterns=(ReadsEverything(graph),))):
        planned(graph.program, plugins, request, cache)
    assert cache.statistics()["plan_hits"] == 0  # two objects of one class may be set up differently


def test_result_and_input_have_different_keys():
    def twice(chained):
        builder = ProgramBuilder()
        x, y = builder.input(3), builder.input(3)
        first = builder.op("aten::relu", x, shape=(3,))
        builder.op("aten::relu", first if chained else y, shape=(3,))
        return builder.program()

    apart, chained = twice(False), twice(True)
    chained = attrs.evolve(chained, calls=apart.calls)
    plans = PlanCache[str]()
    plans.find(apart)[0].append("apart")
    assert plans.find(chained)[0] == []
