from __future__ import annotations

import attrs
import pytest

from djinn.errors import InvalidStage
from djinn.planning import (
    CostEstimate,
    Costs,
    DataResidency,
    DeviceCapabilities,
    ExecutionPhase,
    Link,
    NetworkTopology,
    Stream,
)
from djinn.testing import ProgramBuilder, placement_context
from djinn_costs.cost_based import CostBased

MS = 1e-3


def devices(*memory, **fields):
    return tuple(
        DeviceCapabilities(f"s/cpu:{n}", "cpu", memory=m, memory_free=m, **fields) for n, m in enumerate(memory)
    )


def context(graph, there, seconds=MS, latency=1e-4, bandwidth=1e9):
    """Return the context of a graph whose products take `seconds`, and all other ops a microsecond."""
    row = tuple(CostEstimate(0, 0, 0, seconds if node.operation == "mm" else 1e-6) for node in graph.nodes)
    topology = NetworkTopology(there, (Link("*", "*", bandwidth, latency),))
    costs = Costs(dict.fromkeys([d.id for d in there], row))
    return attrs.evolve(placement_context(graph), topology=topology, costs=costs)


def layers(builder, x, count, width=64):
    """Add `count` products in a chain. Return the weights and the last result."""
    weights = [builder.input(width, width) for _ in range(count)]
    for weight in weights:
        x = builder.op("aten::relu", builder.op("aten::mm", x, weight, shape=(8, width)), shape=(8, width))
    return weights, x


def branch_graph(count=8):
    builder = ProgramBuilder()
    left, a = layers(builder, builder.input(8, 64), count)
    right, b = layers(builder, builder.input(8, 64), count)
    builder.op("aten::cat", a, b, shape=(16, 64))
    return builder.graph(), left, right


def chain_graph(count=8):
    builder = ProgramBuilder()
    weights, _ = layers(builder, builder.input(8, 64), count)
    return builder.graph(), weights


def used_devices(placement):
    return {d.device for d in placement.decisions}


def test_chain_stays_on_one_device():
    placement = CostBased().place(context(chain_graph()[0], devices(1 << 30, 1 << 30)))
    assert used_devices(placement) == {"s/cpu:0"}
    assert {d.reason for d in placement.decisions} == {"the whole program fits on s/cpu:0"}


def test_branches_run_concurrently_if_faster():
    graph, left, right = branch_graph()
    placement = CostBased().place(context(graph, devices(1 << 30, 1 << 30)))
    homes = [{placement.values[w] for w in side} for side in (left, right)]
    assert sorted(map(len, homes)) == [1, 1]
    assert homes[0] != homes[1]
    assert all("ms in all, in one place 16 ms" in d.reason for d in placement.decisions)


@pytest.mark.parametrize("circumstance", [{"seconds": 1e-5}, {"bandwidth": 1e5}], ids=["light work", "a slow link"])
def test_branches_stay_together_if_messages_are_slow(circumstance):
    graph, *_ = branch_graph()
    assert len(used_devices(CostBased().place(context(graph, devices(1 << 30, 1 << 30), **circumstance)))) == 1


def test_branches_stay_together_without_free_memory():
    graph, left, _ = branch_graph()
    room = 4 * graph.meta(left[0]).nbytes
    placement = CostBased().place(context(graph, devices(1 << 30, room)))
    there = sum(graph.meta(v).nbytes for v in graph.inputs if placement.values[v] == "s/cpu:1")
    assert there <= room


def test_token_generation_stays_on_one_device():
    graph, *_ = branch_graph()
    given = context(graph, devices(1 << 30, 1 << 30))
    phases = (ExecutionPhase.LLM_PREFILL,) * len(graph.nodes)
    assert (
        len(used_devices(CostBased().place(attrs.evolve(given, profile=attrs.evolve(given.profile, phases=phases)))))
        == 1
    )


