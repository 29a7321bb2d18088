"""Memory and dtype checks of a placement: peak memory of each device in program order, and the dtypes it computes with.

Memory counts what is there when the program begins (inputs that live there, copies) and, from the beginning, every input
that will arrive; results and temporaries from when they are made until they are freed; and copies of values that live
elsewhere from when they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.hookspecs.placement import PlacementContext
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.colocation import storage_sizes
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph, ProgramGraph
from djinn_core.ir.placement import Placement
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.schedule import Free, Receive, Run, Step, Upload
from djinn_core.ir.values import storage_of
from djinn_core.stages.simulate import Memory
from djinn_core.stages.steps import write_steps

Context = PlacementContext | SchedulingContext
SHOWN: Final = 8  # devices that a message lists


@attrs.frozen
class Need:
    """Memory that a program needs on one device.

    Attributes:
        bytes: the most that is there at once.
        before: of these, what was there before the program began.
        inputs: of these, inputs and copies of inputs.
        least: the most that is there at the beginning or at the end: no order of the ops makes do with less.
        node: the op after which it is fullest; None if that is before the first.
    """

    bytes: int
    before: int
    inputs: int
    least: int
    node: int | None = None


@attrs.frozen
class Shortage:
    """Reason why a placement does not fit a device: `excess` bytes too many (0: a dtype is missing), and the words for it."""

    device: str
    excess: int
    reason: str


def needs(context: PlacementContext, placement: Placement) -> dict[str, Need]:
    """Memory needed by device when nodes run in the order of the program."""
    order = scheduling(context, placement)
    return needs_of_steps(order, write_steps(order, context.plan.nodes)) if order is not None else {}


def scheduling(context: PlacementContext, placement: Placement) -> SchedulingContext | None:
    """Scheduling context of a placement; None if the graph is not a program's, so that it is not known what is freed."""
    graph = context.graph
    if not isinstance(graph, ProgramGraph):
        return None
    known = (graph.program, graph, context.plan, placement, context.costs, context.topology)
    return SchedulingContext(*known, context.resident, context.fetch, context.copies, context.memory_limits)


def needs_of_steps(context: SchedulingContext, steps: Mapping[str, Sequence[Step]]) -> dict[str, Need]:
    """Memory needed by device for these steps."""
    memory, nodes, homes = Memory(context), context.graph.nodes, context.placement.values
    before = Counter(memory.now)
    for value in context.graph.inputs:
        if value in homes:
            memory.hold(homes[value], value, 0.0)
    inputs = Counter(memory.now)
    fullest: dict[str, int] = {}
    for device, its_steps in steps.items():
        for step in its_steps:
            match step:
                case Run(ran):
                    for node in ran:
                        known = memory.peak[device]
                        for value in nodes[node].outputs:
                            memory.hold(device, value, 0.0)
                        if memory.peak[device] > known:
                            fullest[device] = node
                case Upload(value) | Receive(value, _):
                    memory.hold(device, value, 0.0)
                case Free(values):
                    for value in values:
                        memory.free(device, value)
                case _:
                    pass
    return {
        d: Need(peak, before[d], inputs[d], max(inputs[d], memory.now[d]), fullest.get(d))
        for d, peak in memory.peak.items()
    }


def bytes_held(
    result: PipelineResult, resident: Mapping[int, str], copies: Mapping[int, tuple[str, ...]]
) -> dict[str, int]:
    """By device the most bytes that the schedule in `result` holds at once, as placements and schedules are checked.

    Raises:
        ValueError: not all stages ran.
    """
    plan, placement, costs, schedule = result.plan, result.placement, result.costs, result.schedule
    if plan is None or placement is None or costs is None or schedule is None:
        raise ValueError("only what was scheduled can be measured: plan until='schedule'")
    known = (schedule.program, result.graph, plan, placement, costs, result.topology)
    taken = needs_of_steps(SchedulingContext(*known, resident, (), copies), schedule.steps)
    return {device: need.bytes for device, need in taken.items()}


