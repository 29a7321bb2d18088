"""The patterns `embedding` and `output_head`: where tokens become vectors, and vectors scores of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import (
    ACTIVATION,
    FUSED_ATTENTION,
    MATRIX_PRODUCT,
    NORMALISATION,
    Graph,
    Node,
    PatternMatch,
    is_backward,
)
from djinn_core.planning.matching.layers import Layer
from djinn_patterns.transformer.layers import PRODUCTS, Layers, layers_of

_LOOKUPS = frozenset({"embedding"})
_GOES_ON = MATRIX_PRODUCT | FUSED_ATTENTION | NORMALISATION | {"einsum"}
_CHOICES = frozenset({"argmax", "embedding", "multinomial", "sort", "topk"})  # the next step of a loop begins there
_BENDS = ACTIVATION - {"sigmoid"}  # scores may become probabilities one by one, and are bent by nothing else
_DIFFERENCES = frozenset({"add", "add_", "rsub", "sub"})
_SQUARES = frozenset({"pow", "square"})
_SMALLEST = 16  # rows of a table of tokens
_MANY = 4  # scores for each number of what they are made of
_REACH = 64  # ops that are looked at after a head


class Embedding(Pattern):
    """A look-up of rows of a table."""

    name = "embedding"
    tolerates_growth = True
    operations = _LOOKUPS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each look-up."""
        for node in candidates:
            table = graph.meta(node.inputs[0]).shape
            if len(table) == 2:
                reason = f"node {node.id} ({node.op}) takes rows of a table of {table[0]} rows, {table[1]} numbers each"
                details = {"rows": table[0], "width": table[1]}
                yield PatternMatch(self.name, (node.id,), 1.0, reason, details=details)


class OutputHead(Pattern):
    """A linear layer that gives a score for each row of a table that the program looks rows up in.

    Nothing but the choice of a token, or a loss, comes after it: no other layer, no norm, no activation.
    """

    name = "output_head"
    tolerates_growth = True
    operations = PRODUCTS

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each head."""
        tables = _tables(graph)
        if not tables:
            return
        layers = layers_of(graph)
        multiplied: set[int] = set()  # weights that a layer before has used
        for node in candidates:
            layer = layers.products.get(node.id)
            if layer is None:
                continue
            weight = graph.flow.beyond(layer.weight)
            again = weight in multiplied
            multiplied.add(weight)
            rows = _rows(tables, graph.meta(graph.flow.value(node.id)).shape[-1], _width(graph, layer))
            if rows in tables and not _is_gradient(graph, layers, node, again=again) and _ends(graph, layers, layer):
                yield _match(layer, rows, tied=weight in tables[rows])


def _match(layer: Layer, rows: int, *, tied: bool) -> PatternMatch:
    how = "with that table as its weight" if tied else "with a weight of its own"
    return PatternMatch(
        pattern=OutputHead.name,
        nodes=(layer.product.id,),
        confidence=1.0 if tied else 0.96,
        reason=f"node {layer.product.id} gives a score for each of the {rows} rows of the table that tokens are looked up in, "
        f"{how}, and no layer comes after it",
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


def _rows(tables: dict[int, set[int]], scores: int, width: int) -> int:
    """Rows of the table that has one for each score, or one more: a token that only begins a sequence is never written.

    Tables of positions have often one row more than some layer is wide, so the latter counts for many scores only.
    """
    many = scores > _MANY * width
    return scores + 1 if many and scores not in tables and scores + 1 in tables else scores


def _width(graph: Graph, layer: Layer) -> int:
    return graph.meta(graph.flow.value(layer.data)).shape[-1]


def _ends(graph: Graph, layers: Layers, layer: Layer) -> bool:
    """True if no layer, norm or activation follows the layer. A backward pass does not count: it continues with gradients."""
    end = _end(graph, layer)
    if any(graph.nodes[i].operation in _BENDS for i in graph.flow.users(end)):
        return False
    if _measures(graph, end):
        return False
    following = graph.flow.descendants(end, _GOES_ON | _CHOICES, limit=_REACH)
    return not any(graph.nodes[i].operation in _GOES_ON and not _comes_back(graph, layers, i) for i in following)


def _measures(graph: Graph, end: int) -> bool:
    """True if squares are added to the result, or the result is subtracted from them: distances to the rows of a codebook."""
    flow = graph.flow
    users = [(user, end) for user in flow.users(end)]
    users += [(after, user) for user, _ in users if len(graph.nodes[user].inputs) == 1 for after in flow.users(user)]
    for user, source in users:
        if graph.nodes[user].operation in _DIFFERENCES:
            others = [s for s in flow.operands(graph.nodes[user]) if s != source]
            makers = (i for other in others for i in flow.ancestors(other, limit=4) if i >= 0)
            if any(graph.nodes[i].operation in _SQUARES for i in makers):
                return True
    return False


def _end(graph: Graph, layer: Layer) -> int:
    """The op that gives the result: the product, or the addition of a bias after it."""
    users = graph.flow.users(layer.product.id)
    return users[0] if len(users) == 1 and users[0] in layers_of(graph).whole else layer.product.id


def _is_gradient(graph: Graph, layers: Layers, node: Node, *, again: bool) -> bool:
    """True if a node belongs to a backward pass: it follows a derivative, or multiplies with a weight once more."""
    return node.id > layers.backward and (again or _comes_back(graph, layers, node.id))


def _comes_back(graph: Graph, layers: Layers, index: int) -> bool:
    """True if the node depends on a derivative, or on the initial gradient of a backward pass."""
    if index < layers.backward:
        return False
    makers = (graph.nodes[s] for s in graph.flow.ancestors(index, limit=32) if s >= 0)
    return any(is_backward(node) or node.operation == "ones_like" for node in makers)
