"""Round-robin placement: the baseline for other policies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from djinn.hooks import PlacementContext, PlacementPolicy, hookimpl
from djinn.planning import BlockHomes, Node, Placement, assign_blocks

djinn_api_version = "2.0"


class RoundRobin(PlacementPolicy):
    """Placement policy that assigns each value without a device to the next device. Ops run where their results are."""

    name = "round_robin"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """Return a placement of values on devices in rotation, by first use. Values that share memory stay together."""
        devices = [d.id for d in context.topology.devices]
        next_devices, reason = itertools.cycle(devices), f"round robin over {len(devices)} devices"

        def choose(node: Node, homes: BlockHomes) -> tuple[str, str]:
            for value in node.inputs:
                if homes.of(value) is None:
                    homes.settle(value, next(next_devices), reason)
            if node.outputs or node.writes:
                return homes.of_node(node) or next(next_devices), reason
            return (homes.of(node.inputs[0]) if node.inputs else None) or devices[0], reason

        return assign_blocks(context, self.name, choose)


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """Return the placement policy `round_robin`."""
    return [RoundRobin()]
