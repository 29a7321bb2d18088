"""Validation of substitutions: other nodes may only see the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from djinn_core.errors import InvalidStage
from djinn_core.ir.graph import Graph, storages_written
from djinn_core.ir.handles import storage_of
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.substitution import Substitution


def check_substitutions(
    graph: Graph, plan: OptimizationPlan, substitutions: Sequence[Substitution], kept: frozenset[int], author: str
) -> None:
    """Reject substitutions whose effects other nodes could see, apart from the outputs.

    Raises:
        InvalidStage: a substitution is illegal; the message names `author` and the first problem.
    """
    taken: set[int] = set()
    for substitution in substitutions:
        problem = next(_problems(graph, plan, substitution, kept), None)
        if problem is None and taken & substitution.nodes:
            problem = "two of them take the same nodes"
        if problem:
            raise InvalidStage(f"{author} proposed an illegal substitution: {problem}")
        taken |= substitution.nodes


def _problems(graph: Graph, plan: OptimizationPlan, given: Substitution, kept: frozenset[int]) -> Iterator[str]:
    if not given.nodes or not given.nodes <= frozenset(plan.nodes):
        yield f"it takes nodes that do not run: {sorted(given.nodes - frozenset(plan.nodes))[:8]}"
        return
    nodes = [graph.nodes[n] for n in sorted(given.nodes)]
    made = frozenset(v for node in nodes for v in node.outputs)
    own = {storage_of(v) for v in made} - {storage_of(v) for v in (*graph.inputs, *given.inputs)}
    for node in nodes:
        if node.random or not (node.outputs or node.writes) or not own.issuperset(storages_written(node)):
            yield f"it takes {node.op} (node {node.id}), which draws random numbers, is there for its effect, or writes what is not its own"
    if not made.issuperset(given.outputs):
        yield "it has outputs that its nodes do not compute"
    for value in made - frozenset(given.outputs):
        if value in kept or any(user.id not in given.nodes for user in graph.consumers(value)):
            yield f"value {value} is used by others and would be gone"
    yield from _inputs(graph, given, made)
    yield from _memory(graph, given, kept)
    yield from _written(graph, given)


def _inputs(graph: Graph, given: Substitution, made: frozenset[int]) -> Iterator[str]:
    first, last = min(given.nodes), max(given.nodes)
    storages = {storage_of(v) for v in given.inputs}
    for value in given.inputs:
        maker = graph.producer(value)
        if value in made or (maker is not None and maker.id >= first):
            yield f"value {value} is not there yet where it would run"
    for node in graph.nodes[first : last + 1]:
        if storages.intersection(storages_written(node)):
            yield f"{node.op} (node {node.id}) writes one of its inputs meanwhile"


def _memory(graph: Graph, given: Substitution, kept: frozenset[int]) -> Iterator[str]:
    """Yield a problem for each output that shares memory into which later code may write."""
    own = {storage_of(v) for v in given.outputs}
    if own & {storage_of(v) for v in given.inputs} or own & {storage_of(v) for v in graph.inputs}:
        yield "an output is a view of existing memory"
    shared = Counter(storage_of(v) for v in given.outputs)
    if any(shared[storage_of(v)] > 1 for v in kept.intersection(given.outputs)):
        yield "a kept output shares memory with another value that it creates"


def _written(graph: Graph, given: Substitution) -> Iterator[str]:
    """Yield a problem for each node outside that reads memory before the substituted nodes have written it completely."""
    last = {s: n for n in sorted(given.nodes) for s in storages_written(graph.nodes[n])}
    for value in given.outputs:
        if any(
            user.id < last.get(storage_of(value), -1) for user in graph.consumers(value) if user.id not in given.nodes
        ):
            yield f"value {value} is seen before it is written for the last time"