def test_large_model_is_cut_into_contiguous_segments():
    graph, weights = chain_graph(12)
    one = graph.meta(weights[0]).nbytes
    placement = CostBased().place(context(graph, devices(*[6 * one] * 4)))
    homes = [placement.values[w] for w in weights]
    assert sorted(homes) == homes  # contiguous, in the order of the devices
    assert max(homes.count(d) for d in set(homes)) * one < 6 * one
    assert len(set(homes)) == 3  # each device saves a tenth, and four weights are a third
    assert {d.reason.split(" in program")[0] for d in placement.decisions} == {f"part {n} of 3" for n in (1, 2, 3)}
    again = CostBased().place(attrs.evolve(context(graph, devices(*[6 * one] * 4)), resident=placement.values))
    assert [d.device for d in again.decisions] == [d.device for d in placement.decisions]


def test_segments_follow_last_operand():
    builder = ProgramBuilder()
    x, weights = builder.input(8, 64), []
    for _ in range(8):
        weights.append(builder.input(64, 64))
        x = builder.op("aten::add.Tensor", x, builder.op("aten::mm", x, weights[-1], shape=(8, 64)), shape=(8, 64))
    graph = builder.graph()
    one = graph.meta(weights[0]).nbytes
    placement = CostBased().place(context(graph, devices(6 * one, 6 * one)))
    where = [d.device for d in placement.decisions]
    assert where == sorted(where)
    assert len(set(where)) == 2


def test_oversized_model_is_refused_with_figures():
    graph, weights = chain_graph(12)
    with pytest.raises(InvalidStage, match=r"bytes of the inputs fit into no device .*connect more devices"):
        CostBased().place(context(graph, devices(*[2 * graph.meta(weights[0]).nbytes] * 2)))


def test_work_follows_its_weights_and_caches():
    graph, weights = chain_graph(4)
    given = context(graph, devices(1 << 30, 1 << 30))
    resident = dict(zip(weights, ["s/cpu:1", "s/cpu:1", "s/cpu:0", "s/cpu:0"], strict=True))
    placement = CostBased().place(attrs.evolve(given, resident=resident))
    products = [d.device for d in placement.decisions if graph.nodes[d.node].operation == "mm"]
    assert products == ["s/cpu:1", "s/cpu:1", "s/cpu:0", "s/cpu:0"]
    assert {v: placement.values[v] for v in weights} == resident


def test_branch_gets_lasting_copy_of_weights():
    graph, left, right = branch_graph()
    given = context(graph, devices(1 << 30, 1 << 30))
    profile = attrs.evolve(given.profile, residency=dict.fromkeys(left + right, DataResidency.PERSISTENT_WEIGHT))
    resident = dict.fromkeys(left + right, "s/cpu:0")
    given = attrs.evolve(given, profile=profile, resident=resident)
    placement = CostBased().place(given)
    assert used_devices(placement) == {"s/cpu:0", "s/cpu:1"}
    assert {placement.values[v] for v in left + right} == {"s/cpu:0"}
    assert len(placement.copies) == 8
    assert set(placement.copies.values()) == {("s/cpu:1",)}
    again = CostBased().place(attrs.evolve(given, copies=placement.copies))
    assert [d.device for d in again.decisions[:-1]] == [d.device for d in placement.decisions[:-1]]
    assert again.copies == placement.copies


def test_placement_colocates_keys_and_values():
    graph, *_ = branch_graph()
    given = context(graph, devices(1 << 30, 1 << 30))
    last = [graph.nodes[n].outputs[0] for n in (15, 31)]
    plan = attrs.evolve(given.plan, hints={"colocate": (tuple(last),)})
    placement = CostBased().place(attrs.evolve(given, plan=plan))
    assert placement.values[last[0]] == placement.values[last[1]]


