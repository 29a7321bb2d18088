"""The suite for placement policies."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest

from djinn.testing.contexts import placement_context
from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_core.hookspecs.placement_policies import PlacementPolicy
from djinn_core.ir.graph import ProgramGraph
from djinn_core.planning.stages.verify import check_placement


class PlacementPolicyConformance(OnGraphs):
    """Subclass it and give the fixture `policy`."""

    @pytest.fixture
    def policy(self) -> PlacementPolicy:
        """The placement policy."""
        return missing(self, "policy", "your placement policy")  # type: ignore[return-value]

    def test_it_is_a_placement_policy(self, policy: PlacementPolicy) -> None:
        """It has every member."""
        require_protocol(policy, "placement_policies")

    @pytest.mark.parametrize("devices", [1, 2, 3])
    def test_its_placements_hold(
        self, policy: PlacementPolicy, graphs: Mapping[str, ProgramGraph], devices: int
    ) -> None:
        """Every node has a device and a reason, shared memory is in one place, and it decides the same again."""
        for name, graph in graphs.items():
            context = placement_context(graph, devices)
            placement = policy.place(context)
            check_placement(context, placement, f"{policy.name} on {name}")
            assert policy.place(context) == placement, f"{name}: two results"

    def test_it_copes_with_inputs_that_live_somewhere(
        self, policy: PlacementPolicy, graphs: Mapping[str, ProgramGraph]
    ) -> None:
        """All inputs on the last of two devices."""
        for name, graph in graphs.items():
            context = placement_context(graph, devices=2)
            last = context.topology.devices[-1].id
            placed = attrs.evolve(context, resident=dict.fromkeys(graph.inputs, last))
            check_placement(placed, policy.place(placed), f"{policy.name} on {name}")
