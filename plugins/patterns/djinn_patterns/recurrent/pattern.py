"""The pattern `recurrent`: a state that goes from position to position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn.hooks import Pattern
from djinn.planning import Gradients, Graph, Node, PatternMatch
from djinn_patterns.recurrent.found import Recurrence
from djinn_patterns.recurrent.fused import FUSED, fused
from djinn_patterns.recurrent.loops import JOINS, WRITES, loops
from djinn_patterns.recurrent.scans import BACK, SUMS, scans
from djinn_patterns.recurrent.steps import Steps
from djinn_patterns.recurrent.updates import BENDS, GATES, bent, kept


class Recurrent(Pattern):
    """A layer in which a state goes from position to position, however it is written."""

    name = "recurrent"
    tolerates_growth = True
    operations = FUSED | GATES | BENDS | SUMS | BACK | JOINS | WRITES

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each recurrence; for each direction and layer where it is taken apart."""
        for recurrence in _joined(list(_found(graph, candidates))):
            yield _match(recurrence)


def _found(graph: Graph, candidates: Sequence[Node]) -> Iterator[Recurrence]:
    by: dict[str, list[Node]] = {}
    for node in candidates:
        by.setdefault(node.operation, []).append(node)
    for node in _of(by, FUSED):
        yield fused(graph, node)
    gradients = graph.flow.shared(Gradients)
    updates = [*kept(graph, _of(by, GATES)), *bent(graph, _of(by, BENDS))]
    if updates:
        yield from Steps(graph, updates, gradients).recurrences()
    yield from loops(graph, _of(by, JOINS), _of(by, WRITES), gradients)
    yield from scans(graph, _of(by, SUMS), _of(by, BACK), gradients)


def _of(by: dict[str, list[Node]], operations: frozenset[str]) -> list[Node]:
    return [n for operation in by if operation in operations for n in by[operation]]


def _joined(found: Sequence[Recurrence]) -> list[Recurrence]:
    """Merge findings that share ops; a loop adds nothing where it is known what happens in it."""
    known = frozenset().union(*(r.nodes for r in found if r.kind != "loop"))
    groups: dict[int, list[Recurrence]] = {}
    of: dict[int, int] = {}  # by node: its group
    for number, recurrence in enumerate(found):
        if recurrence.kind == "loop" and not recurrence.nodes.isdisjoint(known):
            continue
        members = [recurrence]
        for other in {of[n] for n in recurrence.nodes if n in of}:
            members += groups.pop(other)
        groups[number] = members
        of.update((n, number) for r in members for n in r.nodes)
    return sorted(map(_one, groups.values()), key=lambda r: min(r.nodes))


def _one(members: Sequence[Recurrence]) -> Recurrence:
    best = max(members, key=lambda r: (r.confidence, r.steps or 0))
    return attrs.evolve(best, nodes=frozenset().union(*(r.nodes for r in members)))


def _match(recurrence: Recurrence) -> PatternMatch:
    nodes = tuple(sorted(recurrence.nodes))
    serial = recurrence.form != "scan"
    return PatternMatch(
        pattern=Recurrent.name,
        nodes=nodes,
        confidence=recurrence.confidence,
        reason=recurrence.reason,
        hints={"cut": ("batch", "layers") if serial else ("batch", "heads", "layers")},
        details={
            "kind": recurrence.kind,
            "form": recurrence.form,
            "steps": recurrence.steps,
            "layers": recurrence.layers,
            "bidirectional": recurrence.bidirectional,
        },
    )
