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
from djinn_optimizations.recomputation.cone import AMORTIZING_RUNS, Cone
from djinn_optimizations.recomputation.cut import min_cut_nodes

# Weight of a second of computing relative to a second of sending. It is 0 for devices that would otherwise idle.
COMPUTE_WEIGHTS = (1.0, 0.0)
FREE_MEMORY_SHARE = 0.1  # share of a device's memory that inputs of replicas must leave free


@attrs.frozen(eq=False)
class ReplicaChoice:
    """A set of replicas with predicted times. A replica is an op that runs on a second device as well.

    Attributes:
        replicas: the replicas. It is empty if all values are sent.
        seconds: predicted time of the program, including a share of the time to copy inputs of replicas.
        interval: seconds between successive runs in a pipeline.
        computing: seconds to compute the replicas.
        sending: seconds of the transfers that the replicas avoid.
        nbytes: bytes of the transfers that the replicas avoid.
    """

    replicas: tuple[PlacementDecision, ...]
    seconds: float
    interval: float
    computing: float = 0.0
    sending: float = 0.0
    nbytes: int = 0


def choices(context: OptimizationContext, placement: Placement, cones: Sequence[Cone]) -> list[ReplicaChoice]:
    """Return candidate sets of replicas, chosen from `cones`. The first set is empty."""
    candidates, seen_keys = [_simulate(context, placement, ())], set[frozenset[tuple[int, str]]]()
    for weight in COMPUTE_WEIGHTS:
        runs = [(cone, nodes) for cone in cones if (nodes := min_cut_nodes(cone, weight))]
        key = frozenset((n, cone.device) for cone, nodes in runs for n in nodes)
        if not key or key in seen_keys:
            continue
        seen_keys.add(key)
        replicas = tuple(r for cone, nodes in runs for r in _replicas(context, cone, nodes))
        if not _fits(context, placement, replicas):
            continue
        computing = sum(cone.seconds[n] for cone, nodes in runs for n in nodes)
        avoided = [(cone, v) for cone, nodes in runs for v in _avoided_transfers(cone, nodes)]
        sending = sum(cone.sending[v] for cone, v in avoided)
        nbytes = sum(context.graph.meta(v).nbytes for _, v in avoided)
        choice = _simulate(context, placement, replicas)
        candidates.append(attrs.evolve(choice, computing=computing, sending=sending, nbytes=nbytes))
    return candidates


def _avoided_transfers(cone: Cone, nodes: frozenset[int]) -> list[int]:
    """Return the values that are not sent if `nodes` run on the device of the cone."""
    outputs = {v for n in nodes for v in cone.makes[n]}
    return [v for v in cone.wanted if v in outputs]


def _replicas(context: OptimizationContext, cone: Cone, nodes: frozenset[int]) -> Iterator[PlacementDecision]:
    """Yield replicas for `nodes`. Nodes that are connected by operands get the same reason."""
    import networkx as nx

    connections = nx.Graph()
    connections.add_nodes_from(nodes)
    producer = {v: n for n in nodes for v in cone.makes[n]}
    connections.add_edges_from((producer[v], n) for n in nodes for v in cone.needs[n] if v in producer)
    for component in nx.connected_components(connections):
        avoided = _avoided_transfers(cone, frozenset(component))
        nbytes = sum(context.graph.meta(v).nbytes for v in avoided)
        home = Counter(cone.home[v] for v in avoided).most_common(1)[0][0] if avoided else "elsewhere"
        compute_seconds, send_seconds = sum(cone.seconds[n] for n in component), sum(cone.sending[v] for v in avoided)
        reason = f"computed here, too: {duration(compute_seconds)} against {duration(send_seconds)} for sending {size(nbytes)} from {home}"
        for node in sorted(component):
            yield PlacementDecision(node, cone.device, reason)


def _simulate(
    context: OptimizationContext, placement: Placement, replicas: tuple[PlacementDecision, ...]
) -> ReplicaChoice:
    """Simulate the program with `replicas`, and return the predicted times.

    The simulated run is the second one, when copies of weights exist. It leaves out uploads, which are equal for all sets.
    """
    graph, program = context.graph, context.graph.program
    plan = attrs.evolve(context.plan, replicas=replicas)
    replicated = with_replicas(graph, placement, plan, context.profile)
    replica_copies = replicated.copies
    copies = {
        v: tuple(dict.fromkeys((*context.copies.get(v, ()), *replica_copies.get(v, ()))))
        for v in {*context.copies, *replica_copies}
    }
    locations = {v: context.resident.get(v, placement.values[v]) for v in graph.inputs} | {
        v: placement.values[v] for v in replica_copies
    }
    new_copies = [
        (v, d) for v, devices in replica_copies.items() for d in devices if d not in context.copies.get(v, ())
    ]
    copy_seconds = sum(
        context.topology.link(placement.values[v], d).transfer_seconds(graph.meta(v).nbytes) for v, d in new_copies
    )
    arguments = (program, graph, plan, replicated, context.costs, context.topology)
    scheduling = SchedulingContext(*arguments, locations, (), copies)
    steps = write_steps(scheduling, plan.nodes)
    timeline = simulate(scheduling, ExecutionSchedule(program, (), steps, plan.replace))
    return ReplicaChoice(replicas, timeline.seconds + copy_seconds / AMORTIZING_RUNS, timeline.interval)


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
    usable_bytes = {d.id: d.memory * (1 - FREE_MEMORY_SHARE) for d in context.topology.devices if d.memory}
    return all(resident_bytes[d] + nbytes <= usable_bytes.get(d, float("inf")) for d, nbytes in new_bytes.items())
