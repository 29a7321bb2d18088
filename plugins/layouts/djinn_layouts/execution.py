"""Run ops with non-strided tensors on the executor: build the tensors from strided values, and split the results again.

PyTorch's kernels assume that sparse tensors are valid, and clients are not trusted. So each built tensor is checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.layout_operators import (
    COMPRESSED,
    COMPRESSED_RESULT,
    CONVERSIONS,
    COO,
    COO_RESULT,
    NESTED,
    NESTED_RESULT,
    NESTED_VIEW,
    NESTED_VIEW_RESULT,
    NO_RESULT,
    OPERATORS_OF,
    PER_CHANNEL,
    PER_CHANNEL_RESULT,
    PER_TENSOR,
    PER_TENSOR_RESULT,
    STRIDED_RESULT,
    VALUES_PER_RESULT,
)
from djinn_core.ir.operators import resolve_for_layouts
from djinn_core.wire.tensors import extent
from djinn_layouts import torch_layouts

# In the order of `COMPRESSED` and `QUANTIZED`.
_LAYOUTS: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_DTYPES: Final = ((torch.qint8, torch.int8), (torch.quint8, torch.uint8), (torch.qint32, torch.int32))


def layout_call(name: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Run the op `name` on copies of the arguments that it writes, and return `VALUES_PER_RESULT` tensors for each result.

    The tensors of a result are its header, its strided parts, and empty tensors up to this number.

    Raises:
        UnsupportedOperation: programs may not contain the op for these layouts, or no argument is a non-strided tensor.
        RuntimeError: a non-strided tensor among the arguments is invalid, or the op failed.
    """
    op = resolve_for_layouts(str(name))
    arguments = _Arguments()
    positional = [arguments.make(a) for a in args]
    keywords = {key: arguments.make(a) for key, a in kwargs.items()}
    if not arguments.kinds and name not in CONVERSIONS:
        raise UnsupportedOperation(
            f"{name} needs a sparse, quantized or nested tensor among its arguments, but has none"
        )
    for kind in arguments.kinds:
        if name not in OPERATORS_OF[kind]:
            raise UnsupportedOperation(f"programs may not contain {name} for {kind} tensors")
    schema = torch_private.schema_of(op)
    for index, argument in enumerate(schema.arguments[: len(positional)]):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positional[index] = arguments.copy_for_writing(positional[index])
    output = _EXCEPTIONS.get(str(name), _call)(op, positional, keywords)
    results = list(output) if len(schema.returns) > 1 else [output]
    return [part for result in results for part in arguments.split_result(result)]


def _call(op: Any, positional: list[Any], named: dict[str, Any]) -> Any:
    return op(*positional, **named)


def _reduce_product(op: Any, positional: list[Any], named: dict[str, Any]) -> Any:
    """Return a sparse matrix product that reduces by maximum or minimum, and the index of each selected value."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        matrix, dense, *options = positional
        product, terms = op(matrix.clone(), dense.clone().requires_grad_(), *options, **named)
    return product.detach(), terms


def _differentiate_product(op: Any, positional: list[Any], named: dict[str, Any]) -> Any:
    """Return the gradients of a sparse matrix product that reduces by maximum or minimum.

    Raises:
        RuntimeError: the indices of the selected values are invalid. This is checked here, because the kernel does not.
    """
    matrix, gradient, _, reduce, terms, *_ = positional
    if reduce in {"amax", "amin"} and (
        terms.shape != gradient.shape
        or terms.dtype != torch.int64
        or bool(((terms < 0) | (terms > matrix.values().shape[0])).any())
    ):
        raise RuntimeError(
            f"the indices of the values that a sparse product by {reduce} selected are invalid: they must be int64, have "
            f"the gradient's shape, and lie between 0 and {matrix.values().shape[0]}"
        )
    return op(*positional, **named)


_EXCEPTIONS: Final[Mapping[str, Callable[[Any, list[Any], dict[str, Any]], Any]]] = MappingProxyType({
    "aten::_sparse_mm_reduce_impl": _reduce_product,
    "aten::_sparse_mm_reduce_impl_backward": _differentiate_product,
})  # fmt: skip


class _Arguments:
    """Build the arguments of one op, and find out which results share their memory.

    Attributes:
        kinds: names of the layouts of the non-strided tensors among the arguments.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._memory: dict[int, int] = {}  # address of a storage: offset of its first tensor, in elements
        self._written_identity: tuple[Any, ...] = ()  # `_identity_of` the argument that the op may write

    def make(self, argument: Any) -> Any:
        """Return an argument, with non-strided tensors built from their encoded form."""
        if isinstance(argument, torch.Tensor):
            if argument.dim() or argument.device.type != "cpu":
                self._memory.setdefault(argument.untyped_storage().data_ptr(), int(argument.storage_offset()))
            return argument
        if not isinstance(argument, (list, tuple)):
            return argument
        elements = [self.make(a) for a in argument]
        if not elements or not isinstance(elements[0], str) or elements[0] not in _MAKERS:
            return elements
        self.kinds.add(elements[0])
        return _MAKERS[elements[0]](*elements)

    def copy_for_writing(self, argument: torch.Tensor) -> torch.Tensor:
        """Return a copy of an argument that the op may write into. Remember the copy, to recognise it as a result."""
        copy = argument.clone()
        self._written_identity = _identity_of(copy)
        return copy

    def split_result(self, result: Any) -> list[torch.Tensor]:
        """Split a result into a header and strided tensors. Copy those with an argument's memory or spare memory."""
        if result is None:
            return _padded_parts([NO_RESULT])
        if not isinstance(result, torch.Tensor):
            return _padded_parts([STRIDED_RESULT], torch.tensor(result))
        in_place = int(bool(self._written_identity) and self._written_identity == _identity_of(result))
        memory = result.untyped_storage().data_ptr() if result.is_nested else 0
        if result.is_nested and (not result.is_contiguous() or memory in self._memory):
            header, *parts = _nested_view_parts(result, in_place, self._memory.get(memory, 0))
        else:
            header, *parts = _parts_of(result, in_place)
        return _padded_parts(header, *[self._detach_memory(part) for part in parts])

    def _detach_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()  # a kernel may have allocated more than its result needs
        return tensor.clone() if memory.data_ptr() in self._memory or memory.nbytes() > tensor.nbytes else tensor


