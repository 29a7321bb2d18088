"""CPU tensors among the arguments of a remote op: which ops accept them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, device_type
from djinn_client.interception.tensors.upload import upload_copy
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import split_name

aten = torch.ops.aten

# PyTorch lets these ops mix CPU and accelerator tensors.
_MASKS = (torch.bool, torch.uint8)
_INDEXING = frozenset({
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
})  # fmt: skip
_TAKE_CPU_TENSORS = _INDEXING | {
    getattr(getattr(aten, packet), overload)
    for packet, overload in map(
        split_name,
        (
            "_pack_padded_sequence _pad_packed_sequence _ctc_loss.Tensor _ctc_loss_backward.Tensor tensor_split.tensor_indices_or_sections "
            "_pack_padded_sequence_backward index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor "
            "histogramdd bincount"
        ).split(),
    )
}

_OF_NUMBERS = {
    packet.Tensor: packet.ScalarList
    for packet in (aten._foreach_addcdiv, aten._foreach_addcdiv_, aten._foreach_addcmul, aten._foreach_addcmul_)
}


class CpuOperand(Exception):  # noqa: N818 - a signal between two functions, never seen by users
    """Raised by `_flatten` if an argument of a remote op is a CPU tensor with dimensions."""


def upload_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with CPU tensors replaced by remote copies.

    Raises:
        UnsupportedOperation: a CPU tensor is sparse, quantized or nested.
        RuntimeError: the op does not mix CPU and remote tensors, as on every accelerator.
    """
    for layout in _layouts((*args, *kwargs.values())):
        if layout != torch.strided:
            raise UnsupportedOperation(
                f"{func.name()} got a CPU tensor of layout {layout}, which cannot be uploaded to {DEVICE_NAME}. Run the op on "
                f"the CPU"
            )
    if func not in _TAKE_CPU_TENSORS or not isinstance(args[0], LazyTensor):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {device_type()}:0 and cpu! "
            f"(when checking arguments of {func.name()}; move the CPU tensor with .to('{device_type()}:0'))"
        )
    if func in _INDEXING:
        check_indices(args[0].shape, args[1])
    device = args[0].remote.meta.device
    return tuple(_upload(a, device) for a in args), {name: _upload(value, device) for name, value in kwargs.items()}


def check_indices(shape: Sequence[int], indices: Iterable[torch.Tensor | None]) -> None:
    """Refuse CPU indices that are out of range for a tensor of this shape.

    Raises:
        IndexError: the error of PyTorch's CPU kernel.
    """
    dim = indexed_dim = 0  # the kernel counts only dimensions that have an index
    for index in indices:
        if index is None:
            dim += 1
            continue
        if index.dtype not in _MASKS and dim < len(shape) and not isinstance(index, LazyTensor):
            _check_index(index, indexed_dim, shape[dim])
        covered = index.dim() if index.dtype in _MASKS else 1
        dim, indexed_dim = dim + covered, indexed_dim + covered


def _check_index(index: torch.Tensor, indexed_dim: int, size: int) -> None:
    if type(index) is not torch.Tensor or index.dtype.is_floating_point or not index.numel():
        return
    numbers = index.numpy()  # plain Python: the client computes nothing with tensor ops
    if numbers.min() < -size or numbers.max() >= size:
        outside = numbers[(numbers < -size) | (numbers >= size)]
        raise IndexError(f"index {outside[0]} is out of bounds for dimension {indexed_dim} with size {size}")


def in_lists_of_numbers(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the overload for a list of numbers, with its arguments, if `func` takes a CPU tensor of numbers.

    Return None for other ops.

    Raises:
        RuntimeError: the error of PyTorch's kernel, which needs one number per element.
    """
    overload = _OF_NUMBERS.get(func)
    numbers = args[-1] if args else None
    if overload is None or type(numbers) is not torch.Tensor:
        return None
    if not numbers.is_contiguous():
        raise RuntimeError("Expected scalars to be contiguous.")
    if numbers.dim() != 1:
        raise RuntimeError(f"Expected packed scalar Tensor to be of dimension 1. Got {numbers.dim()} instead.")
    if len(numbers) != len(args[0]):
        raise RuntimeError(
            f"Expected length of scalars to match input of length {len(args[0])} but got {len(numbers)} instead."
        )
    return overload, (*args[:-1], numbers.tolist())


def _layouts(arguments: Iterable[Any]) -> Iterator[torch.layout]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument.layout
        elif isinstance(argument, (list, tuple)):
            yield from _layouts(argument)


def _upload(argument: Any, device: int) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_upload(a, device) for a in argument]
    if isinstance(argument, torch.Tensor) and not isinstance(argument, LazyTensor) and argument.dim() > 0:
        return upload_copy(argument, device)
    return argument
