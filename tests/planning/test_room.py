"""Placements keep to the memory and the dtypes that devices have, whatever a policy says."""

from __future__ import annotations

import random
import re

import attrs
import pytest
import torch
from long_forms import long_or

from djinn.errors import DoesNotFit
from djinn.hooks import PlacementContext, SchedulingContext
from djinn.planning import Costs, DeviceCapabilities, NetworkTopology, Placement, PlacementDecision, simulate
from djinn.testing import ProgramBuilder
from djinn.testing.contexts import plan as everything
from djinn.testing.contexts import profile
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.planning.stages import placement_search
from djinn_core.planning.stages.placement_fit import needs
from djinn_profiler.explain.text import explain
from djinn_profiler.plans.analysis_cache import AnalysisCache
from djinn_profiler.plans.cached_plans import planned
from djinn_profiler.plans.scheduler import Scheduler
from evaluation.clusters.clusters import POLICIES, REGISTRY, broken, random_program, search
from evaluation.clusters.exhaustive import compare

MIB = 1 << 20
NAMES = [policy.name for policy in POLICIES]


def device(name, free, **fields):
    return DeviceCapabilities(name, "cuda", memory_free=free, flops=1e12, bandwidth=1e11, **fields)


def layers(count, dtype=torch.float32, width=512):
    """Return a graph of `count` successive products with weights of 1 MiB each."""
    builder = ProgramBuilder()
    x = builder.input(4, width, dtype=dtype)
    for number in range(count):
        weight = builder.input(width, width, dtype=dtype)
        out = builder.op("aten::mm", x, weight, shape=(4, width), module=f"layers.{number}")
        builder.drop(*([x] if number else []))
        x = out
    return builder.graph()


def plan_with_policy(name, graph, *devices, **fields):
    request = Request(NetworkTopology(devices), placement_policy=name, **fields)
    result = plan(graph, REGISTRY, request)
    assert not broken(result, request)
    return result.placement


def test_policies_respect_memory_dtypes_and_ops():
    tally = search(0, long_or(20, 45))
    assert not tally.faults
    assert tally.spread > long_or(12, 30)
    assert tally.fallen_back > long_or(8, 20)
    assert tally.plans > long_or(50, 120)


def test_policies_find_existing_placement():
    tally = compare(0, long_or(24, 50))
    assert not tally.faults
    assert tally.feasible > long_or(4, 15)
    assert tally.infeasible > long_or(5, 15)
    assert tally.unknown < 5


@pytest.mark.parametrize("name", NAMES)
def test_full_device_gets_no_nodes(name):
    graph = layers(32)
    placement = plan_with_policy(
        name, graph, device("full", MIB, memory=80 * MIB), device("empty", 80 * MIB, memory=80 * MIB)
    )
    assert "empty" in placement.devices


@pytest.mark.parametrize("name", NAMES)
def test_zero_free_memory_is_not_unknown(name):
    graph = layers(4)
    assert plan_with_policy(name, graph, device("none", 0, memory=80 * MIB), device("some", 10 * MIB)).devices == (
        "some",
    )
    assert plan_with_policy(name, graph, device("unknown", None)).devices == ("unknown",)
    with pytest.raises(DoesNotFit, match="has room for 0"):
        plan_with_policy(name, graph, device("none", 0, memory=80 * MIB))


@pytest.mark.parametrize("name", NAMES)
def test_ops_go_to_devices_with_their_dtype(name):
    old = device("old", 80 * MIB, dtypes=frozenset({"float32"}))
    placement = plan_with_policy(name, layers(8, torch.bfloat16), old, device("new", 80 * MIB))
    assert placement.devices == ("new",)
    with pytest.raises(
        DoesNotFit, match=r"old: it lacks bfloat16, which aten::mm \(node \d+ of layers\.\d+\) needs|old lacks bfloat16"
    ):
        plan_with_policy(name, layers(8, torch.bfloat16), old)


@pytest.mark.parametrize("name", NAMES)
def test_policy_spreads_large_program_over_devices(name):
    graph = layers(32)
    placement = plan_with_policy(name, graph, *(device(f"d{n}", free * MIB) for n, free in enumerate((3, 14, 20))))
    assert len(placement.devices) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_error_names_device_and_missing_bytes(name):
    graph = layers(32)
    with pytest.raises(DoesNotFit) as caught:
        plan_with_policy(name, graph, device("one", 20 * MIB), device("other", 4 * MIB))
    whole = 32 * MIB + 4 * 512 * 4  # all weights, and the first operand
    short = re.search(
        r"one: it would hold ([\d,]+) bytes \(([\d,]+) of inputs, fullest at aten::mm \(node \d+ of layers",
        str(caught.value),
    )
    assert short
    assert int(short[2].replace(",", "")) == whole
    assert f"and has room for {20 * MIB:,}" in str(caught.value)
    assert f"{int(short[1].replace(',', '')) - 20 * MIB:,} bytes are short" in str(caught.value)


