"""Dispatch of ops with non-strided tensors: sparse, quantized and nested.

Metadata queries and construction from strided parts run on the client without a message (`sparse`, `compressed`,
`quantized`, `nested`). Every other op is one instruction (`calls`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.handler_support import DEVICE_NAME, Handler, index_of
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.layout_operators import CONVERSIONS, OPERATORS_OF
from djinn_core.ir.operators import resolve_for_layouts
from djinn_layouts import compressed, nested, quantized, sparse
from djinn_layouts.calls import call, call_out
from djinn_layouts.compressed_tensor import CompressedTensor
from djinn_layouts.nested_tensor import NestedTensor
from djinn_layouts.parts_tensor import PartsTensor, first_of_parts
from djinn_layouts.quantized_tensor import QuantizedTensor
from djinn_layouts.sparse_tensor import SparseTensor

aten = torch.ops.aten

# ops that run without the executor
_LOCAL: Final[Mapping[type, Mapping[Any, Handler]]] = MappingProxyType(
    {
        SparseTensor: sparse.LOCAL,
        CompressedTensor: compressed.LOCAL,
        QuantizedTensor: quantized.LOCAL,
        NestedTensor: nested.LOCAL,
    }
)
_NAMES: Final[Mapping[type, str]] = MappingProxyType(
    {
        SparseTensor: "sparse tensors",
        CompressedTensor: "compressed sparse tensors",
        QuantizedTensor: "quantized tensors",
        NestedTensor: "nested tensors",
    }
)
_CONVERSION: Final[Mapping[type, str]] = MappingProxyType(
    {SparseTensor: "to_dense", CompressedTensor: "to_dense", QuantizedTensor: "dequantize", NestedTensor: "unbind"}
)


def dispatch_layout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that has a non-strided argument, and return its result.

    Raises:
        UnsupportedOperation: remote tensors of this layout do not support the op.
    """
    first = first_of_parts((*args, *kwargs.values()))
    assert first is not None
    if torch.is_inference_mode_enabled() and not first.is_inference() and torch_dispatch.makes_view(func):
        with torch.inference_mode(False), torch.no_grad():  # a view is an inference tensor if its base is one
            return dispatch_layout(func, args, kwargs)
    handler = _LOCAL[type(first)].get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if func.name() in OPERATORS_OF[first.to_argument()[0]]:
        return call(func, args, kwargs)
    if kwargs and torch_dispatch.writes_out(func):
        return call_out(func, args, kwargs, dispatch_layout)
    kernel = torch_dispatch.composite_kernel(func)
    if kernel is not None:
        return kernel(*args, **kwargs)
    raise UnsupportedOperation(
        f"{func.name()} does not support {_NAMES[type(first)]} on {DEVICE_NAME}. "
        f"Convert them with .{_CONVERSION[type(first)]}(), or move them to the CPU first"
    )


PartsTensor.dispatch = staticmethod(dispatch_layout)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that makes a non-strided tensor, or that needs its own autograd formula for such a tensor."""
    return _MAKERS[func](func, args, kwargs)


def _make_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    make = sparse.empty if kwargs["layout"] is torch.sparse_coo else compressed.empty
    return make(func, args, kwargs)


def _upload(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `.to(device)` of a CPU tensor, except sparse COO tensors, whose parts PyTorch itself moves."""
    (source,), index, dtype = args, index_of(kwargs.get("device")), kwargs.get("dtype")
    if source.is_quantized:
        return quantized.upload_quantized(source, index)
    if source.is_nested:
        return nested.upload_nested(source if dtype is None else source.to(dtype), index)
    return compressed.upload_compressed(source, index, dtype)


_MAKERS: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        **dict.fromkeys(map(resolve_for_layouts, CONVERSIONS), call),
        **sparse.MAKERS,
        **compressed.MAKERS,
        **quantized.MAKERS,
        **nested.MAKERS,
        aten._to_copy.default: _upload,
        aten.empty.memory_format: _make_empty,
        aten.zeros.default: _make_empty,
    }
)
