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
    graph: Graph,
    plan: OptimizationPlan,
    substitutions: Sequence[Substitution],
    kept_values: frozenset[int],
    author: str,
) -> None:
    """Reject substitutions whose effects other nodes could see, apart from the outputs.

    Raises:
        InvalidStage: a substitution is illegal; the message names `author` and the first problem.
    """
    replaced_nodes: set[int] = set()
    for substitution in substitutions:
        problem = next(_problems(graph, plan, substitution, kept_values), None)
        if problem is None and replaced_nodes & substitution.nodes:
            problem = "two substitutions replace the same nodes"
        if problem:
            raise InvalidStage(f"{author} proposed an illegal substitution: {problem}")
        replaced_nodes |= substitution.nodes


def _problems(
    graph: Graph, plan: OptimizationPlan, substitution: Substitution, kept_values: frozenset[int]
) -> Iterator[str]:
    if not substitution.nodes or not substitution.nodes <= frozenset(plan.nodes):
        yield f"it replaces nodes that do not run: {sorted(substitution.nodes - frozenset(plan.nodes))[:8]}"
        return
    nodes = [graph.nodes[n] for n in sorted(substitution.nodes)]
    created = frozenset(v for node in nodes for v in node.outputs)
    own = {storage_of(v) for v in created} - {storage_of(v) for v in (*graph.inputs, *substitution.inputs)}
    for node in nodes:
        if node.random or not (node.outputs or node.writes) or not own.issuperset(storages_written(node)):
            yield f"it replaces {node.op} (node {node.id}), which draws random numbers, has an effect, or writes memory that its nodes did not create"
    if not created.issuperset(substitution.outputs):
        yield "it has outputs that its nodes do not compute"
    for value in created - frozenset(substitution.outputs):
        if value in kept_values or any(user.id not in substitution.nodes for user in graph.consumers(value)):
            yield f"it removes value {value}, which other nodes or the client use"
    yield from _input_problems(graph, substitution, created)
    yield from _memory_problems(graph, substitution, kept_values)
    yield from _write_problems(graph, substitution)


def _input_problems(graph: Graph, substitution: Substitution, created: frozenset[int]) -> Iterator[str]:
    first, last = min(substitution.nodes), max(substitution.nodes)
    storages = {storage_of(v) for v in substitution.inputs}
    for value in substitution.inputs:
        maker = graph.producer(value)
        if value in created or (maker is not None and maker.id >= first):
            yield f"its input {value} is computed only after its first node"
    for node in graph.nodes[first : last + 1]:
        if storages.intersection(storages_written(node)):
            yield f"{node.op} (node {node.id}) writes one of its inputs between its nodes"


def _memory_problems(graph: Graph, substitution: Substitution, kept_values: frozenset[int]) -> Iterator[str]:
    """Yield a problem for each output that shares memory into which later code may write."""
    own = {storage_of(v) for v in substitution.outputs}
    if own & {storage_of(v) for v in substitution.inputs} or own & {storage_of(v) for v in graph.inputs}:
        yield "an output is a view of existing memory"
    values_per_storage = Counter(storage_of(v) for v in substitution.outputs)
    if any(values_per_storage[storage_of(v)] > 1 for v in kept_values.intersection(substitution.outputs)):
        yield "a kept output shares memory with another value that it creates"


def _write_problems(graph: Graph, substitution: Substitution) -> Iterator[str]:
    """Yield a problem for each output that another node reads before the last substituted node has written it."""
    last = {s: n for n in sorted(substitution.nodes) for s in storages_written(graph.nodes[n])}
    for value in substitution.outputs:
        if any(
            user.id < last.get(storage_of(value), -1)
            for user in graph.consumers(value)
            if user.id not in substitution.nodes
        ):
            yield f"its output {value} is read before the last write to it"
