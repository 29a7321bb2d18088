"""Execution orders of nodes, and their groups: the choices of schedulers."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from djinn_core.hookspecs.schedulers import SchedulingContext


def dependent_pairs(context: SchedulingContext) -> list[tuple[int, int]]:
    """Return pairs of running nodes in which the second depends on the first."""
    graph, running = context.graph, frozenset(context.plan.nodes)
    if len(running) == len(graph.nodes):
        pairs = list(graph.pairs)
    else:
        pairs = [(source, target) for source, target in graph.pairs if source in running and target in running]
    for value, substitute in context.plan.replace.items():
        maker = graph.producer(substitute)
        if maker is not None:
            pairs += [(maker.id, user.id) for user in graph.consumers(value) if user.id in running]
    return pairs


@attrs.frozen(eq=False)
class Dependences:
    """Dependences between the running nodes, and the time of each node on its device.

    Attributes:
        before: predecessors by node.
        after: successors by node.
        seconds: predicted time by node.
        device: device by node.
        hops: by pair of devices the latency and the seconds per byte of a transfer.
    """

    before: Mapping[int, Sequence[int]]
    after: Mapping[int, Sequence[int]]
    seconds: Mapping[int, float]
    device: Mapping[int, str]
    _sizes: Mapping[int, int]
    _topology: Any
    _replicas: frozenset[tuple[int, str]] = frozenset()
    _hops: dict[tuple[str, str], tuple[float, float]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, context: SchedulingContext) -> Dependences:
        """Return the dependences of a placed program."""
        before: dict[int, list[int]] = defaultdict(list)
        after: dict[int, list[int]] = defaultdict(list)
        for source, target in dependent_pairs(context):
            before[target].append(source)
            after[source].append(target)
        device = {d.node: d.device for d in context.placement.decisions}
        rows = context.costs.by_device
        seconds = {node: rows[device_id][node].seconds for node, device_id in device.items()}
        graph = context.graph
        is_single_device = len(context.placement.devices) == 1
        senders = (
            () if is_single_device else {s for t, sources in before.items() for s in sources if device[s] != device[t]}
        )
        sizes = {n: sum(graph.meta(v).nbytes for v in graph.nodes[n].outputs) for n in senders}
        replicas = frozenset([(r.node, r.device) for r in context.placement.replicas])
        return cls(before, after, seconds, device, sizes, context.topology, replicas)

    def hop(self, source: int, target: int) -> float:
        """Return the seconds from the end of node `source` until its result is on the device of node `target`."""
        ends = (self.device[source], self.device[target])
        if ends[0] == ends[1] or (source, ends[1]) in self._replicas:
            return 0.0
        if ends not in self._hops:
            link = self._topology.link(*ends)
            self._hops[ends] = (link.latency, 1 / link.bandwidth if link.bandwidth else 0.0)
        latency, seconds_per_byte = self._hops[ends]
        return latency + seconds_per_byte * self._sizes[source]

    def remaining(self, nodes: Sequence[int]) -> dict[int, float]:
        """Return, by node, the critical path from its start to the end of the program, without waits for devices."""
        remaining: dict[int, float] = {}
        device = self.device
        for node in reversed(nodes):
            longest, own_device = 0.0, device[node]
            for after in self.after.get(node, ()):
                longest = max(
                    longest,
                    remaining[after] if device[after] == own_device else remaining[after] + self.hop(node, after),
                )
            remaining[node] = longest + self.seconds[node]
        return remaining


def ready_order(nodes: Sequence[int], dependences: Dependences, key: Callable[[int], Any]) -> list[int]:
    """Return the nodes in the order of list scheduling.

    A device that becomes idle takes its ready node with the least `key`.
    """
    queues = {device: _DeviceQueue() for device in dict.fromkeys(dependences.device[n] for n in nodes)}
    missing = {node: len(dependences.before.get(node, ())) for node in nodes}
    arrival = dict.fromkeys(nodes, 0.0)
    for node in nodes:
        if not missing[node]:
            heapq.heappush(queues[dependences.device[node]].arriving, (0.0, node))
    clocks = [(0.0, device) for device in queues]
    waiting: set[str] = set()
    order: list[int] = []
    seconds, afters, device_of = dependences.seconds, dependences.after, dependences.device
    while clocks:
        _, device = heapq.heappop(clocks)
        queue = queues[device]
        node = queue.pop_next(key)
        if node < 0:
            waiting.add(device)
            continue
        order.append(node)
        queue.clock += seconds[node]
        for after in afters.get(node, ()):
            target_device = device_of[after]
            arrival_time = queue.clock if target_device == device else queue.clock + dependences.hop(node, after)
            arrival[after] = max(arrival[after], arrival_time)
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(queues[target_device].arriving, (arrival[after], after))
                if target_device in waiting:
                    waiting.discard(target_device)
                    heapq.heappush(clocks, (max(queues[target_device].clock, arrival[after]), target_device))
        heapq.heappush(clocks, (queue.clock, device))
    return order


@attrs.define(eq=False)
class _DeviceQueue:
    """Pending work of one device: nodes by the time at which their operands are ready, and nodes that are ready."""

    clock: float = 0.0
    arriving: list[tuple[float, int]] = attrs.field(factory=list)
    ready: list[tuple[Any, int]] = attrs.field(factory=list)

    def pop_next(self, key: Callable[[int], Any]) -> int:
        """Remove and return the next node; -1 if no node is pending. Advance the clock to the node's start."""
        if not self.ready and self.arriving:
            self.clock = max(self.clock, self.arriving[0][0])
        while self.arriving and self.arriving[0][0] <= self.clock:
            node = heapq.heappop(self.arriving)[1]
            heapq.heappush(self.ready, (key(node), node))
        return heapq.heappop(self.ready)[1] if self.ready else -1


