"""Recurrences that are one op: PyTorch's layers and cells."""

from __future__ import annotations

from djinn.planning import Graph, Node, arguments
from djinn_patterns.recurrent.found import Recurrence

_LAYERS = {
    "lstm": "lstm", "gru": "gru", "rnn_relu": "rnn", "rnn_tanh": "rnn", "_cudnn_rnn": "rnn", "miopen_rnn": "rnn",
    "_lstm_mps": "lstm", "mkldnn_rnn_layer": "rnn",
}  # fmt: skip
_CELLS = {
    "lstm_cell": "lstm", "gru_cell": "gru", "rnn_relu_cell": "rnn", "rnn_tanh_cell": "rnn",
    "_thnn_fused_lstm_cell": "lstm", "_thnn_fused_gru_cell": "gru",
}  # fmt: skip
_ONE_STEP: int | None = 1
FUSED = frozenset({*_LAYERS, *_CELLS})


def fused(graph: Graph, node: Node) -> Recurrence:
    """The recurrence that the op `node` is."""
    given = arguments(node)
    if node.operation in _CELLS:
        kind, length = _CELLS[node.operation], _ONE_STEP
    else:
        kind, length = _LAYERS[node.operation], _length(graph, node, given.get("batch_first") is True)
    layers = given.get("num_layers", 1)
    return Recurrence(
        nodes=frozenset({node.id}),
        kind=kind,
        form="op",
        steps=length,
        confidence=1.0,
        reason=f"node {node.id} is {node.op}",
        layers=layers if isinstance(layers, int) else 1,
        bidirectional=given.get("bidirectional") is True,
    )


def _length(graph: Graph, node: Node, batch_first: bool) -> int | None:
    """Number of positions that the op goes through; packed sequences do not say so in their shape."""
    shape = graph.meta(node.inputs[0]).shape
    if len(shape) == 3:
        return shape[1 if batch_first else 0]
    return None
