"""Every scheduler, on random programs, placements and times: the schedule holds, and gives the values of program order."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.hooks import NodePriority, Scheduler
from djinn.planning import (
    CostEstimate,
    Costs,
    Placement,
    PlacementDecision,
    Receive,
    Run,
    Send,
    colocation_of,
    homes_of_values,
    memory_peaks,
    resident_blocks,
    simulate,
)
from djinn.testing import ProgramBuilder, random_graph, random_inputs, replay, replay_schedule, scheduling_context
from djinn_core.errors import InvalidStage
from djinn_core.ir.costs import Link, NetworkTopology
from djinn_core.ir.handles import storage_of
from djinn_core.ir.result import PipelineResult
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.stages.ordering import Dependences, ready_order
from djinn_core.planning.stages.schedule import build_schedule, schedule
from djinn_core.planning.stages.steps import write_steps
from djinn_core.planning.stages.verify_schedule import check_schedule
from djinn_profiler.plans.rebinding import rebind
from djinn_schedulers.dynamic import Dynamic
from djinn_schedulers.parallel import Parallel
from djinn_schedulers.pipeline import Pipeline
from djinn_schedulers.priority import Priority

MAKERS = [Sequential(), Parallel(), Pipeline(), Priority(), Dynamic()]
by_name = {"argvalues": MAKERS, "ids": lambda maker: maker.name}


def random_context(seed, devices, length=24):
    """Return a random program with random placement and copies, and op times from 1 us to 1 ms."""
    chance = random.Random(seed)
    graph = random_graph(seed, length)
    context = scheduling_context(graph, devices)
    names = [d.id for d in context.topology.devices]
    blocks = colocation_of(graph, context.plan.nodes, {})
    lived = {v: chance.choice(names) for v in graph.inputs if chance.random() < 0.6}
    by_block = resident_blocks(blocks, graph.inputs, lived)
    resident = {v: by_block[blocks.block(v)] for v in lived}
    homes = {b: d for b, d in by_block.items() if chance.random() < 0.8}  # a few move
    for value in (*graph.inputs, *(v for n in graph.nodes for v in n.outputs)):
        homes.setdefault(blocks.block(value), chance.choice(names))
    decisions = tuple(PlacementDecision(n.id, homes[blocks.node(n.id)], "by chance") for n in graph.nodes)
    placement = Placement(decisions, homes_of_values(graph, context.plan.nodes, blocks, homes), "chance")
    row = tuple(CostEstimate(0, 0, 0, chance.choice([1e-6, 1e-4, 1e-3])) for _ in graph.nodes)
    return attrs.evolve(
        context, placement=placement, resident=resident, fetch=graph.outputs, costs=Costs(dict.fromkeys(names, row))
    )


@pytest.mark.parametrize("maker", **by_name)
@given(seed=st.integers(0, 10_000), devices=st.integers(1, 4))
@settings(max_examples=30)
def test_schedules_keep_program_values(maker, seed, devices):
    context = random_context(seed, devices)
    graph, inputs = context.graph, random_inputs(context.graph)
    made = build_schedule(context, maker)
    check_schedule(context, made, maker.name)
    held, fetched = replay_schedule(graph, made, inputs, context.resident)
    expected = replay(graph, inputs)
    for value in graph.outputs:
        torch.testing.assert_close(fetched[value], expected[value], rtol=0, atol=0, equal_nan=True)
    for name, device in held.items():
        moved = {v for v, home in context.resident.items() if home == name != context.placement.values[v]}
        assert not set(device) - moved & graph.program.dead, "a dead value was never freed"
    timeline = simulate(context, made)
    assert timeline.seconds >= max((d.busy for d in timeline.devices.values()), default=0.0) - 1e-12
    assert {n: d.peak for n, d in timeline.devices.items() if d.peak} == {
        n: p for n, p in memory_peaks(context, made.steps).items() if p and n in timeline.devices
    }


@pytest.mark.parametrize("maker", **by_name)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10)
def test_held_copies_are_sent_again_only_after_write(maker, seed):
    context = random_context(seed, 2)
    names = [d.id for d in context.topology.devices]
    inputs = [v for v in context.graph.inputs if context.resident.get(v) == context.placement.values[v]]
    copies = {v: tuple(n for n in names if n != context.resident[v]) for v in inputs}
    context = attrs.evolve(context, copies=copies)
    made = build_schedule(context, maker)
    check_schedule(context, made, maker.name)
    written = {storage_of(v) for n in context.graph.nodes for v in n.writes}
    sent = {s.value for steps in made.steps.values() for s in steps if isinstance(s, Send)}
    assert not {v for v in sent & copies.keys() if storage_of(v) not in written}


def test_cached_plan_keeps_copies():
    graph, other = fork_graph()[0], fork_graph()[0]
    values = [tuple(dict.fromkeys(g.program.operands)) for g in (graph, other)]
    weight = graph.nodes[0].inputs[1]
    placement = Placement((), dict.fromkeys(values[0], "a"), copies={weight: ("b",)})
    found = rebind(PipelineResult(graph, NetworkTopology(()), placement=placement), other, *values)
    assert found.placement.copies == {other.nodes[0].inputs[1]: ("b",)}


def fork_graph(lengths=(4, 4)):
    """Return a graph of product chains from one input, and the nodes of each chain."""
    builder = ProgramBuilder()
    x, ends, chains = builder.input(8, 8), [], []
    for length in lengths:
        y = x
        chains.append([])
        for _ in range(length):
            chains[-1].append(len(builder.calls))
            y = builder.op("aten::mm", y, builder.input(8, 8), shape=(8, 8))
        ends.append(y)
    chains.append([len(builder.calls)])
    builder.op("aten::add.Tensor", *ends, shape=(8, 8))
    return builder.graph(), chains


def fork_context(seconds=1e-3, **link):
    graph, chains = fork_graph()
    context = scheduling_context(graph, 2)
    first, second = (d.id for d in context.topology.devices)
    where = {n: second if n in chains[1] else first for n in range(len(graph.nodes))}
    decisions = tuple(PlacementDecision(n, d, "by hand") for n, d in where.items())
    values = dict.fromkeys(graph.inputs, first)
    for node in graph.nodes:
        values |= dict.fromkeys(node.outputs, where[node.id])
        values |= {v: where[node.id] for v in node.inputs[1:] if graph.producer(v) is None}
    row = tuple(CostEstimate(0, 0, 0, seconds) for _ in graph.nodes)
    topology = NetworkTopology(
        context.topology.devices, (Link("*", "*", link.get("bandwidth", 0), link.get("latency", 0)),)
    )
    return attrs.evolve(
        context,
        placement=Placement(decisions, values, "by hand"),
        costs=Costs({first: row, second: row}),
        topology=topology,
        resident={v: values[v] for v in graph.inputs},
    )


def test_schedule_sends_early_and_receives_late():
    context = fork_context()
    first, second = (d.id for d in context.topology.devices)
    steps = write_steps(context, context.plan.nodes)
    kinds = [type(s) for s in steps[first]]
    assert kinds.index(Send) < kinds.index(Run)  # the input is sent before anything runs
    runs = [s for s in steps[first] if isinstance(s, Run)]
    assert runs == [Run((0, 1, 2, 3)), Run((8,))]
    assert isinstance(steps[first][steps[first].index(runs[1]) - 1], Receive)
    assert steps[second].index(next(s for s in steps[second] if isinstance(s, Send))) > 0


def test_simulated_clock_overlaps_devices_and_waits_for_links():
    quick, slow = fork_context(), fork_context(latency=1e-2)
    timeline = simulate(quick, build_schedule(quick, Parallel()))
    assert timeline.seconds == pytest.approx(5e-3)  # four products beside four others, and the end
    assert simulate(slow, build_schedule(slow, Parallel())).seconds == pytest.approx(5e-3 + 2e-2)
    narrow = fork_context(bandwidth=256 / 1e-2)  # a matrix of 8 by 8 takes 10 ms
    narrow_line = simulate(narrow, build_schedule(narrow, Parallel()))
    assert narrow_line.seconds == pytest.approx(5e-3 + 2e-2)
    assert narrow_line.limit.startswith("link from server/cpu")
    assert narrow_line.interval == pytest.approx(1e-2)
    (first, second) = timeline.devices.values()
    assert (first.sent, first.received, second.sent) == (256, 256, 256)
    assert timeline.limit == "ops on server/cpu:0"


def test_scheduler_keeps_requested_copies():
    context = fork_context()
    first, second = (d.id for d in context.topology.devices)
    given = context.graph.inputs[0]  # lives on the first device, and both read it
    inputs = random_inputs(context.graph)
    for copies, kept in (({}, False), ({given: (second,)}, True)):
        wanted = attrs.evolve(context, placement=attrs.evolve(context.placement, copies=copies))
        held, _ = replay_schedule(context.graph, write(wanted), inputs, wanted.resident)
        assert (given in held[second]) is kept
        assert given in held[first]


def write(context):
    made = build_schedule(context, Sequential())
    check_schedule(context, made, "sequential")
    return made


def test_transfers_from_one_device_take_turns():
    builder = ProgramBuilder()
    given = [builder.input(8, 8) for _ in range(3)]
    for value in given:
        builder.op("aten::tanh", value, shape=(8, 8))
    graph = builder.graph()
    context = scheduling_context(graph, 2)
    first, second = (d.id for d in context.topology.devices)
    values = dict.fromkeys(given, first) | {v: second for n in graph.nodes for v in n.outputs}
    context = attrs.evolve(
        context,
        placement=Placement(tuple(PlacementDecision(n.id, second, "by hand") for n in graph.nodes), values, "by hand"),
        costs=Costs(dict.fromkeys([first, second], (CostEstimate(0, 0, 0, 1e-3),) * 3)),
        topology=NetworkTopology(context.topology.devices, (Link("*", "*", 256 / 1e-2, 1e-3),)),
        resident=dict.fromkeys(given, first),
    )
    line = simulate(context, write(context))
    assert line.seconds == pytest.approx(3e-2 + 1e-3 + 1e-3)  # three times 10 ms, a latency and the last op
    assert line.devices[second].waited == pytest.approx(line.seconds - 3e-3)


def test_longest_path_and_oldest_input_go_first():
    graph, (short, long, _) = fork_graph((1, 3))
    context = scheduling_context(graph, 1)
    found = Dependences.of(context)
    left = found.remaining(context.plan.nodes)
    assert ready_order(context.plan.nodes, found, lambda n: -left[n]) == [*long[:2], *short, long[2], 4]
    assert ready_order(context.plan.nodes, found, lambda n: n) == list(range(5))


class TableScheduler(Scheduler):
    """A scheduler that ranks nodes by a table."""

    name = "by_table"

    def __init__(self, keys, strict):
        self.keys, self.strict = keys, strict

    def priority(self, context):
        return NodePriority(self.keys.__getitem__, "by a table", self.strict)


@pytest.mark.parametrize(("strict", "ran"), [(True, (2, 0)), (False, (0, 2))])
def test_strict_priorities_let_device_wait(strict, ran):
    builder = ProgramBuilder()
    x, y = builder.input(8, 8), builder.input(8, 8)
    builder.op("aten::tanh", x, shape=(8, 8))
    other = builder.op("aten::tanh", y, shape=(8, 8))
    builder.op("aten::neg", other, shape=(8, 8))
    graph = builder.graph()
    context = scheduling_context(graph, 2)
    first, second = (d.id for d in context.topology.devices)
    where = {0: first, 1: second, 2: first}
    values = {x: first, y: second} | {v: where[n.id] for n in graph.nodes for v in n.outputs}
    decisions = tuple(PlacementDecision(n, d, "by hand") for n, d in where.items())
    context = attrs.evolve(context, placement=Placement(decisions, values, "by hand"))
    made = build_schedule(context, TableScheduler({0: 2, 1: 0, 2: 1}, strict))
    check_schedule(context, made, "by_table")
    assert tuple(n for s in made.steps[first] if isinstance(s, Run) for n in s.nodes) == ran


def test_sequential_starts_stage_at_device_change():
    context = fork_context()
    assert build_schedule(context, Sequential()).total_stages == 3
    assert build_schedule(context, Parallel()).total_stages == 2  # both chains, and the end


def test_pipeline_stages_overlap_on_successive_inputs():
    builder = ProgramBuilder()
    weights = [builder.input(8, 8) for _ in range(2)]
    for _ in range(4):
        x = builder.input(8, 8)
        for weight in weights:
            x = builder.op("aten::mm", x, weight, shape=(8, 8))
    graph = builder.graph()
    context = scheduling_context(graph, 2)
    names = [d.id for d in context.topology.devices]
    decisions = tuple(PlacementDecision(n.id, names[n.id % 2], "by hand") for n in graph.nodes)
    values = dict.fromkeys(graph.inputs, names[0]) | {v: names[n.id % 2] for n in graph.nodes for v in n.outputs}
    values[weights[1]] = names[1]
    row = tuple(CostEstimate(0, 0, 0, 1e-3) for _ in graph.nodes)
    context = attrs.evolve(
        context,
        placement=Placement(decisions, values, "by hand"),
        costs=Costs(dict.fromkeys(names, row)),
        topology=NetworkTopology(context.topology.devices),
        resident=values,
    )
    timeline = simulate(context, build_schedule(context, Pipeline()))
    assert timeline.seconds == pytest.approx(5e-3)  # four inputs through two stages; 8 ms one after the other


def test_fetched_values_are_computed_first():
    graph, (_, second, _) = fork_graph((4, 4))
    context = scheduling_context(graph, 1)
    wanted = graph.nodes[second[-1]].outputs[0]
    made = build_schedule(attrs.evolve(context, fetch=(wanted,)), Priority())
    ran = [n for steps in made.steps.values() for s in steps if isinstance(s, Run) for n in s.nodes]
    assert ran[:4] == second
    assert max(g.priority for g in made.groups) == 1


def many_large_results():
    """Return the context of eight large results that are each summed. Program order holds all of them at once."""
    builder = ProgramBuilder()
    x = builder.input(1, 1)
    large = [builder.op("aten::expand_copy", x, shape=(64, 64)) for _ in range(8)]
    for value in large:
        builder.op("aten::sum", value, shape=())
    builder.drop(*large)
    return scheduling_context(builder.graph(), 1)


def test_dynamic_scheduler_respects_memory_limit():
    context = many_large_results()
    (device,) = context.placement.devices
    free = build_schedule(context, Dynamic())
    assert memory_peaks(context, build_schedule(context, Sequential()).steps)[device] > 8 * 64 * 64 * 4
    limited = attrs.evolve(context, memory_limits={device: 2 * 64 * 64 * 4})
    made = build_schedule(limited, Dynamic())
    check_schedule(limited, made, "dynamic")
    assert memory_peaks(context, made.steps)[device] <= 2 * 64 * 64 * 4
    assert "the fastest within the memory limits (other orders: program order" in made.reasons[-1]
    assert "the fastest" in free.reasons[-1]
    in_time = build_schedule(attrs.evolve(context, latency_target=1.0), Dynamic())
    assert memory_peaks(context, in_time.steps)[device] <= 2 * 64 * 64 * 4
    assert "the lowest peak memory within the latency target" in in_time.reasons[-1]


def test_schedule_over_memory_limit_falls_back():
    context = many_large_results()
    (device,) = context.placement.devices
    limited = attrs.evolve(context, memory_limits={device: 64 * 64})
    with pytest.raises(
        InvalidStage, match=r"no order of the steps meets the memory limits: least memory .* above a limit"
    ):
        build_schedule(limited, Dynamic())
    with pytest.raises(InvalidStage, match=r"would hold .* has room for 4,096 \(the setting memory_limits"):
        schedule(limited, Dynamic(), Sequential())
    roomy = attrs.evolve(context, memory_limits={device: 2 * 64 * 64 * 4})
    made = schedule(attrs.evolve(roomy, memory_limits={}), Parallel(), Sequential())
    with pytest.raises(InvalidStage, match=r"has room for 32,768 \(the setting memory_limits"):
        check_schedule(roomy, made, "parallel")
