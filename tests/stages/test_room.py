"""Placements keep to the memory and the dtypes that devices have, whatever a policy says."""

from __future__ import annotations

import random
import re

import attrs
import pytest
import torch
from clusters import POLICIES, REGISTRY, broken, random_program, search

from djinn.hooks import DeviceCapabilities, DoesNotFit, NetworkTopology
from djinn.testing import PlacementPolicyConformance, ProgramBuilder
from djinn_core.builtins.placement import FirstFit
from djinn_core.pipeline import Request, plan, planned
from djinn_core.scheduler import Scheduler
from djinn_core.showing.text import explain
from djinn_core.stages.cache import PlanCache

MIB = 1 << 20
NAMES = [policy.name for policy in POLICIES]


class TestFirstFit(PlacementPolicyConformance):
    @pytest.fixture
    def policy(self):
        return FirstFit()


def device(name, free, **fields):
    return DeviceCapabilities(name, "cuda", memory_free=free, flops=1e12, bandwidth=1e11, **fields)


def layers(count, dtype=torch.float32, width=512):
    """Products with `count` weights of a MiB each, one after the other."""
    builder = ProgramBuilder()
    x = builder.input(4, width, dtype=dtype)
    for number in range(count):
        weight = builder.input(width, width, dtype=dtype)
        out = builder.op("aten::mm", x, weight, shape=(4, width), module=f"layers.{number}")
        builder.drop(*([x] if number else []))
        x = out
    return builder.graph()


def planned_by(name, graph, *devices, **fields):
    request = Request(NetworkTopology(devices), placement_policy=name, **fields)
    result = plan(graph, REGISTRY, request)
    assert not broken(result, request)
    return result.placement


def test_no_policy_ever_exceeds_a_device_or_misses_a_dtype():
    tally = search(0, 60)
    assert not tally.faults
    assert tally.spread > 40
    assert tally.fallen_back > 20
    assert tally.plans > 200


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_full_gets_nothing_beside_one_that_is_empty(name):
    graph = layers(32)
    placement = planned_by(
        name, graph, device("full", MIB, memory=80 * MIB), device("empty", 80 * MIB, memory=80 * MIB)
    )
    assert "empty" in placement.devices


@pytest.mark.parametrize("name", NAMES)
def test_nothing_free_is_nothing_and_not_unknown(name):
    graph = layers(4)
    assert planned_by(name, graph, device("none", 0, memory=80 * MIB), device("some", 10 * MIB)).devices == ("some",)
    assert planned_by(name, graph, device("unknown", None)).devices == ("unknown",)
    with pytest.raises(DoesNotFit, match="has room for 0"):
        planned_by(name, graph, device("none", 0, memory=80 * MIB))


@pytest.mark.parametrize("name", NAMES)
def test_ops_go_where_their_dtypes_are(name):
    old = device("old", 80 * MIB, dtypes=frozenset({"float32"}))
    placement = planned_by(name, layers(8, torch.bfloat16), old, device("new", 80 * MIB))
    assert placement.devices == ("new",)
    with pytest.raises(
        DoesNotFit, match=r"old: it lacks bfloat16, which aten::mm \(node \d+ of layers\.\d+\) needs|old lacks bfloat16"
    ):
        planned_by(name, layers(8, torch.bfloat16), old)


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_into_no_device_is_spread_over_several(name):
    graph = layers(32)
    placement = planned_by(name, graph, *(device(f"d{n}", free * MIB) for n, free in enumerate((3, 14, 20))))
    assert len(placement.devices) >= 2


