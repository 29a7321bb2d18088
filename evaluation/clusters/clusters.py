"""Random clusters and programs, and an independent check of a plan's memory and ops on each device."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import attrs
import torch

from djinn.errors import DoesNotFit
from djinn.hooks import CostModel, PlacementPolicy
from djinn.planning import (
    CostEstimate,
    DeviceCapabilities,
    Link,
    NetworkTopology,
    Placement,
    PlacementDecision,
    Run,
    colocation_of,
    homes_of_values,
    resident_blocks,
    storage_of,
)
from djinn.testing import ProgramBuilder
from djinn_core.ir.handles import RANDOM_STATE
from djinn_core.ir.schedule import Free, Receive, Send, Upload
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.pipeline import plan
from djinn_core.planning.request import Request
from djinn_core.registry.registry import Registry
from djinn_costs.cost_based import CostBased
from djinn_placement.balanced import Balanced
from djinn_placement.pinned import Pinned
from djinn_placement.round_robin import RoundRobin
from djinn_schedulers.dynamic import Dynamic
from djinn_schedulers.parallel import Parallel

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class AllOnTheFirst(PlacementPolicy):
    """Placement policy that puts every node and value on the first device."""

    name = "all_on_the_first"

    def place(self, context):
        first = context.topology.devices[0].id
        decisions = tuple(PlacementDecision(n, first, "it is the first") for n in context.plan.nodes)
        values = (*context.graph.inputs, *(v for n in context.plan.nodes for v in context.graph.nodes[n].outputs))
        return Placement(decisions, dict.fromkeys(values, first), self.name)


class Scattered(PlacementPolicy):
    """Placement policy that puts nodes and values on random devices."""

    name = "scattered"

    def place(self, context):
        graph, nodes, chance = context.graph, context.plan.nodes, random.Random(len(context.plan.nodes))
        blocks, devices = colocation_of(graph, nodes, context.plan.replace), [d.id for d in context.topology.devices]
        homes = resident_blocks(blocks, graph.inputs, context.resident)
        for value in (*graph.inputs, *(v for n in nodes for v in graph.nodes[n].outputs)):
            homes.setdefault(blocks.block(value), chance.choice(devices))
        where = [homes.get(blocks.node(n), devices[0]) for n in nodes]
        decisions = tuple(PlacementDecision(n, d, "at random") for n, d in zip(nodes, where, strict=True))
        return Placement(decisions, homes_of_values(graph, nodes, blocks, homes), self.name)


class Workspaces(CostModel):
    """A cost model in which products need workspace as large as their first operand."""

    name = "workspaces"
    operations = frozenset({"mm"})

    def estimate(self, graph, node, device):
        return CostEstimate(0.0, 0, 0, 1e-6, workspace=workspace(graph, node))


def workspace(graph, node):
    """Return the workspace bytes of a node."""
    return size(graph, node.inputs[0]) if node.operation == "mm" else 0


POLICIES = (SingleDevice(), Balanced(), RoundRobin(), Pinned(), CostBased(), AllOnTheFirst(), Scattered())
REGISTRY = Registry(
    cost_models=(Workspaces(), Roofline()), placement_policies=POLICIES, schedulers=(Parallel(), Dynamic())
)


def random_program(chance):
    """Return a random program: layers in several dtypes, casts, in-place writes, views, random numbers and held values."""
    builder = ProgramBuilder()
    rows = chance.choice((1, 8, 128))
    width = chance.choice((16, 64, 256))
    dtype = chance.choice(FLOATS)
    x, output = builder.input(rows, width, dtype=dtype), []
    for layer in range(chance.randint(1, 10)):
        if chance.random() < 0.2:
            dtype = chance.choice(FLOATS)
            x = builder.op("aten::_to_copy", x, shape=(rows, width), dtype=dtype)
            output.append(x)
        module = f"layers.{layer}"
        wide = width * chance.choice((1, 1, 4))
        up = builder.input(width, wide, dtype=dtype)
        down = builder.input(wide, width, dtype=dtype)
        hidden = builder.op("aten::mm", x, up, shape=(rows, wide), module=f"{module}.up")
        active = builder.op("aten::relu", hidden, shape=(rows, wide), module=f"{module}.act")
        if chance.random() < 0.2:
            noise = builder.op("aten::rand_like", active, shape=(rows, wide), random=True, module=module)
            builder.inplace("aten::add_.Tensor", active, noise)
            output.append(noise)
        if chance.random() < 0.2:
            row = builder.view("aten::select.int", up, shape=(wide,), slots=(0, 0))
            builder.inplace("aten::mul_.Scalar", row, slots=(0.5,))
            output.append(row)
        x = builder.op("aten::mm", active, down, shape=(rows, width), module=f"{module}.down")
        output += (hidden, active, x)
    builder.drop(*(v for v in output if v != x and chance.random() < 0.8))
    return builder.graph()


def random_request(chance, graph, most=5, kinds=("cuda", "cuda", "cpu")):
    """Return a request with at most `most` random devices, and with some inputs on devices.

    Some devices are nearly full, some lack dtypes or ops, and some have unknown memory. `kinds`: kinds to choose from.
    """
    whole = sum(sizes(graph).values())
    shares = (0, 0, 0.02, 0.1, 0.3, 0.6, 1.0, 1.5, 4.0)
    devices = []
    for number in range(chance.randint(1, most)):
        free = int(whole * chance.choice(shares))
        is_measured = chance.random() > 0.05
        total = chance.choice((0, free + whole, 10 * whole))
        lacks = frozenset(chance.sample(["float32", "bfloat16", "float16"], chance.choice((0, 0, 0, 1, 2))))
        every = {"float32", "bfloat16", "float16", "float64", "complex64", "int32", "int64", "uint8", "bool"}
        names = frozenset(every - lacks) if lacks else frozenset()
        ops = [*sorted({node.op for node in graph.nodes}), "aten::mm.out", "aten::add"]
        unsupported = frozenset(chance.sample(ops, chance.choice((0, 0, 0, 0, 0, 1, 2))))
        fields = {
            "memory": total, "memory_free": free if is_measured else None, "dtypes": names, "unsupported": unsupported,
            "flops": 1e12, "bandwidth": 1e11,
        }  # fmt: skip
        kind = chance.choice(kinds)
        devices.append(DeviceCapabilities(f"s{number}/{kind}:0", kind, **fields))
    ids = [d.id for d in devices]
    links = tuple(Link(a, b, chance.choice((1e8, 1e10)), 1e-5) for a in ("client", *ids) for b in ids if a != b)
    resident = {}
    if chance.random() < 0.4:
        homes = {storage_of(v): chance.choice(ids) for v in graph.inputs if chance.random() < 0.5}
        resident = {v: homes[storage_of(v)] for v in graph.inputs if storage_of(v) in homes}
    if chance.random() < 0.2:
        resident[RANDOM_STATE] = chance.choice(ids)
    copies = {
        v: (d,)
        for v in graph.inputs
        if chance.random() < 0.1 and v in resident and (d := chance.choice(ids)) != resident[v]
    }
    limits = {d: int(whole * chance.choice(shares[2:])) for d in ids if chance.random() < 0.1}
    return Request(
        NetworkTopology(tuple(devices), links),
        resident=resident,
        copies=copies,
        memory_limits=limits,
        pins=tuple((f"layers.{n}", chance.choice(ids)) for n in range(3)),
        scheduler=chance.choice(("sequential", "parallel", "dynamic")),
    )


def size(graph, value, *, since=False):
    """Return the bytes from the first to the last element of a value. With `since`, start at the start of its storage."""
    meta = graph.meta(value)
    if not math.prod(meta.shape):
        return 0
    elements = 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))
    return (elements + (meta.offset if since else 0)) * meta.dtype.itemsize


def sizes(graph):
    """Return the bytes by storage."""
    results = Counter()
    for value in (*graph.inputs, *(v for node in graph.nodes for v in node.outputs)):
        results[storage_of(value)] = max(results[storage_of(value)], size(graph, value, since=True))
    return results


def broken(result, request):
    """Return descriptions of the constraints that a plan violates: memory, limits, dtypes and ops."""
    return [*cannot_run(result, request), *too_full(result, request)]


def cannot_run(result, request):
    """Return descriptions of the ops that a plan runs on a device without the op or one of its dtypes."""
    graph, outcome, replace = result.graph, [], result.plan.replace
    by_id = {d.id: d for d in request.topology.devices}
    for decision in result.placement.decisions:
        node, device = graph.nodes[decision.node], by_id[decision.device]
        dtypes = {str(graph.meta(replace.get(v, v)).dtype)[len("torch.") :] for v in (*node.inputs, *node.outputs)}
        if device.dtypes and dtypes - device.dtypes:
            outcome.append(f"{node.op} runs on {decision.device}, which lacks {sorted(dtypes - device.dtypes)}")
        if node.op in device.unsupported or node.op.split(".")[0] in device.unsupported:
            outcome.append(f"{node.op} runs on {decision.device}, which does not support the op")
    return outcome


def waiting(steps, receiver, at):
    """Return the values that may have arrived at a device before its step `at`.

    All other devices are assumed to be as far ahead as possible. `receiver`: the device.
    """
    turns, mail, on_device = dict.fromkeys(steps, 0), Counter(), True
    while on_device:
        on_device = False
        for device, its in steps.items():
            while turns[device] < (at if device == receiver else len(its)):
                step = its[turns[device]]
                if isinstance(step, Receive):
                    if not mail[step.source, device, step.value]:
                        break
                    mail[step.source, device, step.value] -= 1
                elif isinstance(step, Send):
                    mail[device, step.target, step.value] += 1
                turns[device] += 1
                on_device = True
    return [value for (_, target, value), count in mail.items() if target == receiver for _ in range(count)]


def too_full(result, request):
    """Return descriptions of the devices whose memory a plan exceeds."""
    graph, placement, outcome = result.graph, result.placement, []
    by_id = {d.id: d for d in request.topology.devices}
    references = {d: defaultdict(dict) for d in by_id}  # by device and memory, bytes by value
    total = Counter()  # by device
    before = {v: d for v, d in request.resident.items() if v in graph.inputs}

    def change(device, memory, value, nbytes):
        """Add a value to a memory block of a device, or remove it if `nbytes` is None. A block counts its largest value."""
        values = references[device][memory]
        total[device] -= max(values.values(), default=0)
        values.pop(value, None) if nbytes is None else values.update({value: nbytes})
        total[device] += max(values.values(), default=0)

    def hold(device, value):
        at_home = device in (placement.values.get(value, device), before.get(value))
        change(device, storage_of(value) if at_home else ~value, value, size(graph, value, since=at_home))

    def let_go(device, value):
        for memory in (storage_of(value), ~value):
            change(device, memory, value, None)

    def bytes_on(device):
        return total[device]

    for value in graph.inputs:
        for device in {*request.copies.get(value, ()), *([before[value]] if value in before else [])}:
            hold(device, value)
    at_first = {d: bytes_on(d) for d in by_id}
    for value in graph.inputs:
        hold(placement.values[value], value)
    for device, steps in result.schedule.steps.items():
        most, is_host = bytes_on(device), by_id[device].kind == "cpu"
        for at, step in enumerate(steps):
            beside = 0
            if is_host and len(result.schedule.steps) > 1:  # transfers wait in the device's own memory
                come = waiting(result.schedule.steps, device, at)
                beside = sum(size(graph, v) for v in come if placement.values.get(v) != device)
                most = max(most, bytes_on(device) + beside)
            for node in step.nodes if isinstance(step, Run) else ():
                for value in graph.nodes[node].outputs:
                    hold(device, value)
                most = max(most, bytes_on(device) + beside + workspace(graph, graph.nodes[node]))
            if isinstance(step, Send):
                most = max(most, bytes_on(device) + beside + (size(graph, step.value) if is_host else 0))
                if placement.values.get(step.value) == step.target and before.get(step.value) == device:
                    for value in list(references[device][storage_of(step.value)]):  # it moves with all of its views
                        change(device, storage_of(step.value), value, None)
            if isinstance(step, Upload | Receive):
                hold(device, step.value)
            for value in step.values if isinstance(step, Free) else ():
                let_go(device, value)
            most = max(most, bytes_on(device))
        limit, has = request.memory_limits.get(device), by_id[device]
        if has.memory_free is not None and most - at_first[device] > has.memory_free:
            outcome.append(f"{device} takes {most - at_first[device]} bytes more, and has {has.memory_free} free")
        if has.memory and most > max(has.memory, at_first[device]):
            outcome.append(f"{device} holds {most} bytes, and has {has.memory}")
        if limit is not None and most > max(limit, at_first[device]):
            outcome.append(f"{device} holds {most} bytes, and its limit is {limit}")
    return outcome


def fits_somewhere(graph, request):
    """Return True if one device can certainly hold and run the whole program. Then a plan must exist."""
    dtypes = {str(graph.meta(v).dtype)[len("torch.") :] for v in (*graph.inputs, *graph.outputs)}
    dtypes |= {str(graph.meta(v).dtype)[len("torch.") :] for node in graph.nodes for v in node.outputs}
    whole = sum(sizes(graph).values()) + max(workspace(graph, node) for node in graph.nodes)
    if request.resident or request.copies:  # resident values cannot always move
        return False
    return any(
        (d.memory_free is None or d.memory_free >= whole)
        and (not d.memory or d.memory >= whole)
        and request.memory_limits.get(d.id, whole) >= whole
        and (not d.dtypes or dtypes <= d.dtypes)
        and all(d.runs(node.op) for node in graph.nodes)
        for d in request.topology.devices
    )


@attrs.define
class Tally:
    """Outcome of all plans.

    Attributes:
        plans: number of plans. spread: number of plans over several devices.
        fallen_back: number of plans by another policy than the requested policy. refused: number of infeasible programs.
        faults: descriptions of violations.
    """

    plans: int = 0
    fallen_back: int = 0
    spread: int = 0
    refused: int = 0
    faults: list[str] = attrs.field(factory=list)

    def describe(self):
        """Return the outcome as text."""
        return (
            f"{self.plans:,} plans, {self.spread:,} over several devices, {self.fallen_back:,} by a policy other than the requested "
            f"for; {self.refused:,} refused; {len(self.faults):,} faults"
        )


def search(seed, count, policies=POLICIES):
    """Plan `count` random programs for random clusters with every policy."""
    tally = Tally()
    for number in range(seed, seed + count):
        chance = random.Random(number)
        graph = random_program(chance)
        plan_request(tally, str(number), graph, random_request(chance, graph), policies)
    return tally


def plan_request(tally, name, graph, request, policies):
    """Plan a program with each policy, and check the results."""
    for policy in policies:
        options = attrs.evolve(request, placement_policy=policy.name)
        try:
            result = plan(graph, REGISTRY, options)
        except DoesNotFit as error:
            tally.refused += 1
            words = ("bytes are short", "lacks", "limit", "does not run", "to be in several places")
            if (fits_somewhere(graph, options) and not error.excluded_by_pins) or not any(
                word in str(error) for word in words
            ):
                tally.faults.append(f"{name} {policy.name}: {error}")
            continue
        tally.plans += 1
        tally.fallen_back += result.placement.policy != policy.name
        tally.spread += len(result.placement.devices) > 1
        tally.faults += [f"{name} {policy.name}: {fault}" for fault in broken(result, options)]
