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


def host_memory_devices(context: SchedulingContext, steps: Steps) -> frozenset[str]:
    """Return the devices in `steps` that compute in host memory, where incoming values wait; empty for one device."""
    if len(steps) < 2:
        return frozenset()
    return frozenset([d.id for d in context.topology.devices if d.kind in HOST_KINDS and d.id in steps])


def unreceived_bytes(context: SchedulingContext, steps: Steps, host_devices: frozenset[str]) -> dict[str, list[int]]:
    """Return, for each of `host_devices`, the bytes of unreceived transfers before each of its steps.

    A sender does not wait for the receiver, so a value may arrive before the receiver's step that takes it.
    """
    bytes_by_step: dict[str, list[int]] = {device: [0] * (len(steps[device]) + 1) for device in host_devices}
    for device, since, until, value in _pending_transfers(steps, host_devices):
        if context.placement.values.get(value) == device:
            continue  # an input that moves here is counted from the beginning
        size = copy_bytes(context.graph.meta(value))
        bytes_by_step[device][since] += size
        bytes_by_step[device][until] -= size
    for changes in bytes_by_step.values():
        total = 0
        for position, change in enumerate(changes):
            total += change
            changes[position] = total
    return bytes_by_step


def _pending_transfers(steps: Steps, host_devices: frozenset[str]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (device, earliest step, receiving step, value) for each transfer to one of `host_devices`.

    Steps are positions. The value may arrive once the receiver's steps before the earliest step have ended. To find it,
    each device has a vector clock: how many steps of each receiver have certainly ended.
    """
    clocks: dict[str, dict[str, int]] = {device: {} for device in steps}
    mail: dict[tuple[str, str, int], deque[dict[str, int]]] = defaultdict(deque)
    next_step = dict.fromkeys(steps, 0)
    ready = deque(steps)
    waiting: dict[tuple[str, str, int], str] = {}
    while ready:
        device = ready.popleft()
        clock, device_steps = clocks[device], steps[device]
        while next_step[device] < len(device_steps):
            number, step = next_step[device], device_steps[next_step[device]]
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
                sent_clock = mail[key].popleft()
                if device in host_devices:
                    yield device, sent_clock.get(device, 0), number, step.value
                for receiver, completed in sent_clock.items():
                    clock[receiver] = max(clock.get(receiver, 0), completed)
            next_step[device] += 1
            if device in host_devices:
                clock[device] = next_step[device]


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
    order = scheduling_context(context, placement)
    return needs_of_steps(order, write_steps(order, context.plan.nodes))


def scheduling_context(context: PlacementContext, placement: Placement) -> SchedulingContext:
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
    host_devices = host_memory_devices(context, steps)
    unreceived = unreceived_bytes(context, steps, host_devices) if host_devices else {}
    workspaces = _workspaces(context, steps)
    peak_node = {
        device: node
        for device, device_steps in steps.items()
        if (node := _run_steps(context, memory, device, device_steps, workspaces[device], unreceived.get(device)))
        is not None
    }
    return {
        d: MemoryNeed(peak, before[d], inputs[d], max(inputs[d], memory.now[d]), peak_node.get(d))
        for d, peak in memory.peak.items()
    }


def _run_steps(
    context: SchedulingContext,
    memory: Memory,
    device: str,
    steps: Sequence[Step],
    workspaces: Mapping[int, int],
    unreceived: Sequence[int] | None,
) -> int | None:
    """Follow the steps of one device in `memory`. Return the node at which the peak occurs; None if no node runs then.

    Args:
        context: scheduling context of the whole program.
        memory: memory of all devices.
        device: id of the device.
        steps: its steps, in order.
        workspaces: workspace bytes by node.
        unreceived: for a device in host memory, the bytes of waiting transfers before each step.
    """
    nodes, homes, meta = context.graph.nodes, context.placement.values, context.graph.meta
    peak_node: int | None = None
    for number, step in enumerate(steps):
        waiting = unreceived[number] if unreceived is not None else 0
        peak = memory.peak[device]
        match step:
            case Run(step_nodes):
                for node in step_nodes:
                    peak = memory.peak[device]
                    for value in nodes[node].outputs:
                        memory.hold(device, value, 0.0)
                    if waiting or node in workspaces:
                        memory.add_temporary(device, waiting + workspaces.get(node, 0))
                    if memory.peak[device] > peak:
                        peak_node = node
                continue
            case Upload(value) | Receive(value, _):
                memory.hold(device, value, 0.0)
                if isinstance(step, Receive) and unreceived is None:
                    waiting = _gaps(meta(value))
            case Send(value, target):
                memory.add_temporary(
                    device, waiting + (_gaps(meta(value)) if unreceived is None else copy_bytes(meta(value)))
                )
                if homes.get(value) == target and context.resident.get(value) == device:
                    memory.move_away(device, value)
            case Free(values):
                for value in values:
                    memory.free(device, value)
            case _:
                pass
        if waiting:
            memory.add_temporary(device, waiting)
        if memory.peak[device] > peak:
            peak_node = None
    return peak_node


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
        limit: configured memory limit in bytes; 0 for no limit.
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

    `spill` is as in `usable_bytes`. With `any_order`, shortages that another order of the ops may avoid are excluded.
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


def shortage_message(shortages: Sequence[Shortage]) -> str:
    """Return a sentence that lists shortages."""
    more = f"; and {len(shortages) - SHOWN} more devices" if len(shortages) > SHOWN else ""
    return "; ".join(f"{s.device}: {s.reason}" for s in shortages[:SHOWN]) + more


# --- memory -----------------------------------------------------------------------------------------------------


def _fits_at_a_glance(context: Context, placement: Placement) -> bool:
    """Return True if a single device fits everything, even without frees. The full check is then unnecessary."""
    usable = {d.id: usable_bytes(d, 0, context.memory_limits.get(d.id, 0)) for d in context.topology.devices}
    if all(limit is None for limit in usable.values()):
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
    workspace = max(
        (nbytes for by_node in _workspaces(context, devices_used).values() for nbytes in by_node.values()), default=0
    )
    return all((limit := usable.get(device)) is None or whole + workspace <= limit for device in devices_used)


def _shortages(
    context: Context, memory_needs: Mapping[str, MemoryNeed], spill: bool, any_order: bool = False
) -> dict[str, Shortage]:
    shortages: dict[str, Shortage] = {}
    for device in context.topology.devices:
        need = memory_needs.get(device.id)
        if need is None:
            continue
        usable = usable_bytes(device, need.before, context.memory_limits.get(device.id, 0), spill=spill)
        bytes_needed = need.least if any_order else need.bytes
        if usable is not None and bytes_needed > max(
            usable, need.before
        ):  # present memory does not belong to this program
            limit = context.memory_limits.get(device.id, 0)
            shortages[device.id] = Shortage(
                device.id, bytes_needed - usable, _shortage_text(context.graph, device, need, usable, limit)
            )
    return shortages


def _shortage_text(graph: Graph, device: DeviceCapabilities, need: MemoryNeed, usable: int, limit: int) -> str:
    already = f", {need.before:,} of them there already" if need.before else ""
    when = f", fullest at {node_label(graph, need.node)}" if need.node is not None else ""
    beside = f" and can spill {device.spill:,}" if device.spill else ""
    if limit and usable == limit:
        beside = f"{beside} (the setting memory_limits, less what other programs hold there)"
    return (
        f"it would hold {need.bytes:,} bytes ({need.inputs:,} of inputs{already}{when}), and has room for "
        f"{max(0, usable):,}{beside}: {need.bytes - usable:,} bytes are short"
    )


def node_label(graph: Graph, node: int) -> str:
    """Return the name of a node in messages: op, number and module."""
    node_row = graph.nodes[node]
    return f"{node_row.op} (node {node}{f' of {node_row.module}' if node_row.module else ''})"


# --- dtypes and ops ---------------------------------------------------------------------------------------------


def dtype_of(graph: Graph, value: int) -> str:
    """Return the name of a value's dtype without `torch.`, as in `DeviceCapabilities.dtypes`."""
    return str(graph.meta(value).dtype).removeprefix("torch.")


def values_of_node(context: Context, node: int) -> Iterator[int]:
    """Yield the values that a node reads and creates."""
    graph_node, replace = context.graph.nodes[node], context.plan.replace
    yield from [replace.get(v, v) for v in graph_node.inputs] if replace else graph_node.inputs
    yield from graph_node.outputs


def is_restricted(device: DeviceCapabilities) -> bool:
    """Return True if the device lacks some dtypes or ops."""
    return bool(device.dtypes or device.unsupported)


def missing_capability(context: Context, node: int, device: DeviceCapabilities) -> str:
    """Return the reason why a device cannot run a node, apart from memory; empty if it can."""
    if not device.runs(context.graph.nodes[node].op):
        return f"it does not run {node_label(context.graph, node)}"
    if device.dtypes:
        missing_dtypes = sorted({dtype_of(context.graph, v) for v in values_of_node(context, node)} - device.dtypes)
        if missing_dtypes:
            return f"it lacks {', '.join(missing_dtypes)}, which {node_label(context.graph, node)} needs"
    return ""


def _unsupported(context: PlacementContext, placement: Placement) -> dict[str, Shortage]:
    """Return shortages of devices that lack an op or dtype of their nodes, or the dtype of an uploaded input.

    Values that already are on the device may stay.
    """
    restricted = {d.id: d for d in context.topology.devices if is_restricted(d)}
    if not restricted:
        return {}
    graph, missing = context.graph, {}
    for decision in (*placement.decisions, *placement.replicas):
        device = restricted.get(decision.device)
        if device is None or decision.device in missing:
            continue
        if reason := missing_capability(context, decision.node, device):
            missing[decision.device] = reason
    resident_homes = {storage_of(v): home for v, home in context.resident.items()}
    for value in graph.inputs:
        home, dtype = placement.values.get(value, ""), dtype_of(graph, value)
        is_uploaded = home in restricted and home not in missing and resident_homes.get(storage_of(value)) != home
        if is_uploaded and restricted[home].dtypes and dtype not in restricted[home].dtypes:
            missing[home] = f"it lacks {dtype}, and an input of this dtype would be placed on it"
    return {device: Shortage(device, 0, reason) for device, reason in missing.items()}