def strict_order(nodes: Sequence[int], before: Iterable[tuple[int, int]], key: Callable[[int], Any]) -> list[int]:
    """Return the nodes in the order of their keys, as far as the pairs (first, second) in `before` allow."""
    afters: dict[int, list[int]] = defaultdict(list)
    missing: Counter[int] = Counter()
    for source, target in before:
        afters[source].append(target)
        missing[target] += 1
    ready = [(key(node), node) for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for after in afters.get(node, ()):
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, (key(after), after))
    return order


def consecutive_groups(context: SchedulingContext, order: Sequence[int]) -> list[tuple[int, str, list[int]]]:
    """Return (stage, device, nodes) of groups: each run of nodes on one device is a group in its own stage."""
    device_of = {d.node: d.device for d in context.placement.decisions}
    runs = itertools.groupby(order, device_of.__getitem__)
    return [(stage, device, list(run)) for stage, (device, run) in enumerate(runs)]


def staged_groups(order: Sequence[int], dependences: Dependences) -> list[tuple[int, str, list[int]]]:
    """Return groups of nodes as (stage, device, nodes): each runs on one device, after all groups of earlier stages.

    A device begins a new group before it uses a result that another device computes in the same stage or a later stage.
    """
    stage_of: dict[int, int] = {}
    open_groups: dict[str, tuple[int, list[int]]] = {}
    groups: list[tuple[int, str, list[int]]] = []
    device_of, before = dependences.device, dependences.before
    for node in order:
        device, least_stage = device_of[node], 0
        for predecessor in before.get(node, ()):
            if device_of[predecessor] != device and stage_of[predecessor] >= least_stage:
                least_stage = stage_of[predecessor] + 1
        stage, nodes = open_groups.get(device, (-1, []))
        if stage < least_stage or stage < 0:
            stage, nodes = max(stage + 1, least_stage), []
            open_groups[device] = (stage, nodes)
            groups.append((stage, device, nodes))
        nodes.append(node)
        stage_of[node] = stage
    groups.sort(key=lambda group: group[0])
    return groups
