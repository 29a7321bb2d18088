"""Devices in turn: what a placement is worth is measured against this."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from djinn.hooks import InvalidStage, Placement, PlacementContext, PlacementDecision, PlacementPolicy, hookimpl
from djinn.scheduling import homes_of_values, resident_blocks, together

djinn_api_version = "2.0"


class RoundRobin:
    """Every value that has no home yet is given the next device, whatever it is; ops run where their results live."""

    name = "round_robin"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """A device for each block of values that share memory, in turn, in the order of first use.

        Raises:
            InvalidStage: there are no devices.
        """
        devices = [d.id for d in context.topology.devices]
        if not devices:
            raise InvalidStage("there are no devices; connect a server")
        graph, replace, nodes = context.graph, context.plan.replace, context.plan.nodes
        blocks = together(graph, nodes, replace)
        homes = resident_blocks(blocks, graph.inputs, context.resident)
        stayed, turns = frozenset(homes), itertools.cycle(devices)
        decisions = []
        for node_id in nodes:
            node, block = graph.nodes[node_id], blocks.node(node_id)
            used = [blocks.block(replace.get(v, v)) for v in node.inputs]
            for touched in (*used, *(() if block is None else (block,))):
                if touched not in homes:
                    homes[touched] = next(turns)
            if block is None:
                block = used[0] if used else None
            device = devices[0] if block is None else homes[block]
            reason = "what it writes is there" if block in stayed else f"in turn, one of {len(devices)}"
            decisions.append(PlacementDecision(node_id, device, reason))
        for value in graph.inputs:
            homes.setdefault(blocks.block(value), devices[0])
        return Placement(tuple(decisions), homes_of_values(graph, nodes, blocks, homes), self.name)


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `round_robin`."""
    return [RoundRobin()]
