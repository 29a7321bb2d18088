"""The patterns `embedding` and `output_head`: where tokens become vectors, and vectors scores of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.dataflow import FUSED_ATTENTION
from djinn.hooks import Graph, Node, PatternMatch
from djinn.patterns import MATRIX_PRODUCT, Layer, is_backward, layer_at

_LOOKUPS = frozenset({"embedding"})
_PRODUCTS = MATRIX_PRODUCT | FUSED_ATTENTION | {"einsum"}
_SMALLEST = 16  # rows of a table of tokens


class Embedding:
    """A look-up of rows of a table."""

    name = "embedding"
    tolerates_growth = True
    operations = _LOOKUPS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each look-up."""
        for node in candidates:
            table = graph.meta(node.inputs[0]).shape
            if len(table) == 2:
                reason = f"node {node.id} looks rows of {table[1]} numbers up among {table[0]}"
                details = {"rows": table[0], "width": table[1]}
                yield PatternMatch(self.name, (node.id,), 1.0, reason, details=details)


class OutputHead:
    """A linear layer that gives a score for each row of a table that the program looks rows up in.

    Nothing but the choice of a token, or a loss, comes after it: no other layer.
    """

    name = "output_head"
    tolerates_growth = True
    operations = frozenset({"addmm", "linear", "matmul", "mm"})

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each head."""
        tables = _tables(graph)
        if not tables:
            return
        for node in candidates:
            layer = layer_at(graph, node)
            if layer is not None and (rows := _scores(graph, layer)) in tables and _ends(graph, node):
                tied = graph.flow.beyond(layer.weight) in tables[rows]
                yield _match(node, rows, tied=tied)


def _match(node: Node, rows: int, *, tied: bool) -> PatternMatch:
    how = "with the table itself" if tied else "with a weight of its own"
    return PatternMatch(
        pattern=OutputHead.name,
        nodes=(node.id,),
        confidence=1.0 if tied else 0.95,
        reason=f"node {node.id} scores each of the {rows} rows of the table of tokens, {how}",
        details={"vocabulary": rows, "tied": tied},
    )


def _tables(graph: Graph) -> dict[int, set[int]]:
    """The tables that rows are looked up in, as sources, by their number of rows."""
    tables: dict[int, set[int]] = {}
    for node in (graph.nodes[i] for o in _LOOKUPS for i in graph.by_op.get(o, ())):
        rows = graph.meta(node.inputs[0]).shape[0]
        if rows >= _SMALLEST:
            tables.setdefault(rows, set()).add(graph.flow.operands(node)[0])
    return tables


def _scores(graph: Graph, layer: Layer) -> int:
    return graph.meta(graph.flow.value(layer.node.id)).shape[-1]


def _ends(graph: Graph, node: Node) -> bool:
    """Whether no product follows; a backward pass goes on with gradients, which are no results of this."""
    if _is_gradient(graph, node.id):
        return False
    following = graph.flow.descendants(node.id, _PRODUCTS, limit=64)
    return not any(graph.nodes[i].operation in _PRODUCTS and not _is_gradient(graph, i) for i in following)


def _is_gradient(graph: Graph, index: int) -> bool:
    """Whether it belongs to a backward pass: a derivative is among what leads to it, or the one that such a pass begins with."""
    makers = (graph.nodes[s] for s in graph.flow.ancestors(index, limit=32) if s >= 0)
    return any(is_backward(node) or node.operation == "ones_like" for node in makers)
