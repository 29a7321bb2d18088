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
    moves = _Moves(context)
    nodes = context.graph.nodes
    for turn, node_id in enumerate(order):
        moves.take(turn, nodes[node_id])
    return _write(context, moves, order)


class _Moves:
    """A walk over the order that finds transfers and the last use of each value. Moments are positions in the order."""

    def __init__(self, context: SchedulingContext) -> None:
        self.context = context
        self.replace, self.home = context.plan.replace, context.placement.values
        self.device_of = {d.node: d.device for d in context.placement.decisions}
        self.replicas = by_node(context.placement.replicas)
        self.unsettled = set(context.graph.inputs)
        self.made: dict[int, int] = {}  # moment of the last write, by value, and by written storage (as ~storage)
        self.versions: Counter[int] = Counter()
        self.copies = {(device, value): 0 for value, devices in context.copies.items() for device in devices}
        self.settled: dict[int, int] = {}  # by input: the moment before which it arrives at its home
        self.before: dict[int, list[tuple[str, Step]]] = defaultdict(list)
        self.after: dict[int, list[tuple[str, Step]]] = defaultdict(list)
        self.last: dict[str, dict[int, int]] = defaultdict(dict)  # moment of the last use, by device and value

    def take(self, turn: int, node: Node) -> None:
        device, home, replace, unsettled = self.device_of[node.id], self.home, self.replace, self.unsettled
        last = self.last[device]
        for value in node.inputs:
            source = replace.get(value, value) if replace else value
            if source in unsettled:
                self._settle(turn, source)
            if home[source] != device:
                self._bring(turn, source, device)
            last[source] = turn
        for value in node.outputs:
            last[value] = self.made[value] = turn
        for other in self.replicas.get(node.id, ()) if self.replicas else ():
            self._repeat(turn, node, other)
        for value in node.writes:
            storage = storage_of(replace.get(value, value))
            self.versions[storage] += 1
            self.made[~storage] = turn

    def _repeat(self, turn: int, node: Node, device: str) -> None:
        """Run a node on a further device as well: send its operands to this device.

        Its results on the device are copies.
        """
        for value in node.inputs:
            source = self.replace.get(value, value)
            if self.home[source] != device:
                self._bring(turn, source, device)
            self.last[device][source] = turn
        for value in node.outputs:
            self.copies[device, value] = self.versions[storage_of(value)]
            self.last[device][value] = turn

    def _settle(self, turn: int, value: int) -> None:
        """Bring an input to its home, from the client or from its previous device."""
        home, source = self.home[value], self.context.resident.get(value)
        self.unsettled.remove(value)
        self.settled[value] = turn if source != home else _START
        if source is None:
            self.before[turn].append((home, Upload(value)))
        elif source != home:
            self.after[_START].append((source, Send(value, home)))
            self.before[turn].append((home, Receive(value, source)))

    def _bring(self, turn: int, value: int, device: str) -> None:
        """Send the newest version of a value to a device that uses it."""
        storage = storage_of(value)
        version = self.versions[storage]
        if self.copies.get((device, value)) == version:
            return
        self.copies[device, value] = version
        home = self.home[value]
        produced_at = max(self.made.get(value, _START), self.made.get(~storage, _START))
        settled = self.settled.get(value, _START)
        (self.before[settled] if settled > produced_at else self.after[produced_at]).append((home, Send(value, device)))
        self.before[turn].append((device, Receive(value, home)))
        self.last[home][value] = max(self.last[home].get(value, _START), settled, produced_at)

    def endings(self) -> dict[int, dict[str, list[int]]]:
        """Return the values to free, by moment and device: dead values at home, and copies that are not kept."""
        context, home = self.context, self.home
        over = context.program.dead - frozenset(context.fetch)
        ends: dict[int, dict[str, list[int]]] = defaultdict(dict)
        for device, last in self.last.items():
            for value, turn in last.items():
                if home[value] == device:
                    if value not in over:
                        continue
                elif device in (*context.copies.get(value, ()), *context.placement.copies.get(value, ())):
                    continue
                there = ends[turn].get(device)
                if there is None:
                    ends[turn][device] = [value]
                else:
                    there.append(value)
        return ends


def _write(context: SchedulingContext, moves: _Moves, order: Sequence[int]) -> dict[str, tuple[Step, ...]]:
    """Write the steps of each device, moment by moment: steps before the node, the node, its sends, and frees."""
    steps: dict[str, list[Step]] = defaultdict(list, {device: [] for device in context.placement.devices})
    pending: dict[str, list[int]] = defaultdict(list)
    before, after, ends, device_of = moves.before, moves.after, moves.endings(), moves.device_of

    def add(device: str, step: Step) -> None:
        nodes, there = pending[device], steps[device]
        if nodes:
            there.append(Run(tuple(nodes)))
            nodes.clear()
        there.append(step)

    for turn in range(_START, len(order)):
        for device, step in before.get(turn, ()):
            add(device, step)
        if turn >= 0:
            node = order[turn]
            pending[device_of[node]].append(node)
            for device in moves.replicas.get(node, ()) if moves.replicas else ():
                pending[device].append(node)
        for device, step in after.get(turn, ()):
            add(device, step)
        for device, values in ends[turn].items() if turn in ends else ():
            add(device, Free(tuple(values)))
    for value in context.fetch:
        real = moves.replace.get(value, value)
        add(moves.home[real], Fetch(real))
    for device, nodes in pending.items():
        if nodes:
            steps[device].append(Run(tuple(nodes)))
    return {device: tuple(done) for device, done in steps.items()}
