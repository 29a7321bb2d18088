"""The pattern `id_tables`: tables whose rows are put together and go into a network, as in a recommender."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import Graph, Node, PatternMatch
from djinn_patterns.recommender.features import LOOK_UPS, Features, features

_JOINS = frozenset({"cat", "stack"})
_FEWEST = 2
_ROWS = 2  # dimensions of what is looked up: samples and numbers


class IdTables(Pattern):
    """Several tables of ids whose rows are put side by side."""

    name = "id_tables"
    tolerates_growth = True
    operations = LOOK_UPS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """At most one match: all tables whose rows are put side by side."""
        if len(candidates) < _FEWEST:
            return
        found = features(graph, candidates)
        joined = _joined(graph, found)
        tables = [n for position, n in enumerate(found.look_ups) if joined >> position & 1]
        weights = tuple(dict.fromkeys(n.inputs[0] for n in tables))
        if len(weights) < _FEWEST:
            return
        rows = sum(graph.meta(w).shape[0] for w in weights)
        size = sum(graph.meta(w).nbytes for w in weights)
        yield PatternMatch(
            pattern=self.name,
            nodes=tuple(n.id for n in tables),
            confidence=0.95,
            reason=f"rows of {len(weights)} tables, of {rows} rows in all, are put side by side",
            # Whole tables may lie apart, as may the rows of one: a look-up sends ids there and rows back.
            hints={"spread": weights, "split_rows": weights},
            details={"tables": len(weights), "rows": rows, "bytes": size, "look_ups": tuple(n.id for n in tables)},
        )


def _joined(graph: Graph, found: Features) -> int:
    """Bits of the look-ups that are put side by side with others: one row of each for each sample, and not for each word."""
    bits = 0
    for node, leads in found.leads.items():
        if graph.nodes[node].operation in _JOINS and len(graph.meta(graph.nodes[node].inputs[-1]).shape) == _ROWS:
            parts = {found.of(s) for s in graph.flow.operands(graph.nodes[node])} - {0}
            bits |= leads if len(parts) > 1 else 0
    return bits
