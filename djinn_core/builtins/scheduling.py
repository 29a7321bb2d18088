"""The built-in scheduler `sequential`: program order, values moved when they are needed and freed after their last use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.schedulers import ScheduleMaker, SchedulingContext
from djinn_core.ir.graph import Node
from djinn_core.ir.schedule import (
    ExecutionSchedule,
    Fetch,
    Free,
    Receive,
    Run,
    SchedulingGroup,
    Send,
    Step,
    Upload,
)
from djinn_core.ir.values import storage_of

djinn_api_version = 1


class Sequential:
    """Runs nodes in program order, whatever the placement; a new stage begins where the device changes."""

    name = "sequential"
    tolerates_growth = True

    def schedule(self, context: SchedulingContext) -> ExecutionSchedule:
        """Groups and steps for every device of the placement."""
        writer = _Writer(context)
        for node_id in context.plan.nodes:
            writer.take(context.graph.nodes[node_id])
        groups = _groups(context)
        devices = len(context.placement.devices)
        return ExecutionSchedule(
            program=context.program,
            groups=groups,
            steps=writer.finish(),
            replace=context.plan.replace,
            equal_slots=context.plan.equal_slots,
            scheduler=self.name,
            reasons=(f"program order in {len(groups)} stages on {devices} devices, freed after last use",),
        )


def _groups(context: SchedulingContext) -> tuple[SchedulingGroup, ...]:
    """One stage for each run of nodes on the same device."""
    device_of = {d.node: d.device for d in context.placement.decisions}
    runs: list[tuple[str, list[int]]] = []
    for node in context.plan.nodes:
        if not runs or runs[-1][0] != device_of[node]:
            runs.append((device_of[node], []))
        runs[-1][1].append(node)
    return tuple(SchedulingGroup(stage, device, tuple(nodes)) for stage, (device, nodes) in enumerate(runs))


class _Writer:
    """Writes the steps of all devices while it walks the program once."""

    def __init__(self, context: SchedulingContext) -> None:
        self.context = context
        self.replace = context.plan.replace
        self.home = context.placement.values
        self.device_of = {d.node: d.device for d in context.placement.decisions}
        self.steps: dict[str, list[Step]] = {d: [] for d in context.placement.devices}
        self.pending: dict[str, list[int]] = defaultdict(list)
        self.copies = {(device, value): 0 for value, devices in context.copies.items() for device in devices}
        self.versions: Counter[int] = Counter()
        self.arrived: set[int] = set()
        self.inputs = frozenset(context.graph.inputs)
        self.last_node, self.last_copy = self._last_uses()

    def _last_uses(self) -> tuple[dict[int, list[int]], dict[int, list[tuple[str, int]]]]:
        """By node: the dead values, and the copies on other devices, that nothing after it needs."""
        last: dict[int, int] = {}
        copied: dict[tuple[str, int], int] = {}
        for node_id in self.context.plan.nodes:
            node = self.context.graph.nodes[node_id]
            last.update(dict.fromkeys(node.outputs, node_id))
            for value in self._used(node):
                last[value] = node_id
                device = self.device_of[node_id]
                if self.home[value] != device and device not in self._keepers(value):
                    copied[device, value] = node_id
        kept = set(self.context.fetch)
        values: dict[int, list[int]] = defaultdict(list)
        copies: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for value, node_id in last.items():
            if value in self.context.program.dead and value not in kept:
                values[node_id].append(value)
        for copy, node_id in copied.items():
            copies[node_id].append(copy)
        return values, copies

    def _keepers(self, value: int) -> tuple[str, ...]:
        """Devices whose copy of `value` outlives the program, unless the program ends it."""
        return (*self.context.copies.get(value, ()), *self.context.placement.copies.get(value, ()))

    def _used(self, node: Node) -> dict[int, None]:
        return dict.fromkeys(self.replace.get(v, v) for v in node.inputs)

    def take(self, node: Node) -> None:
        device = self.device_of[node.id]
        for value in self._used(node):
            self._bring(value, device)
        self.pending[device].append(node.id)
        for value in node.writes:
            self.versions[storage_of(value)] += 1
        by_device: dict[str, list[int]] = defaultdict(list)
        for value in self.last_node[node.id]:
            by_device[self.home[value]].append(value)
        for holder, value in self.last_copy[node.id]:
            by_device[holder].append(value)
        for holder, values in by_device.items():
            self._add(holder, Free(tuple(values)))

    def _bring(self, value: int, device: str) -> None:
        """Upload an input that is nowhere yet; send a value, or its newer version, to the device that needs it."""
        home = self.home[value]
        if value in self.inputs and value not in self.arrived:
            self.arrived.add(value)
            self._settle(value, home)
        version = self.versions[storage_of(value)]
        if home != device and self.copies.get((device, value)) != version:
            self.copies[device, value] = version
            self._add(home, Send(value, device))
            self._add(device, Receive(value, home))

    def _settle(self, value: int, home: str) -> None:
        source = self.context.resident.get(value)
        if source is None:
            self._add(home, Upload(value))
        elif source != home:
            self._add(source, Send(value, home))
            self._add(home, Receive(value, source))

    def _add(self, device: str, step: Step) -> None:
        if self.pending[device]:
            self.steps.setdefault(device, []).append(Run(tuple(self.pending.pop(device))))
        self.steps.setdefault(device, []).append(step)

    def finish(self) -> dict[str, tuple[Step, ...]]:
        for value in self.context.fetch:
            real = self.replace.get(value, value)
            self._add(self.home[real], Fetch(real))
        for device in list(self.pending):
            if self.pending[device]:
                self.steps.setdefault(device, []).append(Run(tuple(self.pending.pop(device))))
        return {device: tuple(steps) for device, steps in self.steps.items()}


@hookimpl
def djinn_register_schedulers() -> Iterable[ScheduleMaker]:
    """The scheduler `sequential`."""
    return [Sequential()]
