"""Random clusters and programs, and a simple check of what a plan holds and computes on each device, written for the tests alone."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import attrs
import torch

from djinn.hooks import (
    DeviceCapabilities,
    DoesNotFit,
    Link,
    NetworkTopology,
    Placement,
    PlacementDecision,
    Run,
    storage_of,
)
from djinn.scheduling import homes_of_values, resident_blocks, together
from djinn.testing import ProgramBuilder
from djinn_balanced import Balanced
from djinn_core.builtins.costs import Roofline
from djinn_core.builtins.placement import FirstFit, SingleDevice
from djinn_core.ir.schedule import Free, Receive, Upload
from djinn_core.ir.values import RANDOM_STATE
from djinn_core.pipeline import Request, plan
from djinn_core.plugins.registry import Registry
from djinn_cost_based import CostBased
from djinn_dynamic import Dynamic
from djinn_parallel import Parallel
from djinn_pinned import Pinned
from djinn_round_robin import RoundRobin

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class AllOnTheFirst:
    """A policy for clusters of one device."""

    name = "all_on_the_first"

    def place(self, context):
        first = context.topology.devices[0].id
        decisions = tuple(PlacementDecision(n, first, "it is the first") for n in context.plan.nodes)
        values = (*context.graph.inputs, *(v for n in context.plan.nodes for v in context.graph.nodes[n].outputs))
        return Placement(decisions, dict.fromkeys(values, first), self.name)


class Scattered:
    """A policy that decides at random."""

    name = "scattered"

    def place(self, context):
        graph, nodes, chance = context.graph, context.plan.nodes, random.Random(len(context.plan.nodes))
        blocks, devices = together(graph, nodes, context.plan.replace), [d.id for d in context.topology.devices]
        homes = resident_blocks(blocks, graph.inputs, context.resident)
        for value in (*graph.inputs, *(v for n in nodes for v in graph.nodes[n].outputs)):
            homes.setdefault(blocks.block(value), chance.choice(devices))
        where = [homes.get(blocks.node(n), devices[0]) for n in nodes]
        decisions = tuple(PlacementDecision(n, d, "at random") for n, d in zip(nodes, where, strict=True))
        return Placement(decisions, homes_of_values(graph, nodes, blocks, homes), self.name)


POLICIES = (
    SingleDevice(), FirstFit(), Balanced(), RoundRobin(), Pinned(), CostBased(), AllOnTheFirst(), Scattered(),
)  # fmt: skip
REGISTRY = Registry(
    cost_models=(Roofline(),), placement_policies=POLICIES, schedulers=(Parallel(), Dynamic())
)  # fmt: skip


def random_program(chance):
    """Stretches of layers in one dtype each, with casts between them, writes in place, views, random numbers and what is kept."""
    builder = ProgramBuilder()
    rows = chance.choice((1, 8, 128))
    width = chance.choice((16, 64, 256))
    dtype = chance.choice(FLOATS)
    x, made = builder.input(rows, width, dtype=dtype), []
    for layer in range(chance.randint(1, 10)):
        if chance.random() < 0.2:
            dtype = chance.choice(FLOATS)
            x = builder.op("aten::_to_copy", x, shape=(rows, width), dtype=dtype)
            made.append(x)
        module = f"layers.{layer}"
        wide = width * chance.choice((1, 1, 4))
        up = builder.input(width, wide, dtype=dtype)
        down = builder.input(wide, width, dtype=dtype)
        hidden = builder.op("aten::mm", x, up, shape=(rows, wide), module=f"{module}.up")
        active = builder.op("aten::relu", hidden, shape=(rows, wide), module=f"{module}.act")
        if chance.random() < 0.2:
            noise = builder.op("aten::rand_like", active, shape=(rows, wide), random=True, module=module)
            builder.inplace("aten::add_.Tensor", active, noise)
            made.append(noise)
        if chance.random() < 0.2:
            row = builder.view("aten::select.int", up, shape=(wide,), slots=(0, 0))
            builder.inplace("aten::mul_.Scalar", row, slots=(0.5,))
            made.append(row)
        x = builder.op("aten::mm", active, down, shape=(rows, width), module=f"{module}.down")
        made += (hidden, active, x)
    builder.drop(*(v for v in made if v != x and chance.random() < 0.8))
    return builder.graph()


def random_request(chance, graph):
    """Devices of which some are nearly full, some lack dtypes, and some are unknown; some inputs live somewhere."""
    whole = sum(sizes(graph).values())
    shares = (0, 0, 0.02, 0.1, 0.3, 0.6, 1.0, 1.5, 4.0)
    devices = []
    for number in range(chance.randint(1, 5)):
        free = int(whole * chance.choice(shares))
        known = chance.random() > 0.05
        total = chance.choice((0, free + whole, 10 * whole))
        lacks = frozenset(chance.sample(["float32", "bfloat16", "float16"], chance.choice((0, 0, 0, 1, 2))))
        names = frozenset({"float32", "bfloat16", "float16", "int64", "bool"}) - lacks if lacks else frozenset()
        fields = {"memory": total, "memory_free": free if known else None, "dtypes": names}
        devices.append(DeviceCapabilities(f"s{number}/cuda:0", "cuda", flops=1e12, bandwidth=1e11, **fields))
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


def size(graph, value):
    """Bytes of a value: all of these programs' are contiguous and begin where their memory does."""
    meta = graph.meta(value)
    return math.prod(meta.shape) * meta.dtype.itemsize


