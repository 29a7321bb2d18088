"""Discrete-event simulation of a schedule.

Every device executes its steps in order. A `Run` takes the time that cost models predict. A `Send` starts at once. The
transfer occupies the outgoing link of its device and the incoming link of the other device for bytes divided by
bandwidth. A link has one transfer at a time. The bytes arrive one latency later. A `Receive` waits for the arrival.
Uploads and fetches work in the same way, with the client as the other end. Memory is counted by storage: initial
contents, arrivals and results, minus frees.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import attrs

from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.costs import CLIENT
from djinn_core.ir.handles import storage_of
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import ExecutionSchedule, Fetch, Free, Receive, Run, Send, Step, Upload
from djinn_core.ir.values import TensorMeta

_OUT, _IN = 0, 1


@attrs.frozen
class DeviceActivity:
    """Time, memory and transfers of one device in a simulated run.

    Attributes:
        busy: seconds in which it ran nodes.
        waited: seconds in which it waited for values of other devices, from its first step to its last.
        end: end of its last step, in seconds from the start.
        memory: pairs (seconds, bytes), one for each new maximum.
        peak: peak bytes.
        sent: bytes to other devices.
        received: bytes from other devices.
    """

    busy: float = 0.0
    waited: float = 0.0
    end: float = 0.0
    memory: tuple[tuple[float, int], ...] = ()
    peak: int = 0
    sent: int = 0
    received: int = 0


@attrs.frozen
class Timeline:
    """A simulated run of a schedule.

    Attributes:
        seconds: from the start until all steps are done and all fetched values are at the client.
        devices: activity of each device, by id.
        links: seconds in which each link was busy, by source and target; the client is `client`.
        uploaded: bytes from the client.
        fetched: bytes to the client.
    """

    seconds: float
    devices: Mapping[str, DeviceActivity]
    links: Mapping[tuple[str, str], float]
    uploaded: int
    fetched: int

    @property
    def interval(self) -> float:
        """Seconds between consecutive pipelined runs: the busy time of the busiest device or link."""
        busiest = [d.busy for d in self.devices.values()]
        return max([*busiest, *self.links.values()], default=0.0)

    @property
    def limit(self) -> str:
        """Name of the bottleneck: `ops on X` or `link from X to Y`."""
        busy = {f"ops on {name}": d.busy for name, d in self.devices.items()}
        busy |= {f"link from {source} to {target}": seconds for (source, target), seconds in self.links.items()}
        return max(busy, key=busy.__getitem__, default="nothing")


def simulate(context: SchedulingContext, schedule: ExecutionSchedule, *, step_seconds: float = 0.0) -> Timeline:
    """Return the simulated run of a valid schedule. Each step has an overhead of `step_seconds`.

    Raises:
        ValueError: devices deadlock; `check_schedule` says why.
    """
    return _Simulation(context, schedule, step_seconds).run()


@attrs.define(eq=False)
class _DeviceClock:
    steps: Sequence[Step]
    at: int = 0
    now: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    sent: int = 0
    received: int = 0


class _Simulation:
    def __init__(self, context: SchedulingContext, schedule: ExecutionSchedule, step_seconds: float) -> None:
        self.graph, self.topology = context.graph, context.topology
        self.step_seconds = step_seconds
        self.clocks = {device: _DeviceClock(steps) for device, steps in schedule.steps.items()}
        self.rows = context.costs.by_device
        self.memory = Memory(context)
        self.ports: dict[tuple[str, int], float] = {}
        self.links: Counter[tuple[str, str]] = Counter()
        self.mail: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        self.waiting: dict[tuple[str, str, int], str] = {}
        self.client_bytes = {Upload: 0, Fetch: 0}
        self.end = 0.0

    def run(self) -> Timeline:
        queue = [(0.0, device) for device in self.clocks]
        heapq.heapify(queue)
        while queue:
            _, device = heapq.heappop(queue)
            clock = self.clocks[device]
            if clock.at == len(clock.steps):
                continue
            if self._step(device, clock, clock.steps[clock.at], queue):
                clock.at += 1
                self.end = max(self.end, clock.now)
                heapq.heappush(queue, (clock.now, device))
        stuck = [device for device, clock in self.clocks.items() if clock.at < len(clock.steps)]
        if stuck:
            raise ValueError(f"deadlock in the schedule of {', '.join(stuck)}: check_schedule shows the missing step")
        devices = {
            name: DeviceActivity(
                c.busy, c.waited, c.now, tuple(self.memory.maxima[name]), self.memory.peak[name], c.sent, c.received
            )
            for name, c in self.clocks.items()
        }
        return Timeline(self.end, devices, dict(self.links), self.client_bytes[Upload], self.client_bytes[Fetch])

    def _step(self, device: str, clock: _DeviceClock, step: Step, queue: list[tuple[float, str]]) -> bool:
        """Execute a step. Return False if it must wait for another device."""
        clock.now += self.step_seconds
        match step:
            case Run(nodes):
                self._run(device, clock, nodes)
            case Send(value, target):
                size = self._size(value)
                self.mail[device, target, value].append(self._transfer(device, target, size, clock.now))
                clock.sent += size
                waiter = self.waiting.pop((device, target, value), None)
                if waiter is not None:
                    heapq.heappush(queue, (self.clocks[waiter].now, waiter))
            case Receive(value, source):
                key = (source, device, value)
                if not self.mail[key]:
                    self.waiting[key] = device
                    clock.now -= self.step_seconds
                    return False
                self._wait(clock, self.mail[key].pop(0))
                clock.received += self._size(value)
                self.memory.hold(device, value, clock.now)
            case Upload(value):
                self._wait(clock, self._transfer(CLIENT, device, self._size(value), 0.0))
                self.client_bytes[Upload] += self._size(value)
                self.memory.hold(device, value, clock.now)
            case Free(values):
                for value in values:
                    self.memory.free(device, value)
            case Fetch(value):
                self.end = max(self.end, self._transfer(device, CLIENT, self._size(value), clock.now))
                self.client_bytes[Fetch] += self._size(value)
        return True

    def _run(self, device: str, clock: _DeviceClock, nodes: Sequence[int]) -> None:
        row = self.rows[device]
        for node in nodes:
            clock.now += row[node].seconds
            clock.busy += row[node].seconds
            for value in self.graph.nodes[node].outputs:
                self.memory.hold(device, value, clock.now)

    def _wait(self, clock: _DeviceClock, until: float) -> None:
        if until > clock.now:
            clock.waited += until - clock.now
            clock.now = until

    def _transfer(self, source: str, target: str, size: int, ready: float) -> float:
        """Return the arrival time of `size` bytes that can be sent from `ready` on."""
        link = self.topology.link(source, target)
        seconds = size / link.bandwidth if link.bandwidth else 0.0
        send_port, receive_port = (source, _OUT), (target, _IN)
        begin = max(ready, self.ports.get(send_port, 0.0), self.ports.get(receive_port, 0.0))
        self.ports[send_port] = self.ports[receive_port] = begin + seconds
        self.links[source, target] += seconds  # type: ignore[assignment] # a Counter adds up floats as well
        return begin + seconds + link.latency

    def _size(self, value: int) -> int:
        return self.graph.meta(value).nbytes


def copy_bytes(meta: TensorMeta) -> int:
    """Return the size in bytes of a copy of a value on another device. The copy has the value's strides."""
    return (meta.extent - meta.offset) * meta.dtype.itemsize if meta.numel else 0