def room(device: DeviceCapabilities, before: int, limit: int, *, spill: bool = False) -> int | None:
    """Bytes that a program may have on a device of which `before` are there already; None if that is not known.

    Args:
        device: what it has, and what of that is free.
        before: bytes of the program that it holds already, which are not among those that are free.
        limit: of memory, as configured; 0 if there is none.
        spill: whether what its executor can keep elsewhere counts.
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
    """Shortages of a placement, in the order of the devices; empty if it fits.

    `spill`: as in `room`. `any_order`: leave out what another order of the ops may still mend.
    """
    lacking = _lacking(context, placement)
    short: dict[str, Shortage] = {}
    if not _fits_at_a_glance(context, placement):
        short = _short(context, needs(context, placement), spill, any_order)
    return (*lacking.values(), *(s for d, s in short.items() if d not in lacking))


def shortages_of_steps(context: SchedulingContext, steps: Mapping[str, Sequence[Step]]) -> tuple[Shortage, ...]:
    """Shortages of devices whose steps hold more at once than there is room for."""
    if _fits_at_a_glance(context, context.placement):
        return ()
    return tuple(_short(context, needs_of_steps(context, steps), context.placement.spills).values())


def told(found: Sequence[Shortage]) -> str:
    """Shortages in words."""
    more = f"; and {len(found) - SHOWN} more devices" if len(found) > SHOWN else ""
    return "; ".join(f"{s.device}: {s.reason}" for s in found[:SHOWN]) + more


# --- memory -----------------------------------------------------------------------------------------------------


def _fits_at_a_glance(context: Context, placement: Placement) -> bool:
    """True if one device is used and everything fits on it, even if nothing were freed; a full check is not needed then."""
    rooms = {d.id: room(d, 0, context.memory_limits.get(d.id, 0)) for d in context.topology.devices}
    if all(there is None for there in rooms.values()):
        return True
    graph, used = context.graph, {*placement.devices, *placement.values.values()}
    if len(used) > 1 or placement.copies or placement.replicas or context.copies:
        return False
    if not used.issuperset(context.resident.values()):
        return False
    if isinstance(graph, ProgramGraph) and len(context.plan.nodes) == len(graph.nodes):
        whole = graph.bytes_of_storages  # found once, however often this is asked
    else:
        made = [v for n in context.plan.nodes for v in graph.nodes[n].outputs]
        whole = sum(storage_sizes(graph, (*graph.inputs, *made)).values())
    return all((there := rooms.get(device)) is None or whole <= there for device in used)


def _short(context: Context, taken: Mapping[str, Need], spill: bool, any_order: bool = False) -> dict[str, Shortage]:
    found: dict[str, Shortage] = {}
    for device in context.topology.devices:
        need = taken.get(device.id)
        if need is None:
            continue
        there = room(device, need.before, context.memory_limits.get(device.id, 0), spill=spill)
        wanted = need.least if any_order else need.bytes
        if there is not None and wanted > max(there, need.before):  # what is there already is no doing of this program
            found[device.id] = Shortage(device.id, wanted - there, _said(context.graph, device, need, there))
    return found


def _said(graph: Graph, device: DeviceCapabilities, need: Need, there: int) -> str:
    already = f", {need.before:,} of them there already" if need.before else ""
    when = f", fullest at {at(graph, need.node)}" if need.node is not None else ""
    beside = f" and can spill {device.spill:,}" if device.spill else ""
    return (
        f"it would hold {need.bytes:,} bytes ({need.inputs:,} of inputs{already}{when}), and has room for "
        f"{max(0, there):,}{beside}: {need.bytes - there:,} bytes are short"
    )


def at(graph: Graph, node: int) -> str:
    """Name of a node in messages: op, number and module."""
    found = graph.nodes[node]
    return f"{found.op} (node {node}{f' of {found.module}' if found.module else ''})"


# --- dtypes -----------------------------------------------------------------------------------------------------


def dtype_of(graph: Graph, value: int) -> str:
    """Name of a value's dtype, as devices name theirs."""
    return str(graph.meta(value).dtype).removeprefix("torch.")


def used_by(context: PlacementContext, node: int) -> Iterator[int]:
    """The values that a node reads and makes."""
    found, replace = context.graph.nodes[node], context.plan.replace
    yield from [replace.get(v, v) for v in found.inputs] if replace else found.inputs
    yield from found.outputs


def _lacking(context: PlacementContext, placement: Placement) -> dict[str, Shortage]:
    """Shortages of devices that compute with, or are sent, a dtype they lack. Values that live there already may stay."""
    dtypes = {d.id: d.dtypes for d in context.topology.devices if d.dtypes}
    if not dtypes:
        return {}
    graph, missing = context.graph, {}
    for decision in (*placement.decisions, *placement.replicas):
        had = dtypes.get(decision.device)
        if had is None or decision.device in missing:
            continue
        lacks = sorted({dtype_of(graph, v) for v in used_by(context, decision.node)} - had)
        if lacks:
            missing[decision.device] = f"it lacks {', '.join(lacks)}, which {at(graph, decision.node)} needs"
    settled = {storage_of(v): home for v, home in context.resident.items()}
    for value in graph.inputs:
        home, dtype = placement.values.get(value, ""), dtype_of(graph, value)
        comes = home in dtypes and home not in missing and settled.get(storage_of(value)) != home
        if comes and dtype not in dtypes[home]:
            missing[home] = f"it lacks {dtype}, and an input of that would come to live there"
    return {device: Shortage(device, 0, reason) for device, reason in missing.items()}