def sizes(graph):
    """Bytes by storage."""
    found = Counter()
    for value in (*graph.inputs, *(v for node in graph.nodes for v in node.outputs)):
        found[storage_of(value)] = max(found[storage_of(value)], size(graph, value))
    return found


def broken(result, request):
    """Constraints that a plan violates, in words: memory, limits or dtypes of a device; empty where it keeps to all of them."""
    graph, placement, found = result.graph, result.placement, []
    by_id = {d.id: d for d in request.topology.devices}
    replace = result.plan.replace
    for decision in placement.decisions:
        node, had = graph.nodes[decision.node], by_id[decision.device].dtypes
        used = {str(graph.meta(replace.get(v, v)).dtype)[len("torch.") :] for v in (*node.inputs, *node.outputs)}
        if had and used - had:
            found.append(f"{node.op} runs on {decision.device}, which lacks {sorted(used - had)}")
    held = {d: defaultdict(dict) for d in by_id}  # by device and memory: bytes by value

    def hold(device, value):
        at_home = placement.values.get(value, device) == device
        held[device][storage_of(value) if at_home else ~value][value] = size(graph, value)

    def let_go(device, value):
        for memory in (storage_of(value), ~value):
            held[device][memory].pop(value, None)

    def bytes_on(device):
        return sum(max(values.values(), default=0) for values in held[device].values())

    for value in graph.inputs:
        for device in {
            *request.copies.get(value, ()),
            *([request.resident[value]] if value in request.resident else []),
        }:
            hold(device, value)
    before = {d: bytes_on(d) for d in by_id}
    for value in graph.inputs:
        hold(placement.values[value], value)
    for device, steps in result.schedule.steps.items():
        most = bytes_on(device)
        for step in steps:
            for node in step.nodes if isinstance(step, Run) else ():
                for value in graph.nodes[node].outputs:
                    hold(device, value)
                most = max(most, bytes_on(device))
            if isinstance(step, Upload | Receive):
                hold(device, step.value)
            for value in step.values if isinstance(step, Free) else ():
                let_go(device, value)
            most = max(most, bytes_on(device))
        limit, has = request.memory_limits.get(device), by_id[device]
        if has.memory_free is not None and most - before[device] > has.memory_free:
            found.append(f"{device} takes {most - before[device]} bytes more, and has {has.memory_free} free")
        if has.memory and most > max(has.memory, before[device]):
            found.append(f"{device} holds {most} bytes, and has {has.memory}")
        if limit is not None and most > max(limit, before[device]):
            found.append(f"{device} holds {most} bytes, and its limit is {limit}")
    return found


def fits_somewhere(graph, request):
    """True if one device could hold a whole program with nothing freed: then a plan must be found."""
    used = {str(graph.meta(v).dtype)[len("torch.") :] for v in (*graph.inputs, *graph.outputs)}
    used |= {str(graph.meta(v).dtype)[len("torch.") :] for node in graph.nodes for v in node.outputs}
    whole = sum(sizes(graph).values())
    if request.resident or request.copies:  # then what is there cannot always go elsewhere
        return False
    return any(
        (d.memory_free is None or d.memory_free >= whole)
        and (not d.memory or d.memory >= whole)
        and request.memory_limits.get(d.id, whole) >= whole
        and (not d.dtypes or used <= d.dtypes)
        for d in request.topology.devices
    )


@attrs.define
class Tally:
    """Outcome of all clusters: plans that were made, of which fallbacks made some, programs that fit nowhere, and faults."""

    plans: int = 0
    fallen_back: int = 0
    spread: int = 0
    refused: int = 0
    faults: list[str] = attrs.field(factory=list)


def search(seed, count, policies=POLICIES):
    """Plan `count` random programs for random clusters, each with every policy."""
    tally = Tally()
    for number in range(seed, seed + count):
        chance = random.Random(number)
        graph = random_program(chance)
        request = random_request(chance, graph)
        for policy in policies:
            asked = attrs.evolve(request, placement_policy=policy.name)
            try:
                result = plan(graph, REGISTRY, asked)
            except DoesNotFit as error:
                tally.refused += 1
                if fits_somewhere(graph, asked) or not any(
                    word in str(error) for word in ("bytes are short", "lacks", "limit")
                ):
                    tally.faults.append(f"{number} {policy.name}: {error}")
                continue
            tally.plans += 1
            tally.fallen_back += result.placement.policy != policy.name
            tally.spread += len(result.placement.devices) > 1
            tally.faults += [f"{number} {policy.name}: {fault}" for fault in broken(result, asked)]
    return tally
