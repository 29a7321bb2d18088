"""Features made of embedding look-ups alone, and which look-ups lead to them.

The walk goes forward from the look-ups and takes an op only where all that it reads is a feature, given, or made of dense
inputs, so it ends at the first attention, convolution or recurrence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from djinn.hooks import Graph, Node, arguments
from djinn.patterns import ACTIVATION, MATRIX_PRODUCT, NORMALISATION, is_given

LOOK_UPS = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding", "embedding_bag"})
PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul", "mm"})
_JOINS = frozenset({"cat", "concat", "concatenate", "hstack", "stack"})
_MADE = frozenset(
    {"arange", "empty", "full", "ones", "ones_like", "scalar_tensor", "tril_indices", "triu_indices", "zeros"}
)
_ON_IDS = frozenset({"add", "add_", "cat", "clamp", "fmod", "remainder", "rsub", "stack", "sub", "where"})
_SAMPLED = frozenset({"multinomial", "randint", "random_"})
ALLOWED = frozenset({
    *ACTIVATION, *MATRIX_PRODUCT, *NORMALISATION, *PRODUCTS, *_JOINS, "abs", "add", "addcmul", "clamp",
    "clamp_min", "div", "dropout", "exp", "index", "index_select", "linalg_vector_norm", "masked_fill", "max",
    "mean", "mul", "native_dropout", "_trilinear", "neg", "norm", "pow", "prelu", "rsqrt", "rsub", "sqrt", "square", "sub",
    "sum", "where",
})  # fmt: skip
_DENSE = ALLOWED | _MADE
_DENSE_STEPS = 24
_BATCHED = 2


@attrs.frozen
class Features:
    """The features of a graph.

    Attributes:
        look_ups: the ops that look rows up. leads: for each op that makes a feature, bits of the look-ups that lead to it.
        below: bits of look-ups whose rows lie one below the other, each of an id of its own.
    """

    look_ups: tuple[Node, ...]
    leads: Mapping[int, int]
    below: tuple[int, ...] = ()

    def of(self, source: int) -> int:
        """Bits of the look-ups that lead to a source; none where it is no feature."""
        return self.leads.get(source, 0)

    def are_below(self, bits: int) -> bool:
        """True if `bits` contains rows of several look-ups, or of ids of several fields of one look-up, that were stacked."""
        return any(below & bits == below for below in self.below)

    def are_many(self, source: int) -> bool:
        """True if more than one feature reaches a source."""
        bits = self.of(source)
        return bits.bit_count() > 1 or self.are_below(bits)


NOTHING = Features((), {})


def features(graph: Graph, candidates: Iterable[Node]) -> Features:
    """Features made of the ids that `candidates` look up."""
    look_ups = tuple(n for n in candidates if n.operation in LOOK_UPS and _is_of_ids(graph, n))
    if not look_ups:
        return NOTHING
    leads = {node.id: 1 << position for position, node in enumerate(look_ups)}
    dense: dict[int, bool] = {}
    queue = sorted({u for node in look_ups for u in graph.flow.users(node.id)})
    seen = {*leads, *queue}
    while queue:
        node = graph.nodes[heapq.heappop(queue)]
        bits = _bits(graph, node, leads, dense)
        if bits:
            leads[node.id] = bits
            for user in graph.flow.users(node.id):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(queue, user)
    return Features(look_ups, leads, tuple(set(_columns(graph, look_ups, leads))))


def _columns(graph: Graph, look_ups: Iterable[Node], leads: Mapping[int, int]) -> Iterator[int]:
    """Bits of look-ups whose rows are put one below the other."""
    for node in (graph.nodes[n] for n in leads if graph.nodes[n].operation in {"cat", "stack"}):
        rank = len(graph.meta(node.outputs[0]).shape)
        below = rank > _BATCHED and arguments(node).get("dim", 0) % rank not in {0, rank - 1}
        if below and len({leads.get(s, 0) for s in graph.flow.operands(node)} - {0}) > 1:
            yield leads[node.id]
    for node in look_ups:
        maker = graph.flow.node(graph.flow.operands(node)[1])
        shifted = maker is not None and maker.operation == "add" and len(maker.inputs) > 1
        if shifted and len(graph.meta(node.inputs[1]).shape) == _BATCHED:  # each field has rows of its own
            yield leads[node.id]


def _bits(graph: Graph, node: Node, leads: Mapping[int, int], dense: dict[int, bool]) -> int:
    if node.operation.removesuffix("_") not in ALLOWED:
        return 0
    bits = 0
    for source in graph.flow.operands(node):
        known = leads.get(source)
        if known is not None:
            bits |= known
        elif source >= 0 and not _is_dense(graph, source, dense):
            return 0
    return bits


def _is_dense(graph: Graph, source: int, known: dict[int, bool]) -> bool:
    """True if a source is computed from inputs alone, by layers and activations."""
    passed: set[int] = set()
    todo = [source]
    while todo:
        current = todo.pop()
        if current < 0 or current in passed or known.get(current):
            continue
        node = graph.nodes[current]
        if known.get(current) is False or len(passed) >= _DENSE_STEPS or node.operation.removesuffix("_") not in _DENSE:
            known[source] = False
            return False
        passed.add(current)
        todo += graph.flow.operands(node)
    known.update(dict.fromkeys(passed, True))
    return True


def _is_of_ids(graph: Graph, node: Node) -> bool:
    """True if a node looks up input ids in a given table, rather than positions that the program counts."""
    flow = graph.flow
    operands: Sequence[int] = flow.operands(node)
    if len(operands) < 2 or not is_given(flow, operands[0]):
        return False
    source = operands[1]
    while source >= 0:
        maker = graph.nodes[source]
        if maker.operation in _SAMPLED:  # negatives
            return True
        if maker.operation not in _ON_IDS:
            return False
        outside = [s for s in flow.operands(maker) if s < 0]
        source = outside[0] if outside else next(iter(flow.operands(maker)), 0)
    return True
