"""Workspace: temporary bytes that an op allocates on its device, without operands and results.

The rules by op family match the allocations of single-threaded CPU kernels (`tests/planning/test_workspace.py`).
Kernels of other devices are unknown: sorts are assumed to use a second buffer for keys and indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from djinn_core.ir.arguments import arguments
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import CONVOLUTION, FUSED_ATTENTION, NORMALISATION, SOFTMAX
from djinn_core.ir.values import TensorMeta

_CHANNELS = 16  # block size of oneDNN weights
_KEYS = 512  # of a block of attention; the query block depends on the number of queries
_QUERIES = ((768, 256), (192, 64), (0, 32))
_INDEX = 8


def workspace_of(graph: Graph, node: Node) -> int:
    """Return the workspace of `node` in bytes, without negligible amounts; 0 for ops without a rule."""
    rule = _RULES.get(node.operation)
    return rule(graph, node) if rule is not None and node.inputs else 0


def _convolution(graph: Graph, node: Node) -> int:
    """Return the bytes of the copies that a convolution makes of its operands, in the layout of its kernel.

    A transposed convolution copies its result as well.
    """
    copies = _operand_bytes(graph, node)
    if not (arguments(node).get("transposed") or "transpose" in node.operation):
        return copies
    return max(copies, 2 * _result_bytes(graph, node))


def _convolution_backward(graph: Graph, node: Node) -> int:
    """Return the bytes of copied operands, and of the weight's gradient.

    The gradient's channels are padded to a multiple of `_CHANNELS`, in each group.
    """
    copies = _operand_bytes(graph, node)
    if len(node.inputs) < 3:
        return copies
    _, data, weight = (graph.meta(v) for v in node.inputs[:3])
    groups = data.shape[1] // max(1, weight.shape[1])
    group_channels = (weight.shape[0] // max(1, groups), weight.shape[1])
    blocks = math.prod(-(-channels // _CHANNELS) * _CHANNELS for channels in group_channels)
    return copies + groups * blocks * math.prod(weight.shape[2:]) * weight.dtype.itemsize


def _copies_of_gaps(graph: Graph, node: Node) -> int:
    """Return the bytes of a copy of each operand that is not contiguous."""
    return sum(graph.meta(v).nbytes for v in node.inputs if not _is_contiguous(graph.meta(v)))


def _batch_norm_backward(graph: Graph, node: Node) -> int:
    return graph.meta(node.inputs[0]).nbytes + _copies_of_gaps(graph, node)


def _sort(graph: Graph, node: Node) -> int:
    """Return the bytes of a second buffer for the keys and their indices."""
    meta = graph.meta(node.inputs[0])
    return meta.numel * (meta.dtype.itemsize + _INDEX)


def _index(graph: Graph, node: Node) -> int:
    """Return the bytes of the indices into which masks are converted, as if they select all elements.

    An element has one index per dimension of its mask.
    """
    masks = [meta for meta in map(graph.meta, node.inputs[1:]) if meta.dtype in (torch.bool, torch.uint8)]
    return sum(_INDEX * len(mask.shape) * mask.numel for mask in masks)


def _matmul(graph: Graph, node: Node) -> int:
    """Return the bytes of operands that a matrix product copies.

    Broadcast operands and permuted heads are copied, because they cannot be viewed as a batch of matrices.
    """
    left, right = (graph.meta(v) for v in node.inputs[:2])
    if min(len(left.shape), len(right.shape)) < 3:
        return 0
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return sum(
        math.prod(batch) * math.prod(meta.shape[-2:]) * meta.dtype.itemsize
        for meta in (left, right)
        if not _is_one_batch(meta, batch)
    )


def _is_one_batch(meta: TensorMeta, batch: tuple[int, ...]) -> bool:
    rank = len(meta.shape) - 2
    sizes, strides = (1,) * (len(batch) - rank) + meta.shape[:rank], (0,) * (len(batch) - rank) + meta.stride[:rank]
    steps = [
        (size, stride if own_size == size else 0)
        for size, own_size, stride in zip(batch, sizes, strides, strict=True)
        if size > 1
    ]
    return all(outer == inner * size for (_, outer), (size, inner) in itertools.pairwise(steps))


def _attention(graph: Graph, node: Node) -> int:
    """Return the bytes of one block of scores, and of boolean masks converted to the query's dtype.

    An op with dropout needs three full score matrices.
    """
    query, key = (graph.meta(v) for v in node.inputs[:2])
    if node.operation == "scaled_dot_product_attention" and arguments(node).get("dropout_p"):
        return 3 * math.prod(query.shape[:-1]) * key.shape[-2] * query.dtype.itemsize
    masks = [meta for meta in map(graph.meta, node.inputs[3:4]) if meta.dtype == torch.bool]
    return _attention_block(query.shape, key.shape) + sum(mask.numel * query.dtype.itemsize for mask in masks)


def _attention_backward(graph: Graph, node: Node) -> int:
    """Return the bytes of two blocks of scores, and of a copy of the queries' gradient."""
    query, key = (graph.meta(v) for v in node.inputs[1:3])
    return query.nbytes + 2 * _attention_block(query.shape, key.shape)


def _attention_block(query: tuple[int, ...], key: tuple[int, ...]) -> int:
    max_rows = next(rows for least, rows in _QUERIES if query[-2] >= least)
    return min(query[-2], max_rows) * (min(key[-2], _KEYS) + query[-1] + 2) * torch.float32.itemsize


def _recurrent(graph: Graph, node: Node) -> int:
    """Return the bytes of the gate inputs for all steps of a layer, and of its states, in each direction."""
    shapes = [graph.meta(v).shape for v in node.inputs]
    matrices = [shape for shape in shapes[1:] if len(shape) == 2]
    if not matrices or len(shapes[1]) != 3:
        return 0
    directions = 2 if arguments(node).get("bidirectional") else 1
    rows = math.prod(shapes[0][:-1])
    return directions * rows * (matrices[0][0] + 3 * shapes[1][-1]) * graph.meta(node.inputs[0]).dtype.itemsize


def _operand_bytes(graph: Graph, node: Node) -> int:
    return sum(graph.meta(v).nbytes for v in dict.fromkeys(node.inputs))


def _result_bytes(graph: Graph, node: Node) -> int:
    return sum(graph.meta(v).nbytes for v in node.outputs)


def _is_contiguous(meta: TensorMeta) -> bool:
    expected_stride = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1 and stride != expected_stride:
            return False
        expected_stride *= size
    return True


_RULES: dict[str, Callable[[Graph, Node], int]] = {
    **dict.fromkeys(CONVOLUTION, _convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys((*NORMALISATION, *SOFTMAX, "_log_softmax"), _copies_of_gaps),
    **dict.fromkeys(("native_group_norm_backward", "native_layer_norm_backward"), _copies_of_gaps),
    "native_batch_norm_backward": _batch_norm_backward,
    **dict.fromkeys(
        ("_linalg_svd", "linalg_inv_ex", "logsumexp"), lambda graph, node: graph.meta(node.inputs[0]).nbytes
    ),
    **dict.fromkeys(("argsort", "kthvalue", "msort", "sort"), _sort),
    **dict.fromkeys(("_unique2", "unique_dim"), lambda graph, node: 3 * _INDEX * graph.meta(node.inputs[0]).numel),
    "index": _index,
    "matmul": _matmul,
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **{f"{name}_backward": _attention_backward for name in FUSED_ATTENTION},
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh"), _recurrent),
}