def _padded_parts(header: list[int], *parts: torch.Tensor) -> list[torch.Tensor]:
    empty = [torch.empty(0) for _ in range(VALUES_PER_RESULT - 1 - len(parts))]
    return [torch.tensor(header), *parts, *empty]


def _make_coo(_kind: str, coalesced: Any, size: Any, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, tuple(size), device=values.device, check_invariants=True, is_coalesced=bool(coalesced)
    )


def _make_compressed(
    kind: str, size: Any, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, tuple(size), layout=_LAYOUTS[COMPRESSED.index(kind)], device=values.device,
        check_invariants=True,
    )  # fmt: skip


def _make_per_tensor(_kind: str, dtype: Any, scale: Any, zero_point: Any, integers: torch.Tensor) -> torch.Tensor:
    _check_elements(dtype, integers)
    if not (isinstance(scale, float) and math.isfinite(scale)):
        raise RuntimeError("the scale of a quantized tensor must be a finite number")
    return torch_layouts.quantized_per_tensor(integers, scale, int(zero_point), _DTYPES[dtype][0])


def _make_per_channel(
    _kind: str, dtype: Any, axis: Any, integers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor
) -> torch.Tensor:
    _check_elements(dtype, integers)
    if not (isinstance(axis, int) and 0 <= axis < integers.dim()):
        raise RuntimeError(f"a tensor of {integers.dim()} dimensions cannot be quantized along dimension {axis}")
    if scales.shape != (integers.shape[axis],) or zero_points.shape != scales.shape:
        raise RuntimeError("a per-channel quantized tensor needs one scale and one zero point for each channel")
    return torch_layouts.quantized_per_channel(integers, scales, zero_points, axis, _DTYPES[dtype][0])