@pytest.mark.parametrize("name", [name for name in NAMES if name != "first_fit"])  # which tells of a placement on both
def test_the_error_says_what_is_short_where_by_how_much_and_for_what(name):
    graph = layers(32)
    with pytest.raises(DoesNotFit) as caught:
        planned_by(name, graph, device("one", 20 * MIB), device("other", 4 * MIB))
    whole = 32 * MIB + 4 * 512 * 4  # all weights, and the first operand
    short = re.search(
        r"one: it would hold ([\d,]+) bytes \(([\d,]+) of inputs, fullest at aten::mm \(node \d+ of layers",
        str(caught.value),
    )
    assert short
    assert int(short[2].replace(",", "")) == whole
    assert f"and has room for {20 * MIB:,}" in str(caught.value)
    assert f"{int(short[1].replace(',', '')) - 20 * MIB:,} bytes are short" in str(caught.value)


def test_temporaries_and_copies_count():
    builder = ProgramBuilder()
    x = builder.input(512, 512)
    wide = builder.op("aten::repeat", x, shape=(4096, 512))
    builder.op("aten::sum", wide, shape=())
    builder.drop(wide)
    graph = builder.graph()
    assert planned_by("all_on_the_first", graph, device("a", 8 * MIB), device("b", 10 * MIB)).devices == ("b",)
    (weight, *_) = graph.inputs
    # What lives there is not among what is free, and what it is copied to has to have room for the copy.
    there = {"resident": {weight: "a"}}
    assert planned_by("single", graph, device("a", 8 * MIB + 64), device("b", 8 * MIB), **there).devices == ("a",)
    assert planned_by("single", graph, device("a", 7 * MIB), device("b", 10 * MIB), **there).devices == ("b",)
    with pytest.raises(DoesNotFit):
        planned_by("single", graph, device("a", 7 * MIB), device("b", 8 * MIB), **there)


def test_explain_says_what_was_refused_and_who_decided_then():
    request = Request(NetworkTopology((device("full", MIB), device("empty", 80 * MIB))), placement_policy="round_robin")
    result = plan(layers(32), REGISTRY, request)
    text = explain(result)
    assert "policy round_robin" in text
    assert re.search(r"not round_robin on 2 devices: full: it would hold [\d,]+ bytes .* has room for 1,048,576", text)


def test_what_can_be_spilled_counts_where_one_device_has_to_do_and_last_of_all_elsewhere():
    graph = layers(32)
    spills = device("spills", 4 * MIB, spill=100 * MIB)
    assert planned_by_spilling(graph, spills).devices == ("spills",)
    assert planned_by("single", graph, spills, device("empty", 80 * MIB)).devices == ("empty",)
    placement = planned_by_spilling(graph, spills, device("small", 8 * MIB))
    assert placement.devices == ("spills",)
    assert placement.spills


def planned_by_spilling(graph, *devices):
    return plan(graph, REGISTRY, Request(NetworkTopology(devices))).placement


def test_a_plan_that_was_found_again_fits_what_is_free_now():
    graph, cache = layers(8), PlanCache()
    roomy = (device("a", 80 * MIB), device("b", 80 * MIB))
    request = Request(NetworkTopology(roomy))
    assert planned(graph, REGISTRY, request, cache).placement.devices == ("a",)
    full = NetworkTopology((attrs.evolve(roomy[0], memory_free=MIB), roomy[1]))
    assert planned(graph, REGISTRY, attrs.evolve(request, topology=full), cache).placement.devices == ("b",)


def test_the_scheduler_does_not_fall_back_to_what_does_not_fit():
    scheduler = Scheduler(NetworkTopology((device("full", MIB),)), REGISTRY)
    with pytest.raises(DoesNotFit, match="bytes are short"):
        scheduler.create_schedule(layers(8))


def test_the_check_of_these_tests_finds_what_is_wrong():
    graph = random_program(random.Random(3))
    request = Request(NetworkTopology((device("a", None),)))
    result = plan(graph, REGISTRY, request)
    full = NetworkTopology((device("a", 1, dtypes=frozenset({"int64"})),))
    found = broken(result, attrs.evolve(request, topology=full, memory_limits={"a": 1}))
    assert any("lacks" in fault for fault in found)
    assert any("has 1 free" in fault for fault in found)
    assert any("limit is 1" in fault for fault in found)
