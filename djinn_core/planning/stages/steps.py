"""Convert an order of nodes to the steps of every device: transfers, runs and frees.

A value is sent directly after an op computed or wrote it, received right before its first use, and freed after its last
use. All devices follow one topological order, so no deadlock is possible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.graph import Node
from djinn_core.ir.handles import storage_of
from djinn_core.ir.replicas import by_node
from djinn_core.ir.schedule import (
    Fetch,
    Free,
    Receive,
    Run,
    Send,
    Step,
    Upload,
)

_START = -1  # moment before the first node


def write_steps(context: SchedulingContext, order: Sequence[int]) -> dict[str, tuple[Step, ...]]:
    """Return the steps by device for the running nodes in `order`, which respects all dependences."""
    walk = _TransferWalk(context)
    nodes = context.graph.nodes
    for moment, node_id in enumerate(order):
        walk.add_node(moment, nodes[node_id])
    return _write(context, walk, order)


class _TransferWalk:
    """A walk over the order that finds transfers and the last use of each value. Moments are positions in the order."""

    def __init__(self, context: SchedulingContext) -> None:
        self.context = context
        self.replace, self.home = context.plan.replace, context.placement.values
        self.device_of = {d.node: d.device for d in context.placement.decisions}
        self.replicas = by_node(context.placement.replicas)
        self.missing_inputs = set(context.graph.inputs)
        self.written_at: dict[int, int] = {}  # moment of the last write, by value, and by written storage (as ~storage)
        self.versions: Counter[int] = Counter()
        self.copies = {(device, value): 0 for value, devices in context.copies.items() for device in devices}
        self.arrived_at: dict[int, int] = {}  # by input: the moment before which it arrives at its home
        self.before: dict[int, list[tuple[str, Step]]] = defaultdict(list)
        self.after: dict[int, list[tuple[str, Step]]] = defaultdict(list)
        self.last_use: dict[str, dict[int, int]] = defaultdict(dict)  # moment of the last use, by device and value

    def add_node(self, moment: int, node: Node) -> None:
        device, home, replace, missing_inputs = self.device_of[node.id], self.home, self.replace, self.missing_inputs
        last_use = self.last_use[device]
        for value in node.inputs:
            source = replace.get(value, value) if replace else value
            if source in missing_inputs:
                self._bring_home(moment, source)
            if home[source] != device:
                self._send_copy(moment, source, device)
            last_use[source] = moment
        for value in node.outputs:
            last_use[value] = self.written_at[value] = moment
        for replica_device in self.replicas.get(node.id, ()) if self.replicas else ():
            self._repeat(moment, node, replica_device)
        for value in node.writes:
            storage = storage_of(replace.get(value, value))
            self.versions[storage] += 1
            self.written_at[~storage] = moment

    def _repeat(self, moment: int, node: Node, device: str) -> None:
        """Run a node on a further device as well: send its operands to this device.

        Its results on the device are copies.
        """
        for value in node.inputs:
            source = self.replace.get(value, value)
            if self.home[source] != device:
                self._send_copy(moment, source, device)
            self.last_use[device][source] = moment
        for value in node.outputs:
            self.copies[device, value] = self.versions[storage_of(value)]
            self.last_use[device][value] = moment

    def _bring_home(self, moment: int, value: int) -> None:
        """Add the steps that bring an input to its home, from the client or from its previous device."""
        home, source = self.home[value], self.context.resident.get(value)
        self.missing_inputs.remove(value)
        self.arrived_at[value] = moment if source != home else _START
        if source is None:
            self.before[moment].append((home, Upload(value)))
        elif source != home:
            self.after[_START].append((source, Send(value, home)))
            self.before[moment].append((home, Receive(value, source)))

    def _send_copy(self, moment: int, value: int, device: str) -> None:
        """Add the transfer of the newest version of a value to a device that uses it, unless the device has it."""
        storage = storage_of(value)
        version = self.versions[storage]
        if self.copies.get((device, value)) == version:
            return
        self.copies[device, value] = version
        home = self.home[value]
        produced_at = max(self.written_at.get(value, _START), self.written_at.get(~storage, _START))
        arrived_at = self.arrived_at.get(value, _START)
        (self.before[arrived_at] if arrived_at > produced_at else self.after[produced_at]).append(
            (home, Send(value, device))
        )
        self.before[moment].append((device, Receive(value, home)))
        self.last_use[home][value] = max(self.last_use[home].get(value, _START), arrived_at, produced_at)

    def frees(self) -> dict[int, dict[str, list[int]]]:
        """Return the values to free, by moment and device: dead values at home, and copies that are not kept."""
        context, home = self.context, self.home
        dead = context.program.dead - frozenset(context.fetch)
        frees: dict[int, dict[str, list[int]]] = defaultdict(dict)
        for device, last_use in self.last_use.items():
            for value, moment in last_use.items():
                if home[value] == device:
                    if value not in dead:
                        continue
                elif device in (*context.copies.get(value, ()), *context.placement.copies.get(value, ())):
                    continue
                values = frees[moment].get(device)
                if values is None:
                    frees[moment][device] = [value]
                else:
                    values.append(value)
        return frees


def _write(context: SchedulingContext, walk: _TransferWalk, order: Sequence[int]) -> dict[str, tuple[Step, ...]]:
    """Write the steps of each device, moment by moment: steps before the node, the node, its sends, and frees."""
    steps: dict[str, list[Step]] = defaultdict(list, {device: [] for device in context.placement.devices})
    pending: dict[str, list[int]] = defaultdict(list)
    before, after, frees, device_of = walk.before, walk.after, walk.frees(), walk.device_of

    def add(device: str, step: Step) -> None:
        nodes, device_steps = pending[device], steps[device]
        if nodes:
            device_steps.append(Run(tuple(nodes)))
            nodes.clear()
        device_steps.append(step)

    for moment in range(_START, len(order)):
        for device, step in before.get(moment, ()):
            add(device, step)
        if moment >= 0:
            node = order[moment]
            pending[device_of[node]].append(node)
            for device in walk.replicas.get(node, ()) if walk.replicas else ():
                pending[device].append(node)
        for device, step in after.get(moment, ()):
            add(device, step)
        for device, values in frees[moment].items() if moment in frees else ():
            add(device, Free(tuple(values)))
    for value in context.fetch:
        fetched_value = walk.replace.get(value, value)
        add(walk.home[fetched_value], Fetch(fetched_value))
    for device, nodes in pending.items():
        if nodes:
            steps[device].append(Run(tuple(nodes)))
    return {device: tuple(device_steps) for device, device_steps in steps.items()}