def pipeline_context(graph, weights, there, turn, **links):
    """Return the context of a stream of inputs, with the weights on the first device and the turn of device `turn`."""
    given = context(graph, there, **links)
    profile = attrs.evolve(given.profile, residency=dict.fromkeys(weights, DataResidency.PERSISTENT_WEIGHT))
    plan = attrs.evolve(given.plan, hints={"pipeline": (2,)})
    stream = Stream(following=1, turn=turn)
    resident = dict.fromkeys(weights, "s/cpu:0")
    return attrs.evolve(given, plan=plan, profile=profile, resident=resident, stream=stream)


def test_pipeline_hint_divides_chain_into_stages():
    graph, weights = chain_graph(8)
    placement = CostBased().place(pipeline_context(graph, weights, devices(1 << 30, 1 << 30), ""))
    where = [d.device for d in placement.decisions if graph.nodes[d.node].operation == "mm"]
    assert where == ["s/cpu:0"] * 4 + ["s/cpu:1"] * 4
    assert len(placement.copies) == 4
    assert placement.decisions[0].reason.startswith("stage 1 of 2 for successive inputs, 4 ms")


@pytest.mark.parametrize("turn", ["s/cpu:0", "s/cpu:1"])
def test_devices_alternate_inputs_if_stages_are_slower(turn):
    graph, weights = chain_graph(8)
    placement = CostBased().place(pipeline_context(graph, weights, devices(1 << 30, 1 << 30), turn))
    assert used_devices(placement) == {turn}
    assert set(placement.copies) == (set() if turn == "s/cpu:0" else set(weights))
    assert placement.decisions[0].reason.endswith("one every 4 ms, in 2 stages every 4 ms, on one device every 8.01 ms")


def test_placement_uses_stages_if_weights_do_not_fit_twice():
    graph, weights = chain_graph(8)
    small = devices(1 << 30, sum(graph.meta(w).nbytes for w in weights))  # saves less than a tenth
    assert used_devices(CostBased().place(pipeline_context(graph, weights, small, "s/cpu:1"))) == {"s/cpu:0", "s/cpu:1"}


def test_weights_stay_if_copy_is_too_slow():
    graph, weights = chain_graph(8)
    there = devices(1 << 30, 1 << 30)
    placement = CostBased().place(pipeline_context(graph, weights, there, "s/cpu:1", bandwidth=1e6))
    assert used_devices(placement) == {"s/cpu:0"}


def test_slower_device_gets_no_part():
    graph, weights = chain_graph(8)
    given = pipeline_context(graph, weights, devices(1 << 30, 1 << 30), "s/cpu:1")
    slow = tuple(attrs.evolve(e, seconds=e.seconds * 10) for e in given.costs.by_device["s/cpu:1"])
    given = attrs.evolve(given, costs=Costs({**given.costs.by_device, "s/cpu:1": slow}))
    assert used_devices(CostBased().place(given)) == {"s/cpu:0"}


def test_devices_without_a_dtype_are_skipped():
    first, second = devices(1 << 30, 1 << 30)
    there = (attrs.evolve(first, dtypes=frozenset({"float16"})), second)
    placement = CostBased().place(context(chain_graph()[0], there))
    assert {d.reason for d in placement.decisions} == {"the only device (not s/cpu:0: it lacks float32)"}


def test_whole_program_runs_on_the_faster_device():
    graph, _ = chain_graph()
    given = context(graph, devices(1 << 30, 1 << 30))
    quick = tuple(attrs.evolve(e, seconds=e.seconds / 4) for e in given.costs.by_device["s/cpu:1"])
    given = attrs.evolve(given, costs=Costs({**given.costs.by_device, "s/cpu:1": quick}))
    assert used_devices(CostBased().place(given)) == {"s/cpu:1"}


def test_short_ops_need_free_memory():
    builder = ProgramBuilder()
    builder.op("aten::add", builder.input(100, 1000), shape=(100, 1000))  # 400 kB, and the result takes as much again
    slow = context(builder.graph(), devices(600_000, 1_400_000), latency=10.0)
    assert {d.device for d in CostBased().place(slow).decisions} == {"s/cpu:1"}
