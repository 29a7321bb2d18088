"""Check of a placement: memory of each device over the steps of a program, and its dtypes and ops.

From the beginning, the count includes inputs and copies on a device, and every input that will arrive. Results and
temporaries count from creation to release. Copies of values from other devices count from their arrival, and moved
values until they are sent. Both ends of a transfer count its staging copy. Workspace of ops counts as far as cost
models report it.

An executor receives transfers into host memory as they arrive. On a device in host memory, a transfer therefore counts
from the earliest moment at which the sender may have sent it. A sender that is ahead may send long before the receiver
waits for the transfer.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.colocation import storage_sizes
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.placement import Placement
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import Free, Receive, Run, Send, Step, Upload
from djinn_core.ir.values import TensorMeta
from djinn_core.planning.stages.simulate import Memory, copy_bytes
from djinn_core.planning.stages.steps import write_steps

HOST_KINDS: Final = frozenset({"cpu"})  # kinds of devices that compute in host memory

Steps = Mapping[str, Sequence[Step]]


def hosts(context: SchedulingContext, steps: Steps) -> frozenset[str]:
    """Return the devices that run steps and whose incoming transfers wait in their own memory."""
    if len(steps) < 2:
        return frozenset()
    return frozenset([d.id for d in context.topology.devices if d.kind in HOST_KINDS and d.id in steps])


def in_flight(context: SchedulingContext, steps: Steps, computing: frozenset[str]) -> dict[str, list[int]]:
    """Return, by device of `computing`, the bytes that may have arrived unreceived before each of its steps.

    A device can run ahead of another device until it needs a pending result of that device.
    """
    bytes_by_step: dict[str, list[int]] = {device: [0] * (len(steps[device]) + 1) for device in computing}
    for device, since, until, value in _waiting(steps, computing):
        if context.placement.values.get(value) == device:
            continue  # an input that moves here is counted from the beginning
        size = copy_bytes(context.graph.meta(value))
        bytes_by_step[device][since] += size
        bytes_by_step[device][until] -= size
    for changes in bytes_by_step.values():
        now = 0
        for at, change in enumerate(changes):
            now += change
            changes[at] = now
    return bytes_by_step


def _waiting(steps: Steps, computing: frozenset[str]) -> Iterator[tuple[str, int, int, int]]:
    """Yield transfers to devices of `computing`: device, earliest step before it may arrive, receiving step, and value.

    Each device has a vector clock: the number of steps that each receiver must have completed.
    """
    clocks: dict[str, dict[str, int]] = {device: {} for device in steps}
    mail: dict[tuple[str, str, int], deque[dict[str, int]]] = defaultdict(deque)
    at = dict.fromkeys(steps, 0)
    ready = deque(steps)
    waiting: dict[tuple[str, str, int], str] = {}
    while ready:
        device = ready.popleft()
        clock, its = clocks[device], steps[device]
        while at[device] < len(its):
            number, step = at[device], its[at[device]]
            if isinstance(step, Send):
                key = (device, step.target, step.value)
                mail[key].append(dict(clock))
                if key in waiting:
                    ready.append(waiting.pop(key))
            elif isinstance(step, Receive):
                key = (step.source, device, step.value)
                if not mail[key]:
                    waiting[key] = device
                    break
                sent = mail[key].popleft()
                if device in computing:
                    yield device, sent.get(device, 0), number, step.value
                for other, done in sent.items():
                    clock[other] = max(clock.get(other, 0), done)
            at[device] += 1
            if device in computing:
                clock[device] = at[device]


Context = PlacementContext | SchedulingContext
SHOWN: Final = 8  # maximum number of devices listed in a message
GAPS: Final = 1.25  # a transfer makes a contiguous copy if memory exceeds the elements by this factor


@attrs.frozen
class MemoryNeed:
    """Memory that a program needs on one device.

    Attributes:
        bytes: peak bytes.
        before: the part of the peak that was on the device before the program.
        inputs: the part of the peak that holds inputs and copies of inputs.
        least: the larger of the bytes at the beginning and at the end. No order of the ops needs less.
        node: the op at the peak; None if the peak is before the first op.
    """

    bytes: int
    before: int
    inputs: int
    least: int
    node: int | None = None


@attrs.frozen
class Shortage:
    """Reason why a placement does not fit a device.

    Attributes:
        device: id of the device.
        excess: missing bytes; 0 if the device lacks a dtype or an op.
        reason: the reason as a sentence.
    """

    device: str
    excess: int
    reason: str


def needs(context: PlacementContext, placement: Placement) -> dict[str, MemoryNeed]:
    """Return the memory need by device if nodes run in program order."""
    order = scheduling(context, placement)
    return needs_of_steps(order, write_steps(order, context.plan.nodes))


def scheduling(context: PlacementContext, placement: Placement) -> SchedulingContext:
    """Return the scheduling context of a placement."""
    graph = context.graph
    arguments = (graph.program, graph, context.plan, placement, context.costs, context.topology)
    return SchedulingContext(*arguments, context.resident, context.fetch, context.copies, context.memory_limits)


def needs_of_steps(context: SchedulingContext, steps: Mapping[str, Sequence[Step]]) -> dict[str, MemoryNeed]:
    """Return the memory need by device for these steps."""
    memory, homes = Memory(context), context.placement.values
    before = Counter(memory.now)
    for value in context.graph.inputs:
        if value in homes:
            memory.hold(homes[value], value, 0.0)
    inputs = Counter(memory.now)
    computing = hosts(context, steps)
    coming = in_flight(context, steps, computing) if computing else {}
    spaces = _workspaces(context, steps)
    fullest = {
        device: node
        for device, its_steps in steps.items()
        if (node := _fill(context, memory, device, its_steps, spaces[device], coming.get(device))) is not None
    }
    return {
        d: MemoryNeed(peak, before[d], inputs[d], max(inputs[d], memory.now[d]), fullest.get(d))
        for d, peak in memory.peak.items()
    }


def _fill(
    context: SchedulingContext,
    memory: Memory,
    device: str,
    steps: Sequence[Step],
    spaces: Mapping[int, int],
    coming: Sequence[int] | None,
) -> int | None:
    """Follow the steps of one device in `memory`. Return the node at which the peak occurs; None if no node runs then.

    Args:
        context: scheduling context of the whole program.
        memory: memory of all devices.
        device: id of the device.
        steps: its steps, in order.
        spaces: workspace bytes by node.
        coming: for a device in host memory, the bytes of waiting transfers before each step.
    """
    nodes, homes, meta = context.graph.nodes, context.placement.values, context.graph.meta
    fullest: int | None = None
    for number, step in enumerate(steps):
        waiting = coming[number] if coming is not None else 0
        peak = memory.peak[device]
        match step:
            case Run(ran):
                for node in ran:
                    peak = memory.peak[device]
                    for value in nodes[node].outputs:
                        memory.hold(device, value, 0.0)
                    if waiting or node in spaces:
                        memory.take(device, waiting + spaces.get(node, 0))
                    if memory.peak[device] > peak:
                        fullest = node
                continue
            case Upload(value) | Receive(value, _):
                memory.hold(device, value, 0.0)
                if isinstance(step, Receive) and coming is None:
                    waiting = _gaps(meta(value))
            case Send(value, target):
                memory.take(device, waiting + (_gaps(meta(value)) if coming is None else copy_bytes(meta(value))))
                if homes.get(value) == target and context.resident.get(value) == device:
                    memory.move(device, value)
            case Free(values):
                for value in values:
                    memory.free(device, value)
            case _:
                pass
        if waiting:
            memory.take(device, waiting)
        if memory.peak[device] > peak:
            fullest = None
    return fullest


def _workspaces(context: Context, devices: Iterable[str]) -> dict[str, dict[int, int]]:
    """Return workspace bytes by device and node, for nodes with a known workspace."""
    rows: dict[int, dict[int, int]] = {}  # devices of one model share a row
    workspaces: dict[str, dict[int, int]] = {}
    for device in devices:
        row = context.costs.by_device.get(device, ())
        if id(row) not in rows:
            rows[id(row)] = {number: estimate.workspace for number, estimate in enumerate(row) if estimate.workspace}
        workspaces[device] = rows[id(row)]
    return workspaces


def _gaps(meta: TensorMeta) -> int:
    """Return the bytes of the contiguous copy that the transfer of a value with large gaps needs; 0 for other values."""
    return meta.nbytes if meta.extent - meta.offset > GAPS * meta.numel else 0


def bytes_held(
    result: PipelineResult, resident: Mapping[int, str], copies: Mapping[int, tuple[str, ...]]
) -> dict[str, int]:
    """Return the peak bytes by device of the schedule in `result`, counted as in the checks of placements.

    Raises:
        ValueError: not all stages ran.
    """
    plan, placement, costs, schedule = result.plan, result.placement, result.costs, result.schedule
    if plan is None or placement is None or costs is None or schedule is None:
        raise ValueError("only a scheduled program can be measured: plan until='schedule'")
    arguments = (schedule.program, result.graph, plan, placement, costs, result.topology)
    step_needs = needs_of_steps(SchedulingContext(*arguments, resident, (), copies), schedule.steps)
    return {device: need.bytes for device, need in step_needs.items()}


def usable_bytes(device: DeviceCapabilities, before: int, limit: int, *, spill: bool = False) -> int | None:
    """Return the bytes that a program may hold on a device; None if unknown.

    Args:
        device: the device, with its total and free memory.
        before: bytes that the program already holds on the device. They are not free memory.
        limit: configured memory limit; 0: none.
        spill: True if the executor's spill memory counts.
    """
    more = device.spill if spill else 0
    bounds = [limit] if limit else []
    if device.memory_free is not None:
        bounds.append(before + device.memory_free + more)
    if device.memory:
        bounds.append(device.memory + more)
    return min(bounds, default=None)


def shortages(
    context: PlacementContext, placement: Placement, *, spill: bool = False, any_order: bool = False
) -> tuple[Shortage, ...]:
    """Return the shortages of a placement, in the order of the devices; empty if it fits.

    `spill`: as in `usable_bytes`. `any_order`: True to exclude shortages that another order of the ops may avoid.
    """
    lacking = _unsupported(context, placement)
    short: dict[str, Shortage] = {}
    if not _fits_at_a_glance(context, placement):
        short = _shortages(context, needs(context, placement), spill, any_order)
    return (*lacking.values(), *(s for d, s in short.items() if d not in lacking))


def shortages_of_steps(context: SchedulingContext, steps: Mapping[str, Sequence[Step]]) -> tuple[Shortage, ...]:
    """Return the shortages of devices whose peak exceeds their usable bytes."""
    if _fits_at_a_glance(context, context.placement):
        return ()
    return tuple(_shortages(context, needs_of_steps(context, steps), context.placement.spills).values())


def shortage_message(found: Sequence[Shortage]) -> str:
    """Return a sentence that lists shortages."""
    more = f"; and {len(found) - SHOWN} more devices" if len(found) > SHOWN else ""
    return "; ".join(f"{s.device}: {s.reason}" for s in found[:SHOWN]) + more


# --- memory -----------------------------------------------------------------------------------------------------


def _fits_at_a_glance(context: Context, placement: Placement) -> bool:
    """Return True if a single device fits everything, even without frees. The full check is then unnecessary."""
    rooms = {d.id: usable_bytes(d, 0, context.memory_limits.get(d.id, 0)) for d in context.topology.devices}
    if all(there is None for there in rooms.values()):
        return True
    graph, devices_used = context.graph, {*placement.devices, *placement.values.values()}
    if len(devices_used) > 1 or placement.copies or placement.replicas or context.copies:
        return False
    if not devices_used.issuperset(context.resident.values()):
        return False
    if len(context.plan.nodes) == len(graph.nodes):
        whole = graph.bytes_of_storages  # read once, because it is computed
    else:
        outputs = [v for n in context.plan.nodes for v in graph.nodes[n].outputs]
        whole = sum(storage_sizes(graph, (*graph.inputs, *outputs)).values())
    beside = max(
        (space for spaces in _workspaces(context, devices_used).values() for space in spaces.values()), default=0
    )
    return all((there := rooms.get(device)) is None or whole + beside <= there for device in devices_used)


def _shortages(
    context: Context, taken: Mapping[str, MemoryNeed], spill: bool, any_order: bool = False
) -> dict[str, Shortage]:
    shortages: dict[str, Shortage] = {}
    for device in context.topology.devices:
        need = taken.get(device.id)
        if need is None:
            continue
        there = usable_bytes(device, need.before, context.memory_limits.get(device.id, 0), spill=spill)
        bytes_needed = need.least if any_order else need.bytes
        if there is not None and bytes_needed > max(
            there, need.before
        ):  # present memory does not belong to this program
            limit = context.memory_limits.get(device.id, 0)
            shortages[device.id] = Shortage(
                device.id, bytes_needed - there, _shortage_text(context.graph, device, need, there, limit)
            )
    return shortages


def _shortage_text(graph: Graph, device: DeviceCapabilities, need: MemoryNeed, there: int, limit: int) -> str:
    already = f", {need.before:,} of them there already" if need.before else ""
    when = f", fullest at {node_label(graph, need.node)}" if need.node is not None else ""
    beside = f" and can spill {device.spill:,}" if device.spill else ""
    if limit and there == limit:
        beside = f"{beside} (the setting memory_limits, less what other programs hold there)"
    return (
        f"it would hold {need.bytes:,} bytes ({need.inputs:,} of inputs{already}{when}), and has room for "
        f"{max(0, there):,}{beside}: {need.bytes - there:,} bytes are short"
    )


def node_label(graph: Graph, node: int) -> str:
    """Return the name of a node in messages: op, number and module."""
    node_row = graph.nodes[node]
    return f"{node_row.op} (node {node}{f' of {node_row.module}' if node_row.module else ''})"


# --- dtypes and ops ---------------------------------------------------------------------------------------------


def dtype_of(graph: Graph, value: int) -> str:
    """Return the name of a value's dtype, in the form that devices use."""
    return str(graph.meta(value).dtype).removeprefix("torch.")


