"""Conformance suite for placement policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import attrs
import pytest

from djinn.testing.builders import ProgramBuilder
from djinn.testing.contexts import placement_context
from djinn.testing.samples import attention_in_parts, perceptron
from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.planning.stages.verify import check_placement


class PlacementPolicyConformance(OnGraphs):
    """Tests that every placement policy must pass. Subclass this class and define the fixture `policy`."""

    @pytest.fixture
    def policy(self) -> PlacementPolicy:
        """Return the placement policy under test."""
        return missing(self, "policy", "your placement policy")  # type: ignore[return-value]

    def test_placement_policy_has_every_member(self, policy: PlacementPolicy) -> None:
        """The policy has all attributes and methods of `PlacementPolicy`."""
        require_protocol(policy, "placement_policies")

    @pytest.mark.parametrize("devices", [1, 2, 3])
    def test_placements_are_legal(self, policy: PlacementPolicy, graphs: Mapping[str, Graph], devices: int) -> None:
        """Every node has a device and a reason, and shared memory is on one device.

        Repeated calls return equal placements.
        """
        for name, graph in graphs.items():
            context = placement_context(graph, devices)
            placement = policy.place(context)
            check_placement(context, placement, f"{policy.name} on {name}")
            assert policy.place(context) == placement, f"{name}: two calls returned different placements"

    @pytest.mark.parametrize("situation", ["last", "mixed", "unequal", "unknown", "nothing free", "limits"])
    def test_unusual_devices_are_handled(
        self, policy: PlacementPolicy, graphs: Mapping[str, Graph], situation: str
    ) -> None:
        """The policy accepts inputs with locations, and unequal, unmeasured, full or limited devices.

        It may raise `DoesNotFit`.
        """
        for name, graph in (*graphs.items(), ("writes of a list", list_write())):
            context = _situations(placement_context(graph, devices=2))[situation]
            with contextlib.suppress(DoesNotFit):
                check_placement(context, policy.place(context), f"{policy.name} on {name} ({situation})")

    @pytest.mark.parametrize("devices", [2, 3])
    def test_replaced_values_are_respected(self, policy: PlacementPolicy, devices: int) -> None:
        """If another value replaces the result of a dropped node (`plan.replace`), the policy uses the replacement."""
        builder = ProgramBuilder()
        x, y = builder.input(8, 8), builder.input(8, 8)
        kept_value, dropped_value = (builder.op("aten::relu", x, shape=(8, 8)) for _ in range(2))
        builder.op("aten::mm", dropped_value, y, shape=(8, 8))
        context = placement_context(builder.graph(), devices)
        context = attrs.evolve(context, plan=OptimizationPlan((0, 2), {dropped_value: kept_value}))
        check_placement(context, policy.place(context), policy.name)

    @pytest.mark.parametrize(
        "make", [perceptron, lambda length: attention_in_parts(length=length)], ids=["batch", "length"]
    )
    def test_size_independent_policy_places_alike(self, policy: PlacementPolicy, make: Callable[[int], Graph]) -> None:
        """If the policy sets `tolerates_growth`, two programs whose sizes differ by a factor of 64 get equal placements."""
        if not policy.tolerates_growth:
            return
        short, long = (_devices(policy, placement_context(make(size), devices=2)) for size in (8, 512))
        assert short == long, "the policy sets `tolerates_growth`, but places larger sizes differently"


def list_write() -> Graph:
    """Return a graph in which one op writes two weights."""
    builder = ProgramBuilder()
    weights, gradients = ([builder.input(8, 8) for _ in range(2)] for _ in range(2))
    builder.inplace("aten::_foreach_add_.List", *weights, *gradients)
    call = builder.calls[-1]
    builder.calls[-1] = attrs.evolve(call, writes=(0, 1), results=(None,), aliases=(-1,), inplace=(-1,))
    return builder.graph()


def _situations(context: PlacementContext) -> Mapping[str, PlacementContext]:
    """Return variants of a context over two devices."""
    first, last = context.topology.devices
    inputs = context.graph.inputs

    def with_devices(*devices: DeviceCapabilities) -> PlacementContext:
        return attrs.evolve(context, topology=attrs.evolve(context.topology, devices=devices))

    in_turn = {value: (first, last)[number % 2].id for number, value in enumerate(inputs)}
    return {
        "last": attrs.evolve(context, resident=dict.fromkeys(inputs, last.id)),
        "mixed": attrs.evolve(context, resident=in_turn),
        "unequal": with_devices(first, attrs.evolve(last, memory=1 << 20, memory_free=1 << 16)),
        "unknown": with_devices(*(attrs.evolve(d, memory=0, memory_free=None) for d in (first, last))),
        "nothing free": with_devices(*(attrs.evolve(d, memory_free=0) for d in (first, last))),
        "limits": attrs.evolve(context, memory_limits={first.id: 1}),
    }


def _devices(policy: PlacementPolicy, context: PlacementContext) -> list[str]:
    """Return the devices of the nodes, then of the values, in program order."""
    placement, graph = policy.place(context), context.graph
    nodes = {decision.node: decision.device for decision in placement.decisions}
    values = [*graph.inputs, *(value for node in graph.nodes for value in node.outputs)]
    return [*(nodes[node] for node in context.plan.nodes), *(placement.values[value] for value in values)]
