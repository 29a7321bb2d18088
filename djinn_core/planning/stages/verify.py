"""Validation of stage results: profiles, costs and placements. Rewrites and schedules have files of their own."""

from __future__ import annotations

import math

from djinn_core.errors import InvalidStage
from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.ir.costs import CostEstimate
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import RANDOM_STATE, storage_of
from djinn_core.ir.indexes import bound_nodes
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.profile import PatternMatch
from djinn_core.ir.replicas import repeatable


def check_match(graph: Graph, match: PatternMatch) -> None:
    """Check that a match covers nodes of the graph and refers to values of the graph.

    Raises:
        InvalidStage: the match names an unknown node or value.
    """
    if not isinstance(match, PatternMatch):
        raise InvalidStage(f"a pattern returned a {type(match).__name__}; return a PatternMatch")
    if not match.nodes or not all(0 <= n < len(graph.nodes) for n in match.nodes):
        raise InvalidStage(f"match {match.pattern!r} covers nodes that the graph does not have: {match.nodes}")
    for value in match.residency:
        if graph.producer(value) is None and not graph.consumers(value):
            raise InvalidStage(
                f"match {match.pattern!r} gives a residency to value {value}, which the graph does not have"
            )


def check_estimate(estimate: CostEstimate, node: Node) -> None:
    """Check that an estimate is finite and not negative.

    Raises:
        InvalidStage: the estimate is invalid.
    """
    if not isinstance(estimate, CostEstimate):
        raise InvalidStage(f"a cost model returned a {type(estimate).__name__}; return a CostEstimate")
    counts = (estimate.flops, estimate.operations, estimate.bytes_read, estimate.bytes_written)
    numbers = (*counts, estimate.seconds, estimate.workspace)
    if not all(math.isfinite(x) and x >= 0 for x in numbers):
        raise InvalidStage(f"the estimate for {node.op} is negative or not finite: {estimate}")
    if not isinstance(estimate.model, str):
        raise InvalidStage(
            f"the estimate for {node.op} has a `model` of type {type(estimate.model).__name__}; use a str"
        )


def check_placement(context: PlacementContext, placement: Placement, author: str) -> None:
    """Check that every node is placed once, on a known device, with a reason, and that shared memory is on one device.

    Raises:
        InvalidStage: a check fails; the message names `author`.
    """
    if not isinstance(placement, Placement):
        raise InvalidStage(f"{author} returned a {type(placement).__name__}; return a Placement")
    problem = _type_problem(placement) or _decision_problem(context, placement) or _value_problem(context, placement)
    problem = problem or _replica_problem(context, placement)
    if problem:
        raise InvalidStage(f"{author} made an invalid placement: {problem}")


def _type_problem(placement: Placement) -> str:
    """Return a description of an element of a wrong type, or an empty string.

    `Placement` checks no elements: policies may create thousands.
    """
    decisions: list[object] = [*placement.decisions, *placement.replicas]
    values: list[tuple[object, object]] = [*placement.values.items()]
    copies: list[tuple[object, object]] = [*placement.copies.items()]
    wrong: list[object] = [d for d in decisions if not isinstance(d, PlacementDecision)]
    wrong += [(v, home) for v, home in values if not (isinstance(v, int) and isinstance(home, str))]
    wrong += [(v, holders) for v, holders in copies if not (isinstance(v, int) and isinstance(holders, tuple))]
    return f"the element {wrong[0]!r} has a wrong type" if wrong else ""


def _decision_problem(context: PlacementContext, placement: Placement) -> str:
    devices = {d.id for d in context.topology.devices}
    placed_nodes = [d.node for d in placement.decisions]
    if tuple(placed_nodes) != context.plan.nodes and sorted(placed_nodes) != sorted(context.plan.nodes):
        missing, extra = set(context.plan.nodes) - set(placed_nodes), set(placed_nodes) - set(context.plan.nodes)
        return f"nodes {sorted(missing)} are not placed, {sorted(extra)} are not in the plan, or one is placed twice"
    for decision in placement.decisions:
        if decision.device not in devices:
            return f"node {decision.node} is on {decision.device!r}; the devices are {sorted(devices)}"
        if not decision.reason or not isinstance(decision.reason, str):
            return f"node {decision.node} is placed without a reason"
    random_decisions = [d for d in placement.decisions if context.graph.nodes[d.node].random]
    bound = bound_nodes(context.graph, [d.node for d in random_decisions])  # each bound device has its own random state
    random = {d.device for d in random_decisions if d.node not in bound}
    if random and (home := context.resident.get(RANDOM_STATE)) is not None and random != {home}:
        return f"random ops run on {sorted(random)}, but the random state is on {home!r}"
    return f"random ops share one random state, but run on {sorted(random)}" if len(random) > 1 else ""


def _replica_problem(context: PlacementContext, placement: Placement) -> str:
    devices = {d.id for d in context.topology.devices}
    home, replica_pairs = {d.node: d.device for d in placement.decisions if placement.replicas}, set()
    for replica in placement.replicas:
        node, device = replica.node, replica.device
        if node not in home or device not in devices or device == home[node] or (node, device) in replica_pairs:
            return f"node {node} is repeated on {device!r}, where it runs already, or which is not a device"
        if not repeatable(context.graph.nodes[node]):
            return f"{context.graph.nodes[node].op} (node {node}) is repeated, but it writes, draws random numbers, has an effect or reads beyond its operand"
        if not replica.reason:
            return f"node {node} is repeated on {device!r} without a reason"
        replica_pairs.add((node, device))
    return ""


def _value_problem(context: PlacementContext, placement: Placement) -> str:
    nodes, devices = context.graph.nodes, {d.id for d in context.topology.devices}
    homes: dict[int, str] = {}
    values, replace = placement.values, context.plan.replace
    for value in (*context.graph.inputs, *[v for n in context.plan.nodes for v in nodes[n].outputs]):
        home = values.get(value)
        if home not in devices:
            return f"value {value} lives on {home!r}; the devices are {sorted(devices)}"
        if homes.setdefault(storage_of(value), home) != home:
            return (
                f"value {value} is on {home!r}, but a value that shares its memory is on {homes[storage_of(value)]!r}"
            )
    for decision in placement.decisions:
        node, device = nodes[decision.node], decision.device
        own_values = (*node.outputs, *[replace.get(v, v) for v in node.writes]) if node.writes else node.outputs
        for value in own_values:
            if values.get(value) != device:
                return (
                    f"{node.op} (node {node.id}) runs on {device!r} but makes or writes value {value}, "
                    f"which lives on {values.get(value)!r}"
                )
    return ""
