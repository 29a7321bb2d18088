"""Placements and schedules: legal ones give the right values on real tensors, illegal ones are refused."""

from __future__ import annotations

import attrs
import pytest
import torch

from djinn.testing import (
    CostModelConformance,
    PlacementPolicyConformance,
    ProgramBuilder,
    SchedulerConformance,
    placement_context,
    random_graph,
    scheduling_context,
)
from djinn_core.errors import InvalidStage
from djinn_core.ir.costs import DeviceCapabilities, NetworkTopology
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.schedule import Free, Receive, Run, SchedulingGroup
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.stages.place import place
from djinn_core.planning.stages.schedule import build_schedule, schedule
from djinn_core.planning.stages.verify import check_placement
from djinn_core.planning.stages.verify_schedule import check_schedule

SQUARE = (3, 3)


class TestSingleDevice(PlacementPolicyConformance):
    @pytest.fixture
    def policy(self):
        return SingleDevice()


class TestSequential(SchedulerConformance):
    @pytest.fixture
    def scheduler(self):
        return Sequential()


class TestRoofline(CostModelConformance):
    @pytest.fixture
    def cost_model(self):
        return Roofline()


def invalid_schedule(mutate):
    """Return a schedule of two tanh ops with a write between them, changed by `mutate`, and its context."""
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    first = builder.op("aten::tanh", x, shape=SQUARE)
    builder.inplace("aten::mul_.Scalar", x, slots=(2.0,))
    builder.op("aten::add.Tensor", x, first, shape=SQUARE)
    builder.drop(first)
    context = scheduling_context(builder.graph())
    context = attrs.evolve(context, resident=dict.fromkeys(context.graph.inputs, context.topology.devices[0].id))
    made = build_schedule(context, Sequential())
    (device,) = made.steps
    return context, attrs.evolve(made, **mutate(made, device)), first


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda s, d: {}, None),
        (lambda s, d: {"steps": {d: (Run((1, 0, 2)),)}}, "after 1 writes, not after 0"),
        (lambda s, d: {"steps": {d: (Run((0, 1)),)}}, "never run"),
        (lambda s, d: {"steps": {d: (Run((0, 0, 1, 2)),)}}, "twice"),
        (lambda s, d: {"steps": {d: (Run((0, 2, 1)),)}}, "writes"),
        (lambda s, d: {"steps": {d: (Run((1, 2, 0)),)}}, "too early"),
        (lambda s, d: {"steps": {d: (Run((0, 1)), Receive(5, "other"), Run((2,)))}}, "waits forever"),
        (lambda s, d: {"groups": ()}, "in no group"),
        (lambda s, d: {"groups": (SchedulingGroup(0, d, (1, 0, 2)),)}, "do not run in that order"),
        (lambda s, d: {"groups": (SchedulingGroup(1, d, (0,)), SchedulingGroup(1, d, (1, 2)))}, "in that order"),
        (lambda s, d: {"groups": (SchedulingGroup(0, "elsewhere", (0, 1, 2)),)}, "not placed on"),
    ],
)
def test_illegal_schedules_are_refused(mutate, message):
    context, made, _ = invalid_schedule(mutate)
    if message is None:
        check_schedule(context, made, "scheduler 'x'")
        return
    with pytest.raises(InvalidStage, match=message) as refused:
        check_schedule(context, made, "scheduler 'x'")
    assert "scheduler 'x'" in str(refused.value)


def test_early_free_and_free_of_held_value_are_refused():
    def free_early(made, device):
        context_free = Free((first_value(made),))
        return {"steps": {device: (Run((0,)), context_free, Run((1, 2)))}}

    context, made, _ = invalid_schedule(free_early)
    with pytest.raises(InvalidStage, match="after it was freed"):
        check_schedule(context, made, "x")
    context, made, _ = invalid_schedule(lambda s, d: {"steps": {d: (Run((0, 1, 2)), Free((s.program.operands[0],)))}})
    with pytest.raises(InvalidStage, match="still in use"):
        check_schedule(context, made, "x")


def first_value(made):
    """Return the value that the first instruction computes."""
    return made.program.operands[1]


@attrs.define
class FixedAnswer:
    """A policy and scheduler that returns `answer`, or raises it."""

    name: str
    answer: object

    def _give(self, context):
        del context
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    place = priority = _give


def test_failing_scheduler_is_replaced_and_named(caplog):
    context = scheduling_context(random_graph(1))
    made = schedule(context, FixedAnswer("wobbly", RuntimeError("no idea")), Sequential())
    assert made.scheduler == "sequential"
    assert "wobbly" in made.reasons[0]
    assert "no idea" in made.reasons[0]
    assert len([r for r in caplog.records if "wobbly" in r.getMessage()]) == 1


def test_invalid_policy_is_replaced_and_named(caplog):
    context = placement_context(random_graph(1), devices=2)
    half = Placement((PlacementDecision(0, context.topology.devices[0].id, "why not"),), {})
    placed = place(context, FixedAnswer("halfway", half), SingleDevice())
    assert placed.policy == "single"
    assert len([r for r in caplog.records if "halfway" in r.getMessage()]) == 1


def test_place_without_devices_asks_no_policy(caplog):
    policy = FixedAnswer("halfway", ValueError("max() of nothing"))
    with pytest.raises(InvalidStage, match="there are none; connect a server"):
        place(with_devices(random_graph(1)), policy, SingleDevice())
    assert not caplog.records


def test_shared_memory_must_be_on_one_device():
    builder = ProgramBuilder()
    x = builder.input(*SQUARE)
    view = builder.view("aten::t", x, shape=SQUARE)
    context = placement_context(builder.graph(), devices=2)
    one, other = (d.id for d in context.topology.devices)
    apart = Placement((PlacementDecision(0, other, "here"),), {x: one, view: other})
    with pytest.raises(InvalidStage, match="shares its memory"):
        check_placement(context, apart, "policy 'x'")


def with_devices(graph, *devices, resident=None):
    context = placement_context(graph)
    return attrs.evolve(context, topology=NetworkTopology(devices), resident=resident or {})


def test_single_chooses_device_with_most_bytes():
    builder = ProgramBuilder()
    small, large = builder.input(2, 2), builder.input(64, 64)
    builder.op("aten::mm", small, large, shape=(2, 64))
    graph = builder.graph()
    devices = (DeviceCapabilities("a", "cpu"), DeviceCapabilities("b", "cpu"))
    placed = SingleDevice().place(with_devices(graph, *devices, resident={small: "a", large: "b"}))
    assert placed.devices == ("b",)
    assert "16,384 of 16,400 bytes" in placed.decisions[0].reason


def test_single_skips_unsuitable_devices():
    builder = ProgramBuilder()
    builder.op("aten::tanh", builder.input(64, 64, dtype=torch.bfloat16), shape=(64, 64))
    graph = builder.graph()
    tiny = DeviceCapabilities("tiny", "cuda", memory=100)
    old = DeviceCapabilities("old", "cuda", dtypes=frozenset({"float32"}))
    good = DeviceCapabilities("good", "cpu")
    placed = SingleDevice().place(with_devices(graph, tiny, old, good))
    assert placed.devices == ("good",)
    assert "tiny: it would hold 16,384 bytes" in placed.decisions[0].reason
    assert "old: it lacks bfloat16" in placed.decisions[0].reason
    with pytest.raises(InvalidStage, match="no device can run this program"):
        SingleDevice().place(with_devices(graph, tiny, old))
