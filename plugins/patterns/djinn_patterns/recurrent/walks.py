"""Ways through the ops between layers: what goes into a number."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from djinn.planning import CONVOLUTION, MATRIX_PRODUCT, NORMALISATION, Graph

LAYERS = MATRIX_PRODUCT | CONVOLUTION | {"_convolution_mode", "einsum"}
MADE = frozenset({
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "scalar_tensor", "tril_indices", "zeros", "zeros_like", "zero_",
})  # fmt: skip
BLANK = frozenset({"new_zeros", "zeros", "zeros_like", "zero_", "new_full", "full", "full_like"})
# What a gate, a decay or a state may go through between one layer and the next.
SOFT = frozenset({
    *NORMALISATION, "abs", "add", "addcmul", "cat", "clamp", "clamp_min", "constant_pad_nd", "cumsum", "div", "elu", "exp",
    "exp2", "expm1", "flip", "hardsigmoid", "hardtanh", "index", "lerp", "log", "log1p", "log_sigmoid",
    "log_sigmoid_forward", "logaddexp", "logcumsumexp", "masked_fill", "max", "maximum", "mean", "minimum", "mul", "neg",
    "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "silu", "softplus", "sqrt", "sub", "sum", "tanh", "tril",
    "where",
})  # fmt: skip


def plain(operation: str) -> str:
    """The name of an op without what says that it works in place."""
    return operation.removesuffix("_")


def behind(
    graph: Graph, start: int, stop: Container[int] = (), state: int | None = None, limit: int = 48
) -> tuple[set[int], set[int]]:
    """The ops that `start` is computed by, back to layers, to what is in `stop` and to `state`, and what lies behind them.

    Returns:
        ids of the soft ops, `start` among them; and sources: inputs, layers and other ops where the walk ended, and the
        inputs of those layers that are no results: their weights.
    """
    flow, nodes = graph.flow, graph.nodes
    inside: set[int] = set()
    leaves: set[int] = set()
    queue = deque([start])
    while queue:
        source = queue.popleft()
        if source in inside or source in leaves:
            continue
        if source < 0 or source == state or (source in stop and source != start) or len(inside) >= limit:
            leaves.add(source)
            continue
        operation = plain(nodes[source].operation)
        if operation in SOFT or source == start:
            inside.add(source)
            queue.extend(flow.operands(nodes[source]))
        elif operation not in MADE:
            leaves.add(source)
            if operation in LAYERS:
                leaves.update(s for s in flow.operands(nodes[source]) if s < 0)
    return inside, leaves
