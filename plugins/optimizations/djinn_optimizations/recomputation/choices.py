"""Choose which values to recompute instead of sending them, by predicted times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from djinn.hooks import OptimizationContext, SchedulingContext
from djinn.planning import ExecutionSchedule, Placement, PlacementDecision, simulate
from djinn_core.ir.replicas import with_replicas
from djinn_core.planning.stages.steps import write_steps
from djinn_core.planning.units import duration, size
from djinn_optimizations.recomputation.cone import RUNS, Cone
from djinn_optimizations.recomputation.cut import cheapest

# Weights of a computing second against a sending second: equal, or zero for devices that would idle.
WEIGHTS = (1.0, 0.0)
SPARE = 0.1  # share of a device's memory that copies of weights must leave free


@attrs.frozen(eq=False)
class ReplicaChoice:
    """A set of replicas, which are ops that run on a second device as well, with predicted times.

    Attributes:
        replicas: the replicas. If all values are sent, it is empty.
        seconds: predicted time of the program, with a share of the time to copy inputs of replicas.
        interval: seconds between successive runs in a pipeline.
        computing: seconds of the replicas.
        sending: seconds of the transfers that the replicas avoid.
        nbytes: bytes of the transfers that the replicas avoid.
    """

    replicas: tuple[PlacementDecision, ...]
    seconds: float
    interval: float
    computing: float = 0.0
    sending: float = 0.0
    nbytes: int = 0


def choices(context: OptimizationContext, placement: Placement, found: Sequence[Cone]) -> list[ReplicaChoice]:
    """Return candidate sets of replicas. The first set is empty."""
    simulated, tried = [_simulated(context, placement, ())], set[frozenset[tuple[int, str]]]()
    for weight in WEIGHTS:
        runs = [(cone, nodes) for cone in found if (nodes := cheapest(cone, weight))]
        key = frozenset((n, cone.device) for cone, nodes in runs for n in nodes)
        if not key or key in tried:
            continue
        tried.add(key)
        replicas = tuple(r for cone, nodes in runs for r in _replicas(context, cone, nodes))
        if not _fits(context, placement, replicas):
            continue
        computing = sum(cone.seconds[n] for cone, nodes in runs for n in nodes)
        spared = [(cone, v) for cone, nodes in runs for v in _spared(cone, nodes)]
        sending = sum(cone.sending[v] for cone, v in spared)
        nbytes = sum(context.graph.meta(v).nbytes for _, v in spared)
        choice = _simulated(context, placement, replicas)
        simulated.append(attrs.evolve(choice, computing=computing, sending=sending, nbytes=nbytes))
    return simulated


def _spared(cone: Cone, nodes: frozenset[int]) -> list[int]:
    """Return the values that need not be sent if `nodes` run on the device of the cone."""
    outputs = {v for n in nodes for v in cone.makes[n]}
    return [v for v in cone.wanted if v in outputs]


def _replicas(context: OptimizationContext, cone: Cone, nodes: frozenset[int]) -> Iterator[PlacementDecision]:
    """Yield replicas for `nodes`. Connected nodes have one reason."""
    import networkx as nx

    hanging = nx.Graph()
    hanging.add_nodes_from(nodes)
    maker = {v: n for n in nodes for v in cone.makes[n]}
    hanging.add_edges_from((maker[v], n) for n in nodes for v in cone.needs[n] if v in maker)
    for together in nx.connected_components(hanging):
        spared = _spared(cone, frozenset(together))
        nbytes = sum(context.graph.meta(v).nbytes for v in spared)
        home = Counter(cone.home[v] for v in spared).most_common(1)[0][0] if spared else "elsewhere"
        takes, instead = sum(cone.seconds[n] for n in together), sum(cone.sending[v] for v in spared)
        reason = (
            f"computed here, too: {duration(takes)} against {duration(instead)} for sending {size(nbytes)} from {home}"
        )
        for node in sorted(together):
            yield PlacementDecision(node, cone.device, reason)


def _simulated(
    context: OptimizationContext, placement: Placement, replicas: tuple[PlacementDecision, ...]
) -> ReplicaChoice:
    """Simulate the program with `replicas`, and return the predicted times.

    The simulation starts with the second run. It leaves out the uploads, which are equal for all choices.
    """
    graph, program = context.graph, context.graph.program
    plan = attrs.evolve(context.plan, replicas=replicas)
    replicated = with_replicas(graph, placement, plan, context.profile)
    stay = replicated.copies
    copies = {v: tuple(dict.fromkeys((*context.copies.get(v, ()), *stay.get(v, ())))) for v in {*context.copies, *stay}}
    locations = {v: context.resident.get(v, placement.values[v]) for v in graph.inputs} | {
        v: placement.values[v] for v in stay
    }
    brought = [(v, d) for v, devices in stay.items() for d in devices if d not in context.copies.get(v, ())]
    takes = sum(
        context.topology.link(placement.values[v], d).transfer_seconds(graph.meta(v).nbytes) for v, d in brought
    )
    arguments = (program, graph, plan, replicated, context.costs, context.topology)
    scheduling = SchedulingContext(*arguments, locations, (), copies)
    steps = write_steps(scheduling, plan.nodes)
    line = simulate(scheduling, ExecutionSchedule(program, (), steps, plan.replace))
    return ReplicaChoice(replicas, line.seconds + takes / RUNS, line.interval)


def _fits(context: OptimizationContext, placement: Placement, replicas: Sequence[PlacementDecision]) -> bool:
    """Return True if the devices have memory for the inputs of the replicas, in addition to the inputs that they hold."""
    graph = context.graph
    plan = attrs.evolve(context.plan, replicas=tuple(replicas))
    replicated = with_replicas(graph, placement, plan, context.profile)
    resident_bytes, new_bytes = Counter[str](), Counter[str]()
    for value in graph.inputs:
        resident_bytes[placement.values[value]] += graph.meta(value).nbytes
        for device in replicated.copies.get(value, ()):
            new_bytes[device] += graph.meta(value).nbytes
    room = {d.id: d.memory * (1 - SPARE) for d in context.topology.devices if d.memory}
    return all(resident_bytes[d] + nbytes <= room.get(d, float("inf")) for d, nbytes in new_bytes.items())