def used_by(context: Context, node: int) -> Iterator[int]:
    """Yield the values that a node reads and creates."""
    found, replace = context.graph.nodes[node], context.plan.replace
    yield from [replace.get(v, v) for v in found.inputs] if replace else found.inputs
    yield from found.outputs


def is_particular(device: DeviceCapabilities) -> bool:
    """Return True if the device lacks some dtypes or ops."""
    return bool(device.dtypes or device.unsupported)


def lacking(context: Context, node: int, device: DeviceCapabilities) -> str:
    """Return the reason why a device cannot run a node, apart from memory; empty if it can."""
    if not device.runs(context.graph.nodes[node].op):
        return f"it does not run {node_label(context.graph, node)}"
    if device.dtypes:
        lacks = sorted({dtype_of(context.graph, v) for v in used_by(context, node)} - device.dtypes)
        if lacks:
            return f"it lacks {', '.join(lacks)}, which {node_label(context.graph, node)} needs"
    return ""


def _unsupported(context: PlacementContext, placement: Placement) -> dict[str, Shortage]:
    """Return shortages of devices that lack an op or a dtype of their nodes, or of values sent to them.

    Values that already are on the device may stay.
    """
    particular = {d.id: d for d in context.topology.devices if is_particular(d)}
    if not particular:
        return {}
    graph, missing = context.graph, {}
    for decision in (*placement.decisions, *placement.replicas):
        device = particular.get(decision.device)
        if device is None or decision.device in missing:
            continue
        if reason := lacking(context, decision.node, device):
            missing[decision.device] = reason
    settled = {storage_of(v): home for v, home in context.resident.items()}
    for value in graph.inputs:
        home, dtype = placement.values.get(value, ""), dtype_of(graph, value)
        comes = home in particular and home not in missing and settled.get(storage_of(value)) != home
        if comes and particular[home].dtypes and dtype not in particular[home].dtypes:
            missing[home] = f"it lacks {dtype}, and an input of this dtype would be placed on it"
    return {device: Shortage(device, 0, reason) for device, reason in missing.items()}
