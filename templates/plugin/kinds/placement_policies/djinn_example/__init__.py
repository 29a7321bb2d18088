"""A placement policy for Djinn: everything on the device with the most free memory."""

from __future__ import annotations

from djinn.hooks import Placement, PlacementContext, PlacementDecision, PlacementPolicy, hookimpl

djinn_api_version = "2.0"


class ExamplePolicy:
    """One device for the whole program. Chosen with `djinn.configure(placement_policy="example")`."""

    name = "example"
    tolerates_growth = True  # what it says does not depend on how long a sequence or a cache is

    def place(self, context: PlacementContext) -> Placement:
        """A device and a reason for every node of the plan, and a device for every value."""
        device = max(context.topology.devices, key=lambda candidate: (candidate.memory_free or 0, candidate.id))
        reason = f"{device.id} has the most free memory, {device.memory_free or 0:,} bytes"
        made = (value for node in context.graph.nodes for value in node.outputs)
        return Placement(
            decisions=tuple(PlacementDecision(node, device.id, reason) for node in context.plan.nodes),
            values=dict.fromkeys((*context.graph.inputs, *made), device.id),
            policy=self.name,
        )


@hookimpl
def djinn_register_placement_policies() -> list[PlacementPolicy]:
    """The placement policies that this plugin offers."""
    return [ExamplePolicy()]
