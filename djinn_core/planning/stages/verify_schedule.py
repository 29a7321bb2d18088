"""Validation of schedules by dry-running their steps.

Every device executes its steps in order; a `Receive` waits for its `Send`. Each storage has a version: the number of
writes to it so far. A node must find every input present, at the version of program order. A storage is on one device,
and each copy carries the version at which it was sent. So one interleaving of the devices stands for all. No device may
exceed its usable bytes or its configured limit at any time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from djinn_core.errors import DoesNotFit, InvalidStage
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.graph import Node, storages_written
from djinn_core.ir.handles import storage_of, storages_of
from djinn_core.ir.schedule import ExecutionSchedule, Fetch, Free, Receive, Run, Send, Step, Upload
from djinn_core.planning.stages.ordering import dependent_pairs
from djinn_core.planning.stages.placement_fit import shortage_message, shortages_of_steps


def check_schedule(context: SchedulingContext, schedule: ExecutionSchedule, author: str) -> None:
    """Reject a schedule that loses a node, a value, an edge or the order of mutations.

    Raises:
        DoesNotFit: a device would exceed its memory.
        InvalidStage: the schedule is illegal; the message names `author` and the first problem.
    """
    if not isinstance(schedule, ExecutionSchedule):
        raise InvalidStage(f"{author} returned a {type(schedule).__name__}; return an ExecutionSchedule")
    try:
        _check_plan(context, schedule)
        _check_groups(context, schedule)
        _DryRun(context, schedule).run()
        _check_memory(context, schedule)
    except _MemoryShortage as problem:
        raise DoesNotFit(f"{author} made a schedule that does not fit: {problem}") from None
    except _InvalidSchedule as problem:
        raise InvalidStage(f"{author} made an invalid schedule: {problem}") from None


class _InvalidSchedule(Exception):  # noqa: N818 - a signal within this file
    """A schedule breaks a rule. The message is the first problem."""


class _MemoryShortage(_InvalidSchedule):
    """A schedule needs more memory than a device has."""


def _check_plan(context: SchedulingContext, schedule: ExecutionSchedule) -> None:
    if schedule.program is not context.program or schedule.rewritten is not None:
        raise _InvalidSchedule("its `program` is not the planned program (`context.program`), or `rewritten` is set")
    if dict(schedule.replace) != dict(context.plan.replace) or schedule.equal_slots != context.plan.equal_slots:
        raise _InvalidSchedule("its `replace` or `equal_slots` differs from the plan")


def _check_groups(context: SchedulingContext, schedule: ExecutionSchedule) -> None:
    devices = {d.node: d.device for d in context.placement.decisions}
    group_of: dict[int, tuple[int, int, int]] = {}  # node -> (stage, number of the group, position in it)
    for number, group in enumerate(schedule.groups):
        for position, node in enumerate(group.nodes):
            if node in group_of or devices.get(node) != group.device:
                raise _InvalidSchedule(
                    f"node {node} is in two groups, or in a group of a device that it is not placed on"
                )
            group_of[node] = (group.stage, number, position)
    if missing := sorted(devices.keys() - group_of.keys()):
        raise _InvalidSchedule(f"nodes {missing[:8]} are in no group")
    for source, target in dependent_pairs(context):
        first, second = group_of[source], group_of[target]
        is_ordered = first < second if first[1] == second[1] else first[0] < second[0]
        if not is_ordered:
            raise _InvalidSchedule(f"node {target} needs node {source}, but their groups do not run in that order")


def _check_memory(context: SchedulingContext, schedule: ExecutionSchedule) -> None:
    if short := shortages_of_steps(context, schedule.steps):
        rejections = "".join(f"; not {rejection}" for rejection in context.placement.rejections)
        raise _MemoryShortage(f"{shortage_message(short)}{rejections}")


@attrs.define
class _Machine:
    """One device: its remaining steps, and the copies that it received."""

    steps: Sequence[Step]
    at: int = 0
    copies: dict[int, int] = attrs.field(factory=dict)


class _DryRun:
    """A run of the steps of all devices without data, which checks the storage versions that each step would see."""

    def __init__(self, context: SchedulingContext, schedule: ExecutionSchedule) -> None:
        self.graph, self.replace = context.graph, context.plan.replace
        self.dead = schedule.program.dead
        self.home = context.placement.values
        self.device_of = {d.node: d.device for d in context.placement.decisions}
        self.replicas = {(r.node, r.device) for r in context.placement.replicas}
        self.machines = {device: _Machine(steps) for device, steps in schedule.steps.items()}
        uploads = {s.value for steps in schedule.steps.values() for s in steps if isinstance(s, Upload)}
        elsewhere = {v: d for v, d in context.resident.items() if self.home.get(v, d) != d}
        for value, device in elsewhere.items():
            self.machines.setdefault(device, _Machine(())).copies[value] = 0
        for value, devices in context.copies.items():
            for device in devices:
                self.machines.setdefault(device, _Machine(())).copies[value] = 0
        self.present = {v for v in context.graph.inputs if v not in uploads and v not in elsewhere}
        self.freed: set[int] = set()
        self.versions: Counter[int] = Counter()
        self.mail: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        running = [context.graph.nodes[i] for i in context.plan.nodes]
        self.written_storages = frozenset([storage for node in running for storage in storages_written(node)])
        self.expected = _expected_versions(running, self.replace, self.written_storages)
        self.random_nodes = _random_order(running, self.device_of)
        self.completed: set[int] = set()
        self.actions: dict[type, Callable[[str, Any], None]] = {
            Upload: self._upload, Run: self._run, Send: self._send, Receive: self._receive, Free: self._free,
            Fetch: self._fetch,
        }  # fmt: skip

    def run(self) -> None:
        while sum(self._advance(device) for device in self.machines):
            pass
        for device, machine in self.machines.items():
            if machine.at < len(machine.steps):
                raise _InvalidSchedule(
                    f"deadlock: {device} waits forever in step {machine.at}, {machine.steps[machine.at]}"
                )
        if missing := sorted(self.device_of.keys() - self.completed):
            raise _InvalidSchedule(f"nodes {missing[:8]} never run")
        if self.replicas:
            raise _InvalidSchedule(f"replicas never run: {sorted(self.replicas)[:8]}")

    def _advance(self, device: str) -> bool:
        machine, start = self.machines[device], self.machines[device].at
        while machine.at < len(machine.steps):
            step = machine.steps[machine.at]
            if isinstance(step, Receive) and not self.mail[step.source, device, step.value]:
                break
            self.actions[type(step)](device, step)
            machine.at += 1
        return machine.at > start

    def _version(self, device: str, value: int) -> int:
        """Return the version at which `device` sees `value`."""
        if self.home.get(value) != device:
            if value not in self.machines[device].copies:
                raise _InvalidSchedule(f"{device} uses value {value}, which it never received")
            return self.machines[device].copies[value]
        if value not in self.present:
            raise _InvalidSchedule(
                f"{device} uses value {value} {'after it was freed' if value in self.freed else 'too early'}"
            )
        return self.versions[storage_of(value)]

    def _run(self, device: str, step: Run) -> None:
        nodes, device_of, completed, present, home = (
            self.graph.nodes,
            self.device_of,
            self.completed,
            self.present,
            self.home,
        )
        replace, written_storages = self.replace, self.written_storages
        for node_id in step.nodes:
            if (node_id, device) in self.replicas:
                self._repeat(device, nodes[node_id])
                continue
            if node_id in completed or device_of.get(node_id) != device:
                raise _InvalidSchedule(f"{device} runs node {node_id} twice, or although it is placed elsewhere")
            node = nodes[node_id]
            for value in node.inputs:
                read_value = replace.get(value, value) if replace else value
                if (
                    read_value in present
                    and storage_of(read_value) not in written_storages
                    and home.get(read_value) == device
                ):
                    continue  # it is on this device, and nothing ever writes it
                self._check_version(device, node, read_value)
            if node.writes or node.random:
                self._write(device, node)
            present.update(node.outputs)
            completed.add(node_id)

    def _check_version(self, device: str, node: Node, read_value: int) -> None:
        version, expected = self._version(device, read_value), self.expected.get((node.id, storage_of(read_value)), 0)
        if version != expected:
            raise _InvalidSchedule(
                f"{node.op} (node {node.id}) sees value {read_value} after {version} writes, not after {expected}"
            )

    def _repeat(self, device: str, node: Node) -> None:
        """Run a node on a further device. Its results there are copies; a view has the version of its operand."""
        self.replicas.discard((node.id, device))
        versions: dict[int, int] = {}
        for value in node.inputs:
            read_value = self.replace.get(value, value)
            self._check_version(device, node, read_value)
            versions[storage_of(read_value)] = self._version(device, read_value)
        for value in node.outputs:
            self.machines[device].copies[value] = versions.get(storage_of(value), 0)

    def _write(self, device: str, node: Node) -> None:
        if node.random and self.random_nodes[device].pop(0) != node.id:
            raise _InvalidSchedule(f"{node.op} (node {node.id}) takes its random numbers out of order")
        for storage in storages_written(node):  # a replaced value is never written
            self.versions[storage] += 1

    def _upload(self, device: str, step: Upload) -> None:
        if self.home.get(step.value) != device or step.value not in self.graph.inputs or step.value in self.present:
            raise _InvalidSchedule(
                f"{device} uploads value {step.value}, which is not an input, is on the device already, or is placed elsewhere"
            )
        self.present.add(step.value)

    def _send(self, device: str, step: Send) -> None:
        self.mail[device, step.target, step.value].append(self._version(device, step.value))

    def _receive(self, device: str, step: Receive) -> None:
        version = self.mail[step.source, device, step.value].pop(0)
        if self.home.get(step.value) == device:  # an input that moved to this device
            self.present.add(step.value)
        else:
            self.machines[device].copies[step.value] = version

    def _free(self, device: str, step: Free) -> None:
        for value in step.values:
            if self.home.get(value) != device:
                self.machines[device].copies.pop(value, None)
                continue
            if value not in self.dead or value not in self.present:
                raise _InvalidSchedule(
                    f"{device} frees value {value}, which is still in use, was never there, or is already freed"
                )
            self.present.remove(value)
            self.freed.add(value)

    def _fetch(self, device: str, step: Fetch) -> None:
        self._version(device, step.value)


def _expected_versions(
    running: Sequence[Node], replace: Mapping[int, int], written_storages: frozenset[int]
) -> dict[tuple[int, int], int]:
    """Return, for each node and each of `written_storages` that the node reads, the number of earlier writes."""
    versions = dict.fromkeys(written_storages, 0)
    expected: dict[tuple[int, int], int] = {}
    for node in running if written_storages else ():
        for value in node.inputs:
            for storage in storages_of((value, replace.get(value, value))):
                if storage in written_storages:
                    expected[node.id, storage] = versions[storage]
        for storage in storages_written(node) if node.writes or node.random else ():
            versions[storage] += 1
    return expected


def _random_order(running: Sequence[Node], device_of: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the nodes that draw random numbers, by device, in program order. Each device has its own random state."""
    nodes_by_device: dict[str, list[int]] = defaultdict(list)
    for node in running:
        if node.random and node.id in device_of:
            nodes_by_device[device_of[node.id]].append(node.id)
    return nodes_by_device