class Memory:
    """Bytes by device while a schedule runs. A storage counts once, even if several values are views of it."""

    def __init__(self, context: SchedulingContext) -> None:
        self._graph, self._home, self._resident = context.graph, context.placement.values, context.resident
        self._values: dict[tuple[str, int], set[int]] = {}
        self._sizes: dict[tuple[str, int], int] = {}
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.maxima: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for value in context.graph.inputs:
            holders = context.copies.get(value, ())
            home = context.resident.get(value)
            for device in (*holders, *(() if home is None else (home,))):
                self.hold(device, value, 0.0)

    def hold(self, device: str, value: int, when: float) -> None:
        """Record that `device` holds `value` from the time `when` (in seconds) on."""
        key, meta = self._key(device, value), self._graph.meta(value)
        size = meta.extent * meta.dtype.itemsize if key[1] >= 0 else copy_bytes(meta)
        self._values.setdefault(key, set()).add(value)
        growth = size - self._sizes.get(key, 0)
        if growth > 0:
            self._sizes[key] = size
            self.now[device] += growth
            if self.now[device] > self.peak[device]:
                self.peak[device] = self.now[device]
                self.maxima[device].append((when, self.now[device]))

    def add_temporary(self, device: str, nbytes: int) -> None:
        """Record that `device` temporarily needs `nbytes` more bytes."""
        self.peak[device] = max(self.peak[device], self.now[device] + nbytes)

    def free(self, device: str, value: int) -> None:
        """Free `value` on `device`. Free its storage if no other value uses it."""
        key = self._key(device, value)
        values = self._values.get(key)
        if values is None:
            return
        values.discard(value)
        if not values:
            del self._values[key]
            self.now[device] -= self._sizes.pop(key, 0)  # a value without elements has no bytes

    def move_away(self, device: str, value: int) -> None:
        """Drop the storage of `value`, with all its views, from `device`, because it moves to its new home."""
        key = self._key(device, value)
        if self._values.pop(key, None) is not None:
            self.now[device] -= self._sizes.pop(key, 0)

    def _key(self, device: str, value: int) -> tuple[str, int]:
        """Return the key of a value's bytes on a device.

        On its old and new home device, a value shares the bytes of its storage. Copies on other devices have their
        own bytes.
        """
        at_home = self._home.get(value, device) == device or self._resident.get(value) == device
        return device, storage_of(value) if at_home else ~value


def memory_peaks(context: SchedulingContext, steps: Mapping[str, Sequence[Step]]) -> Mapping[str, int]:
    """Return the peak bytes of each device, by device id. Only values to which the program refers count."""
    memory, nodes = Memory(context), context.graph.nodes
    for device, device_steps in steps.items():
        for step in device_steps:
            match step:
                case Run(step_nodes):
                    for node in step_nodes:
                        for value in nodes[node].outputs:
                            memory.hold(device, value, 0.0)
                case Upload(value) | Receive(value, _):
                    memory.hold(device, value, 0.0)
                case Free(values):
                    for value in values:
                        memory.free(device, value)
                case _:
                    pass
    return memory.peak


def simulated(
    result: PipelineResult,
    *,
    resident: Mapping[int, str] | None = None,
    fetch: tuple[int, ...] = (),
    copies: Mapping[int, tuple[str, ...]] | None = None,
    step_seconds: float = 0.0,
) -> Timeline:
    """Return a simulated run of the schedule in `result`, with inputs on the devices in `resident` and `copies`.

    Raises:
        ValueError: not all stages ran, or devices deadlock.
    """
    graph, plan, placement, costs = result.graph, result.plan, result.placement, result.costs
    schedule = result.schedule
    if plan is None or placement is None or costs is None or schedule is None:
        raise ValueError("only a scheduled program can be simulated: plan until='schedule'")
    topology, program = result.topology, schedule.program
    context = SchedulingContext(program, graph, plan, placement, costs, topology, resident or {}, fetch, copies or {})
    return simulate(context, schedule, step_seconds=step_seconds)