def _make_nested(_kind: str, dims: Any, numbers: Any, elements: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([int(n) for n in numbers], dtype=torch.int64).reshape(-1, dims) if dims else None
    if table is None or elements.dim() != 1 or not elements.is_contiguous() or bool((table < 0).any()):
        raise RuntimeError("a nested tensor needs non-negative sizes and contiguous one-dimensional elements")
    if sum(math.prod(size) for size in table.tolist()) != elements.numel():
        raise RuntimeError("the number of elements of a nested tensor contradicts its sizes")
    return torch_layouts.nested_of_memory(elements, table, *torch_layouts.contiguous_nested_strides(table))


def _make_nested_view(
    _kind: str, dims: Any, numbers: Any, steps: Any, starts: Any, memory: torch.Tensor
) -> torch.Tensor:
    count = len(numbers) // dims if isinstance(dims, int) and dims > 0 else 0
    if not count or not len(numbers) == len(steps) == dims * count or len(starts) != count or memory.dim() != 1:
        raise RuntimeError("a nested view needs sizes, strides and an offset for each component")
    sizes, strides = (
        torch.tensor([int(n) for n in flat], dtype=torch.int64).reshape(-1, dims) for flat in (numbers, steps)
    )
    offsets = torch.tensor([int(n) for n in starts], dtype=torch.int64)
    if not memory.is_contiguous():
        raise RuntimeError("the memory of a nested view must be contiguous")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        if min(*size, *stride, offset) < 0:
            raise RuntimeError(f"a nested view has a negative number: sizes {size}, strides {stride}, offset {offset}")
        if min(size) > 0 and (end := offset + extent(size, stride)) > memory.numel():
            raise RuntimeError(f"a nested view needs {end} elements of memory, but has {memory.numel()}")
    return torch_layouts.nested_of_memory(memory, sizes, strides, offsets)


def _check_elements(dtype: Any, integers: torch.Tensor) -> None:
    if not isinstance(dtype, int) or not 0 <= dtype < len(_DTYPES):
        raise RuntimeError(f"invalid quantized tensor: no dtype has code {dtype!r}")
    quantized_dtype, integer_dtype = _DTYPES[dtype]
    if integers.dtype != integer_dtype:
        raise RuntimeError(
            f"invalid quantized tensor: {quantized_dtype} needs {integer_dtype} elements, not {integers.dtype}"
        )


_MAKERS: Final[Mapping[str, Callable[..., torch.Tensor]]] = MappingProxyType(
    {
        COO: _make_coo,
        **dict.fromkeys(COMPRESSED, _make_compressed),
        PER_TENSOR: _make_per_tensor,
        PER_CHANNEL: _make_per_channel,
        NESTED: _make_nested,
        NESTED_VIEW: _make_nested_view,
    }
)


def _parts_of(result: torch.Tensor, in_place: int) -> list[Any]:
    """Return the header and the strided parts of a result. `in_place`: 1 if the result is a written argument."""
    if result.is_quantized:
        return _quantized_parts(result, in_place)
    if result.is_nested:
        elements, sizes = torch_layouts.elements_of_nested(result)
        return [
            [NESTED_RESULT, in_place, sizes.shape[1] if sizes.dim() == 2 else 0, *sizes.flatten().tolist()],
            elements,
        ]
    if result.layout is torch.strided:
        return [[STRIDED_RESULT], result]
    if result.layout is torch.sparse_coo:
        header = [COO_RESULT, in_place, int(result.is_coalesced()), *result.shape]
        return [header, *torch_layouts.sparse_parts(result)]
    if result.layout in _LAYOUTS:
        header = [COMPRESSED_RESULT, in_place, _LAYOUTS.index(result.layout), *result.shape]
        return [header, *torch_layouts.compressed_parts(result)]
    raise UnsupportedOperation(f"the result has layout {result.layout}, which remote_accelerator does not have")


def _nested_view_parts(result: torch.Tensor, in_place: int, begin: int) -> list[Any]:
    """Return the header and parts of a nested tensor that is a view or not contiguous.

    The header has sizes, strides and offsets. The only part is the whole storage, in one dimension.
    Offsets in the header are relative to `begin`, the offset of the argument with this storage, in elements.
    """
    tables = torch_layouts.tables_of_nested(result)
    count, dims = tables[0].shape if tables[0].dim() == 2 else (0, 0)
    layout_numbers = [n for table in (*tables[:2], tables[2] - begin) for n in table.flatten().tolist()]
    return [[NESTED_VIEW_RESULT, in_place, dims, count, *layout_numbers], torch_layouts.memory_of_nested(result)]


def _quantized_parts(result: torch.Tensor, in_place: int) -> list[Any]:
    dtype = next((i for i, (quantized, _) in enumerate(_DTYPES) if quantized is result.dtype), None)
    if dtype is None:
        raise UnsupportedOperation(f"the result has dtype {result.dtype}, which remote_accelerator does not have")
    if result.qscheme() is torch.per_tensor_affine:
        (bits,) = struct.unpack("<q", struct.pack("<d", result.q_scale()))
        return [[PER_TENSOR_RESULT, in_place, dtype, result.q_zero_point(), bits], result.int_repr()]
    scales, zero_points = result.q_per_channel_scales(), result.q_per_channel_zero_points()
    header = [PER_CHANNEL_RESULT, in_place, dtype, result.q_per_channel_axis()]
    return [header, result.int_repr(), scales, zero_points]


def _identity_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of a non-strided tensor's last part: address, shape and dtype. It is empty for a strided tensor."""
    if tensor.layout is torch.strided:
        return ()
    *_, values = _parts_of(tensor, 0)
    return values.data_ptr(), values.shape, values.dtype
