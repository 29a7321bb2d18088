"""Exhaustive search for placements of small programs, to which policies are compared."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import attrs

from djinn.errors import DoesNotFit
from djinn.hooks import SchedulingContext
from djinn.planning import Placement, PlacementDecision, storage_of
from djinn.testing import ProgramBuilder
from djinn_core.ir.handles import RANDOM_STATE
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.planning.pipeline import plan
from djinn_core.planning.stages.estimate import estimate
from djinn_core.planning.stages.steps import write_steps
from evaluation.clusters.clusters import FLOATS, POLICIES, REGISTRY, broken, random_request, size, too_full

LEAVES = 6_000  # maximum number of examined placements; beyond it, a program counts as unknown


def small_program(chance):
    """Return a random program of at most eight ops: products, sums, casts, repetitions, in-place writes, random numbers."""
    builder, width = ProgramBuilder(), chance.choice((16, 32))
    first = builder.input(chance.choice((4, 64)), width, dtype=chance.choice(FLOATS[:2]))
    outputs = [first]
    for _ in range(chance.randint(2, 8)):
        x = chance.choice(outputs[-3:])
        shape, dtype = tuple(builder.metas[x].shape), builder.metas[x].dtype
        alike = [v for v in outputs if builder.metas[v].shape == shape and builder.metas[v].dtype == dtype]
        match chance.choice("mmmmarcwn"):
            case "m":
                outputs.append(builder.op("aten::mm", x, builder.input(width, width, dtype=dtype), shape=shape))
            case "a":
                outputs.append(builder.op("aten::add.Tensor", x, chance.choice(alike), shape=shape))
            case "r":
                outputs.append(builder.op("aten::repeat", x, shape=(2 * shape[0], width)))
            case "c":
                outputs.append(builder.op("aten::_to_copy", x, shape=shape, dtype=chance.choice(FLOATS[:2])))
            case "w":
                builder.inplace("aten::mul_.Scalar", x, slots=(0.5,))
            case "n":
                outputs.append(builder.op("aten::rand_like", x, shape=shape, random=True))
    builder.drop(*(v for v in outputs[:-1] if chance.random() < 0.7))
    return builder.graph()


class Pieces:
    """Sets of storages that must share a device: storages that one op makes or writes, and those of all random ops."""

    def __init__(self, graph):
        self.of = {}
        for node in graph.nodes:
            blocks = [*map(storage_of, (*node.outputs, *node.writes)), *([RANDOM_STATE] if node.random else [])]
            for item in blocks:
                self.unite(blocks[0], item)
        self.memory = list(
            dict.fromkeys(map(storage_of, (*graph.inputs, *(v for n in graph.nodes for v in n.outputs))))
        )

    def find(self, one):
        while self.of.get(one, one) != one:
            one = self.of[one]
        return one

    def unite(self, one, other):
        self.of[self.find(other)] = self.find(one)


def placement_exists(graph, request, pinned=None):
    """Return True if a placement fits in program order, False if none fits, or None if the search limit was reached.

    `pinned`: required device by node.
    """
    pieces, ids = Pieces(graph), [d.id for d in request.topology.devices]
    names = list(dict.fromkeys(map(pieces.find, pieces.memory)))
    nodes = tuple(node.id for node in graph.nodes)
    where = {node.id: pieces.find(storage_of((*node.outputs, *node.writes)[0])) for node in graph.nodes}
    pinned_devices = {where[n]: d for n, d in (pinned or {}).items()}
    if RANDOM_STATE in request.resident and any(node.random for node in graph.nodes):
        pinned_devices[pieces.find(RANDOM_STATE)] = request.resident[RANDOM_STATE]
    everything = OptimizationPlan(nodes)
    costs = estimate(graph, REGISTRY.cost_models, request.topology)
    values = [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]
    homeless = Counter()
    for value in graph.inputs:
        if value not in request.resident:
            homeless[pieces.find(storage_of(value))] += size(graph, value)
    most = {
        d.id: min([b for b in (d.memory or None, d.memory_free) if b is not None], default=None)
        for d in request.topology.devices
    }
    leaves_left = [LEAVES]
    able = {name: [d for d in ids if may_be_on(graph, request, name, d, pieces)] for name in names}

    def fits(homes):
        placement = Placement(
            tuple(PlacementDecision(n, homes[where[n]], "tried") for n in nodes),
            {v: homes[pieces.find(storage_of(v))] for v in values},
        )
        result = SimpleNamespace(graph=graph, placement=placement, plan=everything)
        facts = (graph.program, graph, everything, placement, costs, request.topology)
        steps = write_steps(SchedulingContext(*facts, request.resident, (), request.copies), nodes)
        result.schedule = SimpleNamespace(steps=steps)
        return not too_full(result, request)

    def extend(at, homes, taken):
        if at == len(names):
            leaves_left[0] -= 1
            return fits(homes)
        for device in able[names[at]]:
            if pinned_devices.get(names[at], device) != device:
                continue
            more = taken[device] + homeless[names[at]]
            if leaves_left[0] > 0 and (most[device] is None or more <= most[device]):
                result = extend(at + 1, {**homes, names[at]: device}, {**taken, device: more})
                if result:
                    return True
        return False

    found = extend(0, {}, dict.fromkeys(ids, 0))
    return None if leaves_left[0] <= 0 and not found else found


def may_be_on(graph, request, name, device, pieces):
    """Return True if a device supports ops, dtypes and uploads of a set of storages. `name`: its root in `pieces`."""
    one = request.topology.device(device)
    for node in graph.nodes:
        if pieces.find(storage_of((*node.outputs, *node.writes)[0])) != name:
            continue
        dtypes = {str(graph.meta(v).dtype)[len("torch.") :] for v in (*node.inputs, *node.outputs)}
        if (one.dtypes and dtypes - one.dtypes) or not one.runs(node.op):
            return False
    coming = [v for v in graph.inputs if pieces.find(storage_of(v)) == name and request.resident.get(v) != device]
    return not one.dtypes or {str(graph.meta(v).dtype)[len("torch.") :] for v in coming} <= one.dtypes


@attrs.define
class Compared:
    """Outcome of comparing policies with all placements.

    Attributes:
        feasible, infeasible, unknown: number of programs with a placement, without one, and with too many placements.
        faults: policies that found no placement although there is one, or exceeded a limit.
    """

    feasible: int = 0
    infeasible: int = 0
    unknown: int = 0
    faults: list[str] = attrs.field(factory=list)

    def describe(self):
        """Return the outcome as text."""
        return (
            f"a placement exists for {self.feasible:,}, none for {self.infeasible:,}, too many to look at all for "
            f"{self.unknown:,}; {len(self.faults):,} faults"
        )


def compare(seed, count, policies=POLICIES):
    """Plan `count` small programs for random clusters of up to three devices with every policy, and examine all placements."""
    tally = Compared()
    for number in range(seed, seed + count):
        chance = random.Random(number)
        graph = small_program(chance)
        request = random_request(chance, graph, most=3)
        request = attrs.evolve(request, scheduler="sequential", pins=())
        answer = placement_exists(graph, request)
        tally.feasible += answer is True
        tally.infeasible += answer is False
        tally.unknown += answer is None
        for policy in policies:
            options = attrs.evolve(request, placement_policy=policy.name)
            try:
                result = plan(graph, REGISTRY, options)
            except DoesNotFit as error:
                if answer:
                    tally.faults.append(
                        f"{number} {policy.name}: a placement fits, but the policy did not find it: {error}"
                    )
                continue
            tally.faults += [f"{number} {policy.name}: {fault}" for fault in broken(result, options)]
            if answer is False and (result.placement.policy != "search" or result.schedule.scheduler == "sequential"):
                tally.faults.append(f"{number} {policy.name}: the policy found a placement, but none fits")
    return tally
