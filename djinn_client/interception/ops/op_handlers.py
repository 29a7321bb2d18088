"""Ops that an `OpHandler` runs instead of the recorder. The handler is loaded at its first call.

The tables name the ops that create sparse, compressed, quantized and nested tensors, and the ops of
`torch.distributed`. If a tensor of these kinds exists, its class handles its ops without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import DEVICE_NAME, Handler
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.native.install import hide_frames_of
from djinn_client.interception.native.library import set_kernel
from djinn_client.interception.runtime_interface import port
from djinn_client.sink import OpHandler
from djinn_core.errors import UnsupportedOperation, install_hint
from djinn_core.ir.layout_operators import CONVERSIONS
from djinn_core.ir.operators import resolve_for_layouts
from djinn_core.torch_private import schema_of

aten = torch.ops.aten

# Ops that create such tensors from strided tensors.
_LAYOUTS: Final = (
    aten._convert_indices_from_csr_to_coo.default,
    aten._embedding_bag_sparse_backward.default,
    aten._empty_per_channel_affine_quantized.default,
    aten._make_per_channel_quantized_tensor.default,
    aten._make_per_tensor_quantized_tensor.default,
    aten._nested_from_padded.default,
    aten._nested_tensor_from_mask.default,
    aten._nested_tensor_from_tensor_list.default,
    aten._nested_view_from_buffer.default,
    aten._sparse_compressed_tensor_unsafe.default,
    aten._sparse_coo_tensor_unsafe.default,
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten.embedding_sparse_backward.default,
    aten.sparse_compressed_tensor.comp_plain_value,
    aten.sparse_compressed_tensor.comp_plain_value_size,
)
# Ops by the dispatch key at which PyTorch calls them.
_KERNELS: Final[Mapping[str, Sequence[Any]]] = MappingProxyType(
    {
        "SparsePrivateUse1": (
            aten.empty.memory_format,
            aten.zeros.default,
            aten._sparse_coo_tensor_with_dims.default,
        ),
        "SparseCsrPrivateUse1": (
            aten.empty.memory_format,
            aten.zeros.default,
            aten._sparse_compressed_tensor_unsafe.default,
            aten._sparse_compressed_tensor_with_dims.default,
            aten._to_copy.default,
            aten.sparse_compressed_tensor.comp_plain_value_size,
        ),
        "QuantizedPrivateUse1": (
            aten._empty_affine_quantized.default,
            aten._empty_per_channel_affine_quantized.default,
            aten._to_copy.default,
        ),
        "NestedTensorPrivateUse1": (aten._to_copy.default,),
        "AutogradPrivateUse1": (aten._sparse_compressed_tensor_unsafe.default,),
    }
)
# As above, if the call has a remote tensor or names the device.
_KERNELS_IN_PART: Final[Mapping[str, Sequence[Any]]] = MappingProxyType(
    {
        "CPU": (aten._nested_tensor_from_tensor_list.default,),
        "AutogradNestedTensor": (
            aten.chunk.default,
            aten.reshape.default,
            aten.reshape_as.default,
            aten.split_with_sizes.default,
            aten.unbind.int,
        ),
    }
)
_COLLECTIVES: Final = torch_dispatch.collectives(
    "_allgather_base_ _reduce_scatter_base_ all_gather_into_tensor all_gather_into_tensor_coalesced all_reduce all_reduce_ "
    "all_reduce_coalesced all_reduce_coalesced_ all_to_all_single allgather_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_ allreduce_ allreduce_coalesced_ alltoall_ alltoall_base_ barrier broadcast broadcast_ "
    "gather_ monitored_barrier_ recv_ recv_any_source_ reduce_ reduce_scatter_ reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced reduce_scatter_tensor_coalesced_ scatter_ send wait_tensor".split()
)
_FOLDERS: Final = MappingProxyType({"layouts": "layouts", "collectives": "integrations"})  # folders in `plugins`


@handles(*_LAYOUTS, *map(resolve_for_layouts, CONVERSIONS))
def _run_layouts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _find("layouts", func).run(func, args, kwargs)


@handles(*_COLLECTIVES)
def _run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _find("collectives", func).run(func, args, kwargs)


def _find(name: str, func: Any) -> OpHandler:
    handler = port.op_handler(name)
    if handler is None:
        folder = _FOLDERS[name]
        raise UnsupportedOperation(
            f"{func.name()} cannot run on {DEVICE_NAME}: no plugin offers the op handler {name!r}. Run "
            + install_hint(f"plugins/{folder}")
        )
    hide_frames_of(type(handler).__module__)
    return handler


def _kernel(func: Any, handler: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(func, args, kwargs)


def register() -> None:
    """Register the kernels of the ops that handlers run."""
    for partly, kernels in ((False, _KERNELS), (True, _KERNELS_IN_PART)):
        for key, funcs in kernels.items():
            for func in funcs:
                set_kernel(func.name(), _kernel(func, _run_layouts), key, partly=partly)
    for func in _COLLECTIVES:
        set_kernel(func.name(), _kernel(func, _run_collective), "PrivateUse1")


@handles(aten.sparse_dim.default)
def _sparse_dim_of_dense(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return 0


@handles(aten.dense_dim.default)
def _dense_dim_of_dense(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return int(args[0].dim())


@handles(aten.new_empty_strided.default)
def _new_empty_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `aten::new_empty_strided`: return a strided tensor, even if PyTorch also requests the layout of a sparse leaf."""
    return record(func, args, {name: value for name, value in kwargs.items() if name != "layout"})


@handles(aten._embedding_bag_backward.default)
def _embedding_bag_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of the table of an `nn.EmbeddingBag`.

    The executor's op would return a sparse gradient as one value.
    """
    arguments = {
        argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)
    } | kwargs
    return (_run_layouts if arguments["sparse"] else record)(func, args, kwargs)
