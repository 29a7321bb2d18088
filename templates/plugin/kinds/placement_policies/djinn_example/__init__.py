"""A placement policy for Djinn: place all ops on the device with the most free memory."""

from __future__ import annotations

from djinn.hooks import PlacementContext, PlacementPolicy, hookimpl
from djinn.planning import Placement, assign_blocks

djinn_api_version = "2.0"


class ExamplePolicy(PlacementPolicy):
    """Choose one device for the whole program. `djinn.configure(placement_policy="example")` selects it."""

    name = "example"
    tolerates_growth = True  # the decision does not depend on the length of a sequence or cache

    def place(self, context: PlacementContext) -> Placement:
        """Return a device and a reason for every node of the plan, and a device for every value."""
        device = max(context.topology.devices, key=lambda candidate: (candidate.memory_free or 0, candidate.id))
        reason = f"{device.id} has the most free memory"
        return assign_blocks(context, self.name, lambda node, homes: (device.id, reason))


@hookimpl
def djinn_register_placement_policies() -> list[PlacementPolicy]:
    """Return the placement policies of this plugin."""
    return [ExamplePolicy()]
