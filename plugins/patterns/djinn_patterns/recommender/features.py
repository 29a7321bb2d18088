"""Features made of embedding look-ups alone, and which look-ups lead to them.

The walk goes forward from the look-ups and takes an op only where all that it reads is a feature, given, or made of dense
inputs, so it ends at the first attention, convolution or recurrence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from djinn.planning import ACTIVATION, MATRIX_PRODUCT, NORMALISATION, Graph, Node, arguments, is_given

LOOK_UPS = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding", "embedding_bag"})
ATTENTION = frozenset({
    "_safe_softmax", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_softmax",
    "scaled_dot_product_attention", "softmax",
})  # fmt: skip
_BAGS = LOOK_UPS - {"embedding"}
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
    below = set(_shifted(graph, look_ups, leads))
    dense: dict[int, bool] = {}
    queue = sorted({u for node in look_ups for u in graph.flow.users(node.id)})
    seen = {*leads, *queue}
    while queue:
        node = graph.nodes[heapq.heappop(queue)]
        bits = _bits(graph, node, leads, dense, below)
        if bits:
            leads[node.id] = bits
            if node.operation in {"cat", "stack"} and _are_columns(graph, node, leads):
                below.add(bits)
            for user in graph.flow.users(node.id):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(queue, user)
    return Features(look_ups, leads, tuple(below))


def _are_columns(graph: Graph, node: Node, leads: Mapping[int, int]) -> bool:
    """True if rows of several look-ups, or of many bags of one, are put one below the other."""
    rank = len(graph.meta(node.outputs[0]).shape)
    axis = arguments(node).get("dim", 0) % max(rank, 1)
    if rank <= _BATCHED or axis in {0, rank - 1}:
        return False
    sources = graph.flow.operands(node)
    if len({leads.get(s, 0) for s in sources} - {0}) > 1:
        return True
    bags = [v for v, s in zip(node.inputs, sources, strict=True) if s >= 0 and graph.nodes[s].operation in _BAGS]
    return any(graph.meta(v).shape[axis] > 1 for v in bags)


def _shifted(graph: Graph, look_ups: Iterable[Node], leads: Mapping[int, int]) -> Iterator[int]:
    """Bits of look-ups in one table in which each field has rows of its own."""
    for node in look_ups:
        maker = graph.flow.node(graph.flow.operands(node)[1])
        shifted = maker is not None and maker.operation == "add" and len(maker.inputs) > 1
        if shifted and len(graph.meta(node.inputs[1]).shape) == _BATCHED:
            yield leads[node.id]


def _bits(graph: Graph, node: Node, leads: Mapping[int, int], dense: dict[int, bool], below: set[int]) -> int:
    attends = node.operation in ATTENTION
    if not attends and node.operation.removesuffix("_") not in ALLOWED:
        return 0
    bits = 0
    for source in graph.flow.operands(node):
        known = leads.get(source)
        if known is not None:
            bits |= known
        elif source >= 0 and not _is_dense(graph, source, dense):
            return 0
    return 0 if attends and not any(b & bits == b for b in below) else bits  # of fields; words attend, too


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