def test_temporaries_and_copies_count_as_memory():
    builder = ProgramBuilder()
    x = builder.input(512, 512)
    wide = builder.op("aten::repeat", x, shape=(4096, 512))
    builder.op("aten::sum", wide, shape=())
    builder.drop(wide)
    graph = builder.graph()
    assert plan_with_policy("all_on_the_first", graph, device("a", 8 * MIB), device("b", 10 * MIB)).devices == ("b",)
    (weight, *_) = graph.inputs
    # What lives there is not among what is free, and what it is copied to has to have room for the copy.
    there = {"resident": {weight: "a"}}
    assert plan_with_policy("single", graph, device("a", 8 * MIB + 64), device("b", 8 * MIB), **there).devices == ("a",)
    assert plan_with_policy("single", graph, device("a", 7 * MIB), device("b", 10 * MIB), **there).devices == ("b",)
    with pytest.raises(DoesNotFit):
        plan_with_policy("single", graph, device("a", 7 * MIB), device("b", 8 * MIB), **there)


def test_policy_searches_small_programs_exhaustively(monkeypatch):
    compared = compare(1496, 1)
    assert (compared.feasible, compared.faults) == (1, [])
    monkeypatch.setattr(placement_search, "SMALL", 0)
    assert compare(1496, 1).faults  # filling devices one after the other does not find it


def test_memory_check_counts_workspace_of_cost_model():
    builder = ProgramBuilder()
    x = builder.input(512, 512)
    builder.drop(builder.op("aten::mm", x, x, shape=(512, 512)))
    graph = builder.graph()  # operand and result are a MiB each, and the model of these tests says one more
    assert plan_with_policy("single", graph, device("a", 3 * MIB)).devices == ("a",)
    with pytest.raises(DoesNotFit, match="1,048,576 bytes are short"):
        plan_with_policy("single", graph, device("a", 2 * MIB))


@pytest.mark.parametrize("name", NAMES)
def test_ops_go_to_devices_that_have_them(name):
    old = device("old", 80 * MIB, unsupported=frozenset({"aten::mm"}))
    assert plan_with_policy(name, layers(8), old, device("new", 80 * MIB)).devices == ("new",)
    other = device("old", 80 * MIB, unsupported=frozenset({"aten::mm.out", "aten::relu"}))
    assert plan_with_policy(name, layers(8), other).devices == ("old",)
    with pytest.raises(DoesNotFit, match=r"it does not run aten::mm \(node \d+ of layers\.\d+\)|old lacks aten::mm"):
        plan_with_policy(name, layers(8), old)


def late_use_graph():
    """Return a graph with four results of 1 MiB. One op reads three of them, and the next op reads the fourth."""
    builder = ProgramBuilder()
    weights = [builder.input(512, 512) for _ in range(4)]
    made = [builder.op("aten::relu", w, shape=(512, 512)) for w in weights]
    out = builder.op("aten::addmm", *made[:3], shape=(512, 512))
    builder.op("aten::add.Tensor", out, made[3], shape=(512, 512))
    builder.drop(*made, out)
    return builder.graph(), weights, made


@pytest.mark.parametrize(("kind", "wanted"), [("cuda", 4), ("cpu", 5)])
def test_transfers_occupy_memory_of_host_memory_devices(kind, wanted):
    graph, weights, made = late_use_graph()
    near, far = "far/cuda:0", f"near/{kind}:0"
    values = dict.fromkeys((*weights, *made), near) | {v: far for n in graph.nodes[4:] for v in n.outputs}
    decisions = tuple(PlacementDecision(n.id, near if n.id < 4 else far, "asked") for n in graph.nodes)
    devices = (device(near, None), device(far, None))
    devices = (devices[0], attrs.evolve(devices[1], kind=kind))
    context = PlacementContext(
        graph, profile(graph), everything(graph), Costs({}), NetworkTopology(devices), dict.fromkeys(weights, near)
    )
    held = needs(context, Placement(decisions, values, "asked"))
    # Three operands and a result; the fourth comes when it is read, but may wait there beside the others before.
    assert held[far].bytes == wanted * MIB


