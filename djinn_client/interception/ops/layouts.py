"""Dispatch of ops with tensors that are not strided: sparse, quantized and nested ones.

Ops that only read the metadata of such a tensor, or make one of strided parts, run on the client without a message (`sparse`,
`compressed`, `quantized`, `nested`). Every other op is one instruction, see `layout_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import DEVICE_NAME, Handler
from djinn_client.interception.dispatch import handles
from djinn_client.interception.native.library import set_kernel
from djinn_client.interception.ops import compressed, nested, quantized, sparse
from djinn_client.interception.ops.layout_calls import call, call_out
from djinn_client.interception.tensors.compressed_tensor import CompressedTensor
from djinn_client.interception.tensors.nested_tensor import NestedTensor
from djinn_client.interception.tensors.parts_tensor import first_of_parts
from djinn_client.interception.tensors.quantized_tensor import QuantizedTensor
from djinn_client.interception.tensors.sparse_tensor import SparseTensor
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.layout_operators import CONVERSIONS, OPERATORS_OF
from djinn_core.ir.operators import resolve_for_layouts

aten = torch.ops.aten

# What happens here, without the executor.
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
_OTHERWISE: Final[Mapping[type, str]] = MappingProxyType(
    {SparseTensor: "to_dense", CompressedTensor: "to_dense", QuantizedTensor: "dequantize", NestedTensor: "unbind"}
)


def dispatch_layout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implementation of `PartsTensor.__torch_dispatch__`, and of remote ops with such a tensor among their arguments.

    Raises:
        UnsupportedOperation: remote tensors of this kind have no such op.
    """
    first = first_of_parts((*args, *kwargs.values()))
    assert first is not None
    if torch.is_inference_mode_enabled() and not first.is_inference() and torch_dispatch.makes_view(func):
        with torch.inference_mode(False), torch.no_grad():  # a view is an inference tensor where its base is
            return dispatch_layout(func, args, kwargs)
    handler = _LOCAL[type(first)].get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if func.name() in OPERATORS_OF[first.described()[0]]:
        return call(func, args, kwargs)
    if kwargs and torch_dispatch.writes_out(func):
        return call_out(func, args, kwargs, dispatch_layout)
    kernel = torch_dispatch.composite_kernel(func)
    if kernel is not None:
        return kernel(*args, **kwargs)
    raise UnsupportedOperation(
        f"{func.name()} cannot run on {_NAMES[type(first)]} of {DEVICE_NAME}: it is not among the ops that take them. "
        f"Convert them with .{_OTHERWISE[type(first)]}(), or move them to the CPU first"
    )


def register() -> None:
    """Register the factories of tensors that are not strided."""
    handles(*(resolve_for_layouts(name) for name in CONVERSIONS))(call)
    for key, kernels in (
        ("SparsePrivateUse1", sparse.KERNELS),
        ("SparseCsrPrivateUse1", compressed.KERNELS),
        ("QuantizedPrivateUse1", quantized.KERNELS),
        ("NestedTensorPrivateUse1", nested.KERNELS),
        ("AutogradPrivateUse1", {"_sparse_compressed_tensor_unsafe": compressed.unsafe}),
    ):
        for name, kernel in kernels.items():
            set_kernel(f"aten::{name}", kernel, key)
    set_kernel("aten::_nested_tensor_from_tensor_list", nested.of_list, "CPU", partly=True)
    for name, kernel in nested.AUTOGRAD_KERNELS.items():
        set_kernel(f"aten::{name}", kernel, "AutogradNestedTensor", partly=True)
