"""Build a legal placement from a function that chooses a device for one node."""

from __future__ import annotations

from collections.abc import Callable

from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.ir.colocation import colocation_of, homes_of_values, resident_blocks
from djinn_core.ir.graph import Node
from djinn_core.ir.placement import Placement, PlacementDecision

_STAYS = "the memory that it writes is there"


class BlockHomes:
    """Devices of values while a placement is built. A value's device is called its home.

    Values that share memory, or that one op creates, share a home: the first device that any of them gets. Inputs that
    already are on a device stay there.
    """

    def __init__(self, context: PlacementContext) -> None:
        graph, plan = context.graph, context.plan
        self.blocks = colocation_of(graph, plan.nodes, plan.replace)
        self.devices = resident_blocks(self.blocks, graph.inputs, context.resident)
        self._replace, self._resident = plan.replace, frozenset(self.devices)
        self._reasons = dict.fromkeys(self.devices, _STAYS)

    def of(self, value: int) -> str | None:
        """Return the home of a value, or None if it has none yet."""
        return self.devices.get(self._block(value))

    def of_node(self, node: Node) -> str | None:
        """Return the home of the values that a node creates or writes, or None if they have none yet."""
        block = self.blocks.node(node.id)
        return None if block is None else self.devices.get(block)

    def is_resident(self, value: int) -> bool:
        """Return True if a value was on a device before this program."""
        return self._block(value) in self._resident

    def settle(self, value: int, device: str, reason: str) -> None:
        """Set the home of a value, unless it has one."""
        self._settle(self._block(value), device, reason)

    def settle_node(self, node: Node, device: str, reason: str) -> tuple[str, str]:
        """Set the home of the values that a node creates or writes, unless they have one.

        Return the device of this home and its reason: those given, or those set earlier.
        """
        block = self.blocks.node(node.id)
        return (device, reason) if block is None else self._settle(block, device, reason)

    def _block(self, value: int) -> int:
        return self.blocks.block(self._replace.get(value, value))

    def _settle(self, block: int, device: str, reason: str) -> tuple[str, str]:
        return self.devices.setdefault(block, device), self._reasons.setdefault(block, reason)


def assign_blocks(
    context: PlacementContext,
    policy: str,
    choose: Callable[[Node, BlockHomes], tuple[str, str]],
    homes: BlockHomes | None = None,
) -> Placement:
    """Return a placement, built node by node.

    A node runs on the device from `choose`, or on the device of the memory that it writes.

    Args:
        context: the placement problem.
        policy: name of the placement policy.
        choose: returns the device of a node and the reason. Operands without a home get the device of the node.
        homes: homes that are known before the first node; by default the homes of inputs that already are on a
            device.
    """
    homes = homes or BlockHomes(context)
    graph, nodes = context.graph, context.plan.nodes
    decisions = []
    for node_id in nodes:
        node = graph.nodes[node_id]
        device, reason = homes.settle_node(node, *choose(node, homes))
        for value in node.inputs:
            homes.settle(value, device, reason)
        decisions.append(PlacementDecision(node_id, device, reason))
    for value in graph.inputs:  # an input that only dropped nodes read
        homes.settle(value, context.topology.devices[0].id, "no op reads it")
    return Placement(tuple(decisions), homes_of_values(graph, nodes, homes.blocks, homes.devices), policy)