def test_moved_values_free_memory_of_source():
    graph = layers(2)
    first, second = (v for v in graph.inputs if graph.meta(v).nbytes == MIB)
    there = {"resident": {first: "a", second: "a"}}
    request = Request(
        NetworkTopology((device("a", 0, memory=2 * MIB), device("b", 3 * MIB))), placement_policy="single", **there
    )
    result = plan(graph, REGISTRY, request)
    assert not broken(result, request)
    assert result.placement.devices == ("b",)
    context = SchedulingContext(
        graph.program, graph, result.plan, result.placement, result.costs, request.topology, there["resident"]
    )
    line = simulate(context, result.schedule)
    assert line.devices["b"].received == 2 * MIB


class TestPins:
    """Ops stay on their pinned devices. Only values without a pin move."""

    pins = (("layers.0", "a"), ("layers.1", "a"))

    def test_unpinned_nodes_go_elsewhere(self):
        graph = layers(6)
        devices = (device("a", 4 * MIB), device("b", 6 * MIB))
        placement = plan_with_policy("pinned", graph, *devices, pins=self.pins)
        where = {graph.nodes[d.node].module: d.device for d in placement.decisions}
        assert where["layers.0"] == where["layers.1"] == "a"
        assert placement.fixed_nodes == {0, 1}
        assert "b" in where.values()
        assert re.search(r"pinned on 2 devices: a: it would hold [\d,]+ bytes", " ".join(placement.rejections))

    def test_pinned_node_without_memory_raises(self):
        graph = layers(6)
        with pytest.raises(DoesNotFit) as caught:
            plan_with_policy("pinned", graph, device("a", 100_000), device("b", 80 * MIB), pins=self.pins)
        said = str(caught.value)
        assert caught.value.excluded_by_pins
        assert "the requested devices do not suffice (pinned: 2 on a ops)" in said
        assert re.search(r"a: aten::mm \(node \d of layers\.\d\) alone takes [\d,]+ bytes with its operands", said)
        assert re.search(r"room for 100,000: [\d,]+ bytes are short", said)
        assert not plan_with_policy("pinned", graph, device("a", 100_000), device("b", 80 * MIB)).fixed_nodes

    def test_pinned_unsupported_op_raises(self):
        lacks = device("a", 80 * MIB, unsupported=frozenset({"aten::mm"}))
        with pytest.raises(DoesNotFit, match=r"pinned to a, .* a: it does not run aten::mm"):
            plan_with_policy("pinned", layers(6), lacks, device("b", 80 * MIB), pins=self.pins)


def test_explain_names_refused_policy_and_fallback():
    request = Request(NetworkTopology((device("full", MIB), device("empty", 80 * MIB))), placement_policy="round_robin")
    result = plan(layers(32), REGISTRY, request)
    text = explain(result)
    assert "policy round_robin" in text
    assert re.search(r"not round_robin on 2 devices: full: it would hold [\d,]+ bytes .* has room for 1,048,576", text)


def test_policy_uses_spill_space_last():
    graph = layers(32)
    spills = device("spills", 4 * MIB, spill=100 * MIB)
    assert placement_with_spill(graph, spills).devices == ("spills",)
    assert plan_with_policy("single", graph, spills, device("empty", 80 * MIB)).devices == ("empty",)
    placement = placement_with_spill(graph, spills, device("small", 8 * MIB))
    assert placement.devices == ("spills",)
    assert placement.spills


def placement_with_spill(graph, *devices):
    return plan(graph, REGISTRY, Request(NetworkTopology(devices))).placement


def test_cached_plan_fits_free_memory():
    graph, cache = layers(8), AnalysisCache()
    roomy = (device("a", 80 * MIB), device("b", 80 * MIB))
    request = Request(NetworkTopology(roomy))
    assert planned(graph, REGISTRY, request, cache).placement.devices == ("a",)
    full = NetworkTopology((attrs.evolve(roomy[0], memory_free=MIB), roomy[1]))
    assert planned(graph, REGISTRY, attrs.evolve(request, topology=full), cache).placement.devices == ("b",)


def test_scheduler_raises_if_nothing_fits():
    scheduler = Scheduler(NetworkTopology((device("full", MIB),)), REGISTRY)
    with pytest.raises(DoesNotFit, match="bytes are short"):
        scheduler.create_schedule(layers(8))


def test_memory_check_finds_violations():
    graph = random_program(random.Random(3))
    request = Request(NetworkTopology((device("a", None),)))
    result = plan(graph, REGISTRY, request)
    full = NetworkTopology((device("a", 1, dtypes=frozenset({"int64"})),))
    found = broken(result, attrs.evolve(request, topology=full, memory_limits={"a": 1}))
    assert any("lacks" in fault for fault in found)
    assert any("has 1 free" in fault for fault in found)
    assert any("limit is 1" in fault for fault in found)
