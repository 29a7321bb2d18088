"""Tensors to bytes and back without copying: a header for the message, and a buffer for the frame's body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import Buffer, allocate, flatten
from djinn_core.wire.messages import TensorHeader

# Quantized tensors also need scales; PyTorch has deprecated them.
_QUANTIZED: Final = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_NAMES: Final = MappingProxyType(
    {
        value: str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and value not in _QUANTIZED
    }
)
_DTYPES: Final = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})

# fast path for the dtypes of nearly every reply
_KNOWN_TO_NUMPY: Final[Mapping[torch.dtype, np.dtype[Any]]] = MappingProxyType({
    torch.float32: np.dtype("f4"), torch.float64: np.dtype("f8"), torch.float16: np.dtype("f2"), torch.int64: np.dtype("i8"),
    torch.int32: np.dtype("i4"), torch.int16: np.dtype("i2"), torch.uint8: np.dtype("u1"), torch.bool: np.dtype("?"),
})  # fmt: skip

_NUMPY_DIMENSIONS: Final = 32  # that all versions support
_LARGEST: Final = 2**63 - 1


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of `dtype`, such as `bfloat16`.

    Raises:
        ProtocolError: tensors of this dtype cannot be sent.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ProtocolError(f"tensors of dtype {dtype} cannot be sent; dequantize them first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype for a wire name.

    Raises:
        ProtocolError: this PyTorch has no such dtype.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(
            f"PyTorch {torch.__version__} has no dtype {name[:64]!r}; are both ends up to date?"
        ) from None


def tensor_to_wire(tensor: torch.Tensor) -> tuple[TensorHeader, memoryview]:
    """Encode a strided CPU tensor of any shape and dtype as a header and its bytes.

    If the elements fill a contiguous range of memory in any order, the buffer is the tensor's own memory, and the
    header has its shape and strides. Expanded dimensions are sent once. Otherwise, or if a conj or neg bit is set, the
    buffer is a copy in row-major order. The buffer keeps the memory alive.

    Raises:
        ProtocolError: the tensor is not on the CPU, not strided, or quantized.
    """
    dtype = tensor.dtype
    name = _NAMES[dtype] if dtype in _NAMES else dtype_name(dtype)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ProtocolError(
            f"cannot send a tensor of layout {tensor.layout} on {tensor.device}; only strided CPU tensors can be sent"
        )
    plain = dtype in _KNOWN_TO_NUMPY and not (
        tensor.requires_grad or tensor.is_neg() or tensor.ndim > _NUMPY_DIMENSIONS
    )
    if plain and not tensor.ndim:  # a 0-dim tensor, the most frequent reply
        return TensorHeader(name, (), ()), memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    if plain and tensor.numel() and tensor.is_contiguous():  # NumPy refuses some shapes without elements
        return TensorHeader(name, tuple(tensor.shape), tensor.stride()), flatten(memoryview(tensor.numpy()))  # type: ignore[arg-type]
    with torch.no_grad():
        dense = tensor.detach().resolve_conj().resolve_neg()
        extent = _extent_if_filled(dense)
        if extent is None:
            dense = dense.contiguous()
            extent = dense.numel()
        header = TensorHeader(name, tuple(dense.shape), dense.stride())
        return header, _bytes_of(dense, extent)


def tensor_from_wire(header: TensorHeader, buffer: Buffer) -> torch.Tensor:
    """Return the tensor of `header` over `buffer`. Memory is shared unless the buffer is read-only or misaligned.

    Raises:
        ProtocolError: the dtype is unknown, or shape, stride and buffer length are inconsistent.
    """
    name = header.dtype
    dtype = _DTYPES[name] if name in _DTYPES else dtype_from_name(name)
    if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        data = buffer  # as mostly
    else:
        data = flatten(buffer)
    sizes = header.shape + header.stride
    if sizes and (len(header.shape) != len(header.stride) or not (min(sizes) >= 0 and max(sizes) <= _LARGEST)):
        raise ProtocolError(f"a tensor cannot have shape {header.shape} with stride {header.stride}")
    nbytes = dtype.itemsize * (extent(header.shape, header.stride) if sizes else 1)
    if nbytes != data.nbytes:
        raise ProtocolError(
            f"a {header.dtype} tensor of shape {header.shape} and stride {header.stride} takes {nbytes:,} bytes, but {data.nbytes:,} arrived"
        )
    try:
        rows = len(header.shape) <= _NUMPY_DIMENSIONS and header.stride == _row_major(header.shape)
        if rows and nbytes and dtype in _KNOWN_TO_NUMPY and not data.readonly:
            tensor = torch.from_numpy(np.ndarray(header.shape, _KNOWN_TO_NUMPY[dtype], data))
            if not tensor.data_ptr() % dtype.itemsize:
                return tensor
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            _storage_over(data, dtype), 0, header.shape, header.stride
        )
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ProtocolError(
            f"PyTorch cannot make a tensor of shape {header.shape}: {str(error).splitlines()[0]}"
        ) from error


def _bytes_of(tensor: torch.Tensor, extent: int) -> memoryview:
    """Return the memory of `extent` elements, from the tensor's first element on."""
    if not extent:
        return memoryview(b"")
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        tensor.untyped_storage(), start, (extent * size,), (1,)
    )
    return memoryview(octets.numpy())  # type: ignore[arg-type]


def _storage_over(data: memoryview, dtype: torch.dtype) -> torch.UntypedStorage:
    if not len(data):
        return torch.UntypedStorage(0)
    octets = torch.frombuffer(data if not data.readonly else _copy(data), dtype=torch.uint8)
    if octets.data_ptr() % dtype.itemsize:
        octets = torch.frombuffer(_copy(data), dtype=torch.uint8)
    return octets.untyped_storage()


def _copy(data: memoryview) -> memoryview:
    copy = allocate(len(data))
    copy[:] = data
    return copy


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements between the first and the last one of a tensor with this shape and stride, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _extent_if_filled(tensor: torch.Tensor) -> int | None:
    """Return the tensor's extent in elements, or None if it has gaps or overlaps. Dimensions of stride 0 count once."""
    if tensor.is_contiguous():
        return tensor.numel()
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1
    for step, size in sorted((step, size) for size, step in dimensions if size != 1 and step):
        if step != extent:
            return None
        extent *= size
    return extent
