"""Loops over positions, whatever they do in a step: what comes out of each step is put side by side at the end.

A step is what is computed for one result and not for the one before. It belongs to a recurrence where it reads what the
step before computed, other parts of the same tensors as that, and the same weights, in the same ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn.planning import EMBEDDING, OPTIMIZER, Gradients, Graph, Node, storage_of
from djinn_patterns.recurrent.found import Recurrence
from djinn_patterns.recurrent.walks import MADE, SOFT, behind, plain

JOINS = frozenset({"cat", "stack"})
WRITES = frozenset({"copy_"})
_FEWEST_STEPS = 3
_MOST_OPS = 256  # in a step
_LONGEST = 4096  # steps that are looked at
_LARGER = OPTIMIZER | {
    "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "scaled_dot_product_attention", "softmax",
}  # fmt: skip


@attrs.frozen
class _Step:
    """One step.

    Attributes:
        nodes: ids of its ops. carried: sources in the step before. shared: other sources. parts: how views of those that are
            read were taken.
    """

    nodes: frozenset[int]
    carried: frozenset[int]
    shared: frozenset[int]
    parts: frozenset[tuple[object, ...]]
    operations: tuple[str, ...]


def loops(graph: Graph, joins: Iterable[Node], writes: Iterable[Node], gradients: Gradients) -> Iterator[Recurrence]:
    """The recurrences whose results `joins` puts side by side, or `writes` writes side by side."""
    for results, apart in (*_joined(graph, joins), *_written(graph, writes)):
        if results[0] not in gradients:
            found = _loop(graph, sorted(results), apart)
            if found is not None:
                yield found


def _joined(graph: Graph, joins: Iterable[Node]) -> Iterator[tuple[list[int], frozenset[int]]]:
    for node in joins:
        if len(node.inputs) >= _FEWEST_STEPS:
            results = list(dict.fromkeys(graph.flow.operands(node)))
            if len(results) >= _FEWEST_STEPS and _are_alike(graph, results[-_FEWEST_STEPS:]):
                yield [r for r in results if r >= 0], frozenset()


def _written(graph: Graph, writes: Iterable[Node]) -> Iterator[tuple[list[int], frozenset[int]]]:
    """Values that are written side by side, and the ops that write it."""
    by_storage: dict[int, list[Node]] = defaultdict(list)
    for node in writes:
        if len(node.inputs) > 1 and not graph.flow.looks[node.id]:
            by_storage[storage_of(node.inputs[0])].append(node)
    for writers in by_storage.values():
        results = [graph.flow.operands(n)[1] for n in writers]
        if len(results) >= _FEWEST_STEPS and _are_alike(graph, results[-_FEWEST_STEPS:]):
            yield [r for r in dict.fromkeys(results) if r >= 0], frozenset(n.id for n in writers)


def _are_alike(graph: Graph, results: Sequence[int]) -> bool:
    return all(r >= 0 for r in results) and len({graph.nodes[r].operation for r in results}) == 1


def _loop(graph: Graph, results: Sequence[int], apart: frozenset[int]) -> Recurrence | None:
    """The loop that gives `results`; none where it reads what `apart` wrote: that is a triangle of equations, solved."""
    results = results[:_LONGEST]
    if len(results) < _FEWEST_STEPS:
        return None
    begin = max(-1, 2 * results[0] - results[1])  # the first step is as long as the second
    floors = [begin, begin, *results]  # of the step before, and of this one
    steps: list[_Step] = []
    for before, floor, result in zip(floors, [begin, *results], results, strict=False):
        step = _step(graph, result, floor, before)
        if (
            step is None
            or step.carried & apart
            or _is_no_layer(step)
            or (len(steps) > 1 and not _follows(steps[-1], step))
        ):
            return None
        steps.append(step)
    nodes = frozenset().union(
        *(s.nodes for s in steps), *(behind(graph, s)[0] for s in steps[-1].shared if _is_soft(graph, s))
    )
    reason = (
        f"each of {len(steps)} steps up to node {results[-1]} reads what the one before computed, another part of what comes "
        f"in, and the same weights"
    )
    return Recurrence(nodes, "loop", "steps", len(steps), 0.95, reason)


def _is_no_layer(step: _Step) -> bool:
    """True if the step belongs to something larger: decoding with attention, or training."""
    return any(o in _LARGER or "_backward" in o for o in step.operations)


def _is_soft(graph: Graph, source: int) -> bool:
    return source >= 0 and plain(graph.nodes[source].operation) in SOFT


def _step(graph: Graph, result: int, floor: int, before: int) -> _Step | None:
    """Nodes computed for `result` after `floor`, the result of the step before, which begins after `before`."""
    flow, nodes = graph.flow, graph.nodes
    inside: set[int] = set()
    carried: set[int] = set()
    shared: set[int] = set()
    parts: set[tuple[object, ...]] = set()
    queue = [result]
    while queue:
        current = queue.pop()
        if current in inside:
            continue
        if current > floor and nodes[current].operation not in MADE:
            inside.add(current)
            if len(inside) > _MOST_OPS:
                return None
            for value, source in zip(nodes[current].inputs, flow.sources[current], strict=True):
                beyond = flow.beyond(source)
                queue.append(beyond)
                if source != beyond and beyond <= floor:
                    parts |= _taken(graph, value)
        elif current > before and current >= 0:
            carried.add(current)
        elif current < 0 or nodes[current].operation not in MADE:
            shared.add(current)
    operations = tuple(nodes[n].operation for n in sorted(inside))
    return _Step(frozenset(inside), frozenset(carried), frozenset(shared), frozenset(parts), operations)


def _taken(graph: Graph, value: int) -> set[tuple[object, ...]]:
    """Key of a view: its ops, their numbers, and the results taken."""
    taken: set[tuple[object, ...]] = set()
    node = graph.producer(value)
    while node is not None and graph.flow.looks[node.id] and value in node.outputs:
        taken.add((node.operation, node.slots, node.outputs.index(value)))
        value = node.inputs[0]
        node = graph.producer(value)
    return taken


def _follows(one: _Step, other: _Step) -> bool:
    """True if `other` is the step that follows `one`: the same ops at the next position."""
    if not other.carried & one.nodes or one.operations != other.operations or len(other.nodes) < 2:
        return False
    goes_on = one.parts != other.parts or any(o in EMBEDDING for o in other.operations)
    # Where the first step begins is a guess, so what the second shares may count as carried there.
    return one.shared <= other.shared <= one.shared | one.carried and goes_on
