"""The pattern `embedding`: where tokens or ids become vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import Graph, Node, PatternMatch


class Embedding(Pattern):
    """A look-up of rows of a table."""

    name = "embedding"
    tolerates_growth = True
    operations = frozenset({"embedding"})

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return a match for each look-up. The hint `tables` names the look-up and its table."""
        for node in candidates:
            table = graph.meta(node.inputs[0]).shape
            if len(table) == 2:
                reason = f"node {node.id} ({node.op}) takes rows of a table of {table[0]} rows, {table[1]} numbers each"
                yield PatternMatch(
                    self.name,
                    (node.id,),
                    1.0,
                    reason,
                    hints={"tables": (node.inputs[0],)},
                    details={"rows": table[0], "width": table[1]},
                )
