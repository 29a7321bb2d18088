"""Device-independent work of an op: its kind, its size, its arithmetic and the memory that it moves.

Results are memoised by form, metadata of operands and results, and scalars. A program of 1,000 ops costs as much as its
few dozen distinct ops.

In evaluation, `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call kernels for a whole layer, which PyTorch's
counter does not know. The work of such a kernel is the sum of the ops that it fuses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final, Literal

import attrs
import torch

from djinn_core.ir.arguments import arguments
from djinn_core.ir.flow import is_view
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import FUSED_ATTENTION, SOFTMAX
from djinn_core.ir.operators import allowed_operators, resolve
from djinn_core.ir.values import TensorMeta
from djinn_core.planning.builtins.flops import RECURRENT, flops_of
from djinn_core.planning.builtins.memory_traffic import traffic_of
from djinn_core.planning.builtins.workspace import workspace_of

Part = tuple[str, Any, tuple[int, ...]]  # operation, kind and dimensions, as in `Work`


def parts_of(graph: Graph, node: Node) -> tuple[Part, ...]:
    """Return the steps of a fused kernel for a whole layer; empty for all other kernels."""
    parts = _PARTS.get(node.operation)
    return parts(graph, node) if parts is not None else ()


def _attention(rows: int, length: int, width: int, heads: int) -> tuple[Part, ...]:
    """Return the steps of an attention over `rows` sequences of `length` positions, in order."""
    positions, head_width = rows * length, width // heads
    scores = (rows * heads, length, length)
    return (
        ("linear", "product", (1, positions, 3 * width, width)),
        ("add", "pointwise", (3 * positions * width,)),  # biases, and heads side by side
        ("bmm", "product", (*scores, head_width)),
        ("_softmax", "softmax", (math.prod(scores),)),
        ("bmm", "product", (rows * heads, length, head_width, length)),
        ("clone", "copy", (positions * width,)),
        ("linear", "product", (1, positions, width, width)),
    )


def _multi_head_attention(graph: Graph, node: Node) -> tuple[Part, ...]:
    options = arguments(node)
    rows, length, width = graph.meta(options["query"]).shape
    return _attention(rows, length, width, options["num_head"])


def _encoder_layer(graph: Graph, node: Node) -> tuple[Part, ...]:
    options = arguments(node)
    shape = graph.meta(options["src"]).shape
    if len(shape) != 3:
        return ()
    rows, length, width = shape
    hidden = graph.meta(options["ffn_weight_1"]).shape[0]
    positions = rows * length
    size = (positions * width,)
    add_and_norm: tuple[Part, ...] = (("add", "pointwise", size), ("native_layer_norm", "normalisation", size))
    activation = "gelu" if options["use_gelu"] else "relu"
    return (
        *_attention(rows, length, width, options["num_heads"]),
        *add_and_norm,
        ("linear", "product", (1, positions, hidden, width)),
        (activation, "pointwise", (positions * hidden,)),
        ("linear", "product", (1, positions, width, hidden)),
        *add_and_norm,
    )


_PARTS: Final[dict[str, Callable[[Graph, Node], tuple[Part, ...]]]] = {
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}


Kind = Literal[
    "view", "product", "convolution", "attention", "recurrent", "pointwise", "reduction", "normalisation", "softmax", "look_up", "copy",
    "pooling", "sort", "scan", "random", "other",
]  # fmt: skip


Layout = Literal["contiguous", "permuted", "transposed"]


@attrs.frozen(eq=False)
class Work:
    """Work of one op, independent of the device.

    Attributes:
        operation: the op without namespace and overload.
        kind: family of the op.
        flops: as PyTorch's counter counts them.
        operations: arithmetic operations that the kernel executes, including elementwise ops and reductions.
        bytes_read: bytes read from memory.
        bytes_written: bytes written to memory.
        dims: (batch, rows, columns, contracted) for matrix products, and for convolutions, attention and recurrent
            layers, which are regarded as matrix products. Other ops have (elements,): the size of the largest operand
            or of the results.
        dtype: dtype of the result.
        kernel: positions that a convolution's kernel covers.
        tensors: number of results; large for ops on lists.
        layout: the worst layout of an operand: `contiguous`, `permuted` if its last dimension has stride 1, otherwise
            `transposed`.
        parts: the steps of a fused kernel for a whole layer, each as a `Work` without memory.
        workspace: temporary bytes during the op, without operands and results.
    """

    operation: str
    kind: Kind
    flops: float
    operations: float
    bytes_read: int
    bytes_written: int
    dims: tuple[int, ...]
    dtype: torch.dtype
    tensors: int = 1
    kernel: int = 1
    layout: Layout = "contiguous"
    parts: tuple[Work, ...] = ()
    workspace: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


_LIMIT = 65536
_work_cache: dict[tuple[object, ...], tuple[object, Work]] = {}


def work_of(graph: Graph, node: Node) -> Work:
    """Return the work of `node`."""
    metas = [graph.meta(v) for v in (*node.inputs, *node.outputs)]
    aliased = is_view(node)
    # The cache keys forms by identity, which is fast. The cache entry keeps the form alive.
    key = (node.op, id(node.form), aliased, node.slots, *metas)
    entry = _work_cache.get(key)
    if entry is not None:
        return entry[1]
    work = _view_work(graph, node) if aliased else _compute_work(graph, node)
    if len(_work_cache) >= _LIMIT:
        _work_cache.clear()
    _work_cache[key] = (node.form, work)
    return work


def _view_work(graph: Graph, node: Node) -> Work:
    meta = graph.meta(node.outputs[0])
    return Work(node.operation, "view", 0.0, 0.0, 0, 0, (0,), meta.dtype, tensors=len(node.outputs))


def _compute_work(graph: Graph, node: Node) -> Work:
    results = node.outputs or tuple(dict.fromkeys(node.writes))
    metas = [graph.meta(v) for v in results]
    bytes_read, bytes_written = traffic_of(graph, node)
    kind = _kind(graph, node)
    flops = flops_of(graph, node)
    dims = _dims(graph, node, kind)
    dtype = metas[0].dtype if metas else torch.float32
    parts = tuple(_part_work(name, part_kind, sizes, dtype) for name, part_kind, sizes in parts_of(graph, node))
    return Work(
        operation=node.operation,
        kind=kind,
        flops=flops or sum(part.flops for part in parts),
        operations=sum(p.operations for p in parts) or _operations(node.operation, kind, dims, flops),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        dims=dims,
        dtype=dtype,
        tensors=max(1, len(results)),
        kernel=_kernel(graph, node) if kind == "convolution" else 1,
        layout=max(map(_layout, dict.fromkeys(map(graph.meta, node.inputs))), default=_LAYOUTS[0], key=_LAYOUTS.index),
        parts=parts,
        workspace=workspace_of(graph, node) or _intermediate_bytes(parts),
    )


def _intermediate_bytes(parts: tuple[Work, ...]) -> int:
    """Return the bytes of the two largest products of a fused layer. They are intermediate results of the layer."""
    sizes = sorted(math.prod(p.dims[:-1]) * p.dtype.itemsize for p in parts if p.kind == "product")
    return sum(sizes[-2:])


def _part_work(operation: str, kind: Kind, dims: tuple[int, ...], dtype: torch.dtype) -> Work:
    flops = 2.0 * math.prod(dims) if kind == "product" else 0.0
    return Work(operation, kind, flops, _operations(operation, kind, dims, flops), 0, 0, dims, dtype)


# --- kinds ------------------------------------------------------------------------------------------------------

_PRODUCTS = frozenset({
    "_scaled_mm", "addbmm", "addbmm_", "addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "bmm", "dot",
    "linear", "matmul", "mm", "mv", "vdot",
})  # fmt: skip
_CONVOLUTIONS = frozenset({
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "convolution_backward", "convolution_backward_overrideable", "convolution_overrideable",
    "cudnn_convolution",
})  # fmt: skip
_COPIES = frozenset({
    "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "contiguous", "copy_", "repeat", "reshape", "roll",
    "slice_scatter", "stack", "to", "tril", "triu",
})  # fmt: skip
_NORMS = ("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm")
_LOOK_UPS = ("embedding", "gather", "index", "scatter", "take", "put")
_KIND_BY_NAME: dict[str, Kind] = {
    **dict.fromkeys(_PRODUCTS, "product"),
    **dict.fromkeys(_CONVOLUTIONS, "convolution"),
    **dict.fromkeys(FUSED_ATTENTION, "attention"),
    **dict.fromkeys([f"{name}_backward" for name in FUSED_ATTENTION], "attention"),
    **dict.fromkeys(RECURRENT, "recurrent"),
    **dict.fromkeys(_COPIES, "copy"),
    **dict.fromkeys(["sort", "topk", "argsort", "kthvalue", "median", "_unique2", "msort"], "sort"),
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_cummax_helper"], "scan"),
    **dict.fromkeys([*SOFTMAX, "_log_softmax", "log_softmax"], "softmax"),
    **dict.fromkeys(["_softmax_backward_data", "_log_softmax_backward_data"], "softmax"),
}


def _kind(graph: Graph, node: Node) -> Kind:
    operation = node.operation
    kind = _KIND_BY_NAME.get(operation)
    if kind is not None:
        return kind
    if any(norm in operation for norm in _NORMS):
        return "normalisation"
    if "pool" in operation:
        return "pooling"
    if node.random or operation in {"dropout", "native_dropout"}:
        return "random"
    if operation.lstrip("_").startswith(_LOOK_UPS):
        return "look_up"
    if _is_pointwise(node.op) or operation.startswith(("_foreach_", "_fused_")):
        return "pointwise"
    return "reduction" if _shrinks(graph, node) else "other"


@functools.lru_cache(maxsize=4096)
def _is_pointwise(op: str) -> bool:
    if not op.startswith("aten::") or op not in allowed_operators():
        return False
    return torch.Tag.pointwise in resolve(op).tags


def _shrinks(graph: Graph, node: Node) -> bool:
    input_numel = max((graph.meta(v).numel for v in node.inputs), default=0)
    return input_numel > sum(graph.meta(v).numel for v in node.outputs or node.writes)


_LAYOUTS: tuple[Layout, ...] = ("contiguous", "permuted", "transposed")


def _layout(meta: TensorMeta) -> Layout:
    """Return the memory layout of a tensor. Dimensions of size 1 and expanded dimensions do not matter."""
    step, in_order = 1, True
    dimensions = [(n, s) for n, s in zip(meta.shape, meta.stride, strict=True) if n > 1 and s > 0]
    for size, stride in reversed(dimensions):
        in_order &= stride == step
        step *= size
    if in_order:
        return "contiguous"
    return "permuted" if dimensions[-1][1] == 1 else "transposed"


# --- sizes ------------------------------------------------------------------------------------------------------


def _dims(graph: Graph, node: Node, kind: Kind) -> tuple[int, ...]:
    shapes = [graph.meta(v).shape for v in node.inputs]
    if kind == "product" and len(shapes) >= 2:
        return _product_dims(graph, node, shapes)
    if kind == "convolution":
        return _convolution_dims(graph, node, shapes)
    if kind == "attention" and len(shapes) >= 3:
        query, key = shapes[1:3] if node.operation.endswith("_backward") else shapes[:2]
        return (math.prod(query[:-2]), query[-2], key[-2], query[-1])
    if kind == "recurrent" and len(shapes) >= 2 and len(shapes[1]) == 3:
        return _recurrent_dims(shapes)
    elements = sum(graph.meta(v).numel for v in node.outputs or dict.fromkeys(node.writes))
    if kind != "look_up":
        elements = max([elements, *map(math.prod, dict.fromkeys(shapes))])
    return (elements,)


def _product_dims(graph: Graph, node: Node, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    result_shape = graph.meta(node.outputs[0] if node.outputs else node.writes[-1]).shape
    left, right = shapes[1:3] if node.operation.startswith(("add", "badd")) and len(shapes) > 2 else shapes[:2]
    contracted = left[-1] if left else 1
    if len(right) <= 1:
        return (1, math.prod(result_shape), 1, contracted)
    columns = result_shape[-1] if result_shape else 1
    batch = math.prod(right[:-2]) if len(right) > 2 else 1
    return (batch, math.prod(result_shape) // max(1, batch * columns), columns, contracted)


def _convolution_dims(graph: Graph, node: Node, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a convolution as products: (groups, positions, output channels of a group, kernel elements per output)."""
    backward, options = "backward" in node.operation, arguments(node)
    operand, weight = shapes[1:3] if backward else shapes[:2]
    result_shape = shapes[0] if backward else graph.meta(node.outputs[0] if node.outputs else node.writes[-1]).shape
    transposed = bool(options.get("transposed")) or "transpose" in node.operation
    space = operand if transposed else result_shape
    batch = space[0] if len(space) == len(weight) else 1
    positions = batch * math.prod(space[2 - len(weight) :])
    groups, kernel = max(1, int(options.get("groups") or 1)), math.prod(weight[2:])
    if transposed:
        return (groups, positions, weight[1] * kernel, weight[0] // groups)
    return (groups, positions, weight[0] // groups, weight[1] * kernel)


def _recurrent_dims(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the dimensions of one product per step, layer and direction. All matrices of a step form one product."""
    matrices = [shape for shape in shapes[1:] if len(shape) == 2]
    layers, rows, _ = shapes[1]
    steps = math.prod(shapes[0][:-1]) // max(1, rows)
    columns = matrices[0][0] if matrices else 1
    contracted = sum(map(math.prod, matrices)) // max(1, layers * columns)
    return (steps * layers, rows, columns, contracted)


def _kernel(graph: Graph, node: Node) -> int:
    weight = graph.meta(node.inputs[2 if "backward" in node.operation else 1])
    return math.prod(weight.shape[2:])


# --- arithmetic -------------------------------------------------------------------------------------------------

# Arithmetic for each element.
_OPERATIONS_PER_ELEMENT: dict[Kind, float] = {
    "normalisation": 8.0,
    "softmax": 5.0,
    "pooling": 9.0,
    "random": 10.0,
    "copy": 0.0,
}


def _operations(operation: str, kind: Kind, dims: tuple[int, ...], flops: float) -> float:
    if kind in {"product", "convolution"} and len(dims) == 4:
        passes = 2.0 if operation.startswith("convolution_backward") else 1.0
        return passes * 2.0 * math.prod(dims)
    if kind == "attention":  # backward, kernels compute the scores again
        return (5.0 if operation.endswith("_backward") else 2.0) * 2.0 * math.prod(dims)
    if flops:
        return flops
    elements = dims[0]
    if kind == "sort":
        return elements * math.log2(max(2, elements))
    return elements * _OPERATIONS_PER_ELEMENT.get(kind, 1.0)
