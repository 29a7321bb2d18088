"""Probes of memory-bound ops, one for each op and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from djinn.hooks import Probe
from djinn_core.planning.builtins.work import Kind

aten = torch.ops.aten
Make = Callable[[torch.device, int], Callable[[], object]]

SIZES = (1 << 6, 1 << 12, 1 << 16, 1 << 20)
LARGE = 1 << 23
SPLIT = 8  # views per call of the probe `split`
_BUDGET = 1 << 21  # total elements per probe
_WIDTH = 256


@attrs.frozen
class PointwiseProbe:
    """A probe of one op at one size."""

    operation: str
    kind: Kind
    elements: int
    probe: Probe


def _unary(function: Callable[..., object], **options: object) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x = torch.rand(elements, device=device) + 0.5
        return lambda: function(x, **options)

    return make


def _binary(function: Callable[..., object], *arguments: object) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x, y = torch.rand(elements, device=device) + 0.5, torch.rand(elements, device=device) + 0.5
        return lambda: function(x, y, *arguments)

    return make


def _ternary(function: Callable[..., object]) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x, y, z = (torch.rand(elements, device=device) + 0.5 for _ in range(3))
        return lambda: function(x, y, z)

    return make


def _rows(function: Callable[[torch.Tensor], object]) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x = torch.rand(elements, device=device).reshape(-1, min(_WIDTH, elements))
        return lambda: function(x)

    return make


def _row_gradient(function: Callable[..., object]) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x, y = (torch.rand(elements, device=device).reshape(-1, min(_WIDTH, elements)) for _ in range(2))
        return lambda: function(x, y, -1, torch.float32)

    return make


def _masked(function: Callable[[torch.Tensor, torch.Tensor], object]) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x = torch.rand(elements, device=device)
        mask = x > 0.5
        return lambda: function(x, mask)

    return make


def _layer_norm(device: torch.device, elements: int) -> Callable[[], object]:
    width = min(_WIDTH, elements)
    x, w, b = torch.rand(elements // width, width, device=device), *torch.rand(2, width, device=device).unbind()
    return lambda: torch.native_layer_norm(x, [width], w, b, 1e-5)


def _layer_norm_backward(device: torch.device, elements: int) -> Callable[[], object]:
    width = min(_WIDTH, elements)
    x, g = torch.rand(2, elements // width, width, device=device).unbind()
    w, b = torch.rand(2, width, device=device).unbind()
    mean, deviation = torch.rand(2, elements // width, 1, device=device).unbind()
    return lambda: aten.native_layer_norm_backward(g, x, [width], mean, deviation, w, b, [True, True, True])


def _image(device: torch.device, elements: int, channels: int = 16) -> torch.Tensor:
    side = max(2, int((elements / channels) ** 0.5))
    return torch.rand(1, channels, side, side, device=device)


def _batch_norm(training: bool) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x = _image(device, elements)
        w, b, mean, variance = torch.rand(4, x.shape[1], device=device).unbind()
        return lambda: torch.native_batch_norm(x, w, b, mean, variance, training, 0.1, 1e-5)

    return make


def _batch_norm_backward(device: torch.device, elements: int) -> Callable[[], object]:
    x, g = _image(device, elements), _image(device, elements)
    w, m, v, s, d = torch.rand(5, x.shape[1], device=device).unbind()
    return lambda: aten.native_batch_norm_backward(g, x, w, m, v, s, d, True, 1e-5, [True, True, True])


def _group_norm(device: torch.device, elements: int) -> Callable[[], object]:
    x = _image(device, elements)
    w, b = torch.rand(2, x.shape[1], device=device).unbind()
    return lambda: torch.native_group_norm(x, w, b, 1, x.shape[1], x[0, 0].numel(), 4, 1e-5)


def _max_pool(device: torch.device, elements: int) -> Callable[[], object]:
    x = _image(device, elements)
    return lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])


def _max_pool_backward(device: torch.device, elements: int) -> Callable[[], object]:
    x = _image(device, elements)
    pooled, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return lambda: aten.max_pool2d_with_indices_backward(pooled, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)


def _average_pool(device: torch.device, elements: int) -> Callable[[], object]:
    x = _image(device, elements)
    return lambda: aten._adaptive_avg_pool2d(x, [2, 2])  # noqa: SLF001 - the name of an op


def _embedding(device: torch.device, elements: int) -> Callable[[], object]:
    width = min(_WIDTH, elements)
    table = torch.rand(1024, width, device=device)
    indices = torch.randint(0, 1024, (elements // width,), device=device)
    return lambda: aten.embedding(table, indices)


def _embedding_gradient(device: torch.device, elements: int) -> Callable[[], object]:
    width = min(_WIDTH, elements)
    rows = elements // width
    gradient = torch.rand(rows, width, device=device)
    indices = torch.randint(0, rows, (rows,), device=device)
    return lambda: aten.embedding_dense_backward(gradient, indices, rows, -1, False)


def _gather(device: torch.device, elements: int) -> Callable[[], object]:
    x = torch.rand(elements, device=device)
    indices = torch.randint(0, elements, (elements,), device=device)
    return lambda: torch.gather(x, 0, indices)


def _transposed(device: torch.device, elements: int) -> Callable[[], object]:
    side = min(64, math.isqrt(elements))
    x = torch.rand(elements, device=device).reshape(-1, side, side).transpose(1, 2)
    return lambda: aten.clone(x, memory_format=torch.contiguous_format)


def _heads(device: torch.device, elements: int) -> Callable[[], object]:
    width = min(64, math.isqrt(elements))
    x = torch.rand(elements, device=device).reshape(-1, min(8, elements // width), width).transpose(0, 1)
    return lambda: aten.clone(x, memory_format=torch.contiguous_format)


def _concatenation(device: torch.device, elements: int) -> Callable[[], object]:
    x, y = torch.rand(2, elements // 2, device=device).unbind()
    return lambda: torch.cat([x, y])


def _view_op(function: Callable[[torch.Tensor], object]) -> Make:
    def make(device: torch.device, elements: int) -> Callable[[], object]:
        x = torch.rand(elements // SPLIT, SPLIT, device=device)
        return lambda: function(x)

    return make


_POINTWISE: dict[str, Make] = {
    "add": _binary(torch.add),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "maximum": _binary(torch.maximum),
    "gt": _binary(torch.gt),
    "add_": _binary(aten.add_),
    "mul_": _unary(lambda x: x.mul_(1.0)),
    "lerp_": _binary(lambda x, y: x.lerp_(y, 0.5)),
    "addcmul_": _ternary(lambda x, y, z: x.addcmul_(y, z, value=0.0)),
    "addcdiv_": _ternary(lambda x, y, z: x.addcdiv_(y, z, value=0.0)),
    "where": _masked(lambda x, mask: torch.where(mask, x, x)),
    "masked_fill": _masked(lambda x, mask: x.masked_fill(mask, 0.0)),
    "relu": _unary(torch.relu),
    "neg": _unary(torch.neg),
    "threshold_backward": _binary(aten.threshold_backward, 0.0),
    "sqrt": _unary(torch.sqrt),
    "rsqrt": _unary(torch.rsqrt),
    "exp": _unary(torch.exp),
    "log": _unary(torch.log),
    "sin": _unary(torch.sin),
    "tanh": _unary(torch.tanh),
    "erf": _unary(torch.erf),
    "sigmoid": _unary(torch.sigmoid),
    "silu": _unary(F.silu),
    "gelu": _unary(F.gelu),
    "softplus": _unary(F.softplus),
    "pow": _unary(lambda x: torch.pow(x, 3.0)),
    "gelu_backward": _binary(aten.gelu_backward),
    "silu_backward": _binary(aten.silu_backward),
    "tanh_backward": _binary(aten.tanh_backward),
    "sigmoid_backward": _binary(aten.sigmoid_backward),
}
_REDUCTIONS: dict[str, Make] = {
    "sum": _rows(lambda x: x.sum(-1)),
    "sum outer": _rows(lambda x: x.sum(0)),
    "mean": _rows(lambda x: x.mean(-1)),
    "mean outer": _rows(lambda x: x.mean(0)),
    "amax": _rows(lambda x: x.amax(-1)),
    "argmax": _rows(lambda x: x.argmax(-1)),
    "var_mean": _rows(lambda x: torch.var_mean(x, -1)),
    "linalg_vector_norm": _rows(torch.linalg.vector_norm),
}
_NORMALISATIONS: dict[str, Make] = {
    "native_layer_norm": _layer_norm,
    "rms_norm": _rows(lambda x: F.rms_norm(x, x.shape[-1:])),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm(training=False),
    "native_batch_norm training": _batch_norm(training=True),
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm": _group_norm,
}
_SOFTMAX: dict[str, Make] = {
    "_softmax": _rows(lambda x: torch.softmax(x, -1)),
    "_safe_softmax": _rows(lambda x: aten._safe_softmax(x, -1)),  # noqa: SLF001 - the name of an op
    "_log_softmax": _rows(lambda x: torch.log_softmax(x, -1)),
    "_softmax_backward_data": _row_gradient(aten._softmax_backward_data),  # noqa: SLF001 - the name of an op
    "_log_softmax_backward_data": _row_gradient(aten._log_softmax_backward_data),  # noqa: SLF001
}
_COPIES: dict[str, Make] = {
    "clone": _unary(torch.clone),
    "clone transposed": _transposed,
    "clone heads": _heads,
    "copy_": _binary(lambda x, y: x.copy_(y)),
    "cat": _concatenation,
    "fill_": _unary(lambda x: x.fill_(1.0)),
}
_VIEWS: dict[str, Make] = {
    "view": _view_op(lambda x: x.view(-1)),
    "transpose": _view_op(lambda x: x.transpose(0, 1)),
    "select": _view_op(lambda x: x.select(0, 0)),
    "split": _view_op(lambda x: x.split(1, 1)),
}
_FAMILIES: tuple[tuple[Kind, dict[str, Make]], ...] = (
    ("pointwise", _POINTWISE),
    ("reduction", _REDUCTIONS),
    ("normalisation", _NORMALISATIONS),
    ("softmax", _SOFTMAX),
    ("copy", _COPIES),
    ("view", _VIEWS),
    (
        "pooling",
        {
            "max_pool2d_with_indices": _max_pool,
            "max_pool2d_with_indices_backward": _max_pool_backward,
            "_adaptive_avg_pool2d": _average_pool,
        },
    ),
    (
        "look_up",
        {"embedding": _embedding, "embedding_dense_backward": _embedding_gradient, "gather": _gather},
    ),
    (
        "random",
        {"bernoulli": _rows(torch.bernoulli), "native_dropout": _unary(lambda x: aten.native_dropout(x, 0.1, True))},
    ),
    ("scan", {"cumsum": _rows(lambda x: x.cumsum(-1))}),
    ("sort", {"topk": _rows(lambda x: x.topk(1)), "sort": _rows(lambda x: x.sort(-1))}),
)
# These represent their kind for sizes beyond all caches.
_LARGE = frozenset({"add", "add_", "relu", "clone", "sum", "clone transposed", "native_layer_norm", "_softmax"})


def sized_probes() -> Iterator[PointwiseProbe]:
    """Yield probes of every op at every size."""
    for kind, makers in _FAMILIES:
        for operation, make in makers.items():
            sizes = (SIZES[1],) if kind == "view" else (*SIZES, LARGE) if operation in _LARGE else SIZES
            for elements in sizes:
                yield _sized_probe(operation, kind, elements, make)


def _sized_probe(operation: str, kind: Kind, elements: int, make: Make) -> PointwiseProbe:
    repeats = max(2, min(200, _BUDGET // elements))

    def prepare(device: torch.device) -> Callable[[], object]:
        once = make(device, elements)

        def run() -> None:
            for _ in range(repeats):
                once()

        return run

    return PointwiseProbe(operation, kind, elements, Probe(f"{operation} {elements}", prepare, repeats))
