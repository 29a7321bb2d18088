"""Checks of arguments that every kernel refuses and meta kernels accept: the error is raised on the user's line.

Without these checks such an op would be recorded and fail on the executor, where its line is a note in a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from djinn_client.interception.shape_inference.small_trials import try_small
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.tracebacks import warn_user

aten = torch.ops.aten
Check = Callable[..., None]

# As C++ calls dtypes in messages; the others by their own names.
_NAMES = {torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.int64: "long int"}


def check_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that no kernel accepts; they are meta tensors.

    Raises:
        Exception: as eager PyTorch.
    """
    check = _CHECKS.get(func)
    if check is not None:
        check(*args, **kwargs)
    if func in _TRIED or any(isinstance(a, complex) for a in (*args, *kwargs.values())):
        _try(func, args, kwargs)


def check_extent(
    tensor: LazyTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    """Refuse a view of elements that the storage does not have; recorded calls do not tell how large it is.

    Raises:
        RuntimeError: as eager PyTorch.
    """
    value = tensor.remote
    offset = value.meta.offset if storage_offset is None else storage_offset
    itemsize, held = value.meta.dtype.itemsize, value.storage.nbytes
    reach = (sum((n - 1) * step for n, step in zip(size, stride, strict=False)) + offset + 1) * itemsize
    if 0 not in size and reach > held:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {itemsize} "
            f"requiring a storage size of {reach} are out of bounds for storage of size {held}"
        )


def _try(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU's kernel says of dtypes and numbers."""
    try:
        try_small(func, args, kwargs)
    except RuntimeError as error:
        if _ABOUT_VALUES.search(str(error)):
            raise


def check_distribution(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse parameters that a distribution does not have, as a CPU tensor without elements does.

    Raises:
        Exception: as eager PyTorch.
    """
    if func in _DISTRIBUTIONS:
        given = {name: value for name, value in kwargs.items() if name != "generator"}
        func(torch.empty(0, dtype=args[0].dtype), *args[1:], **given)


def warns_each_time(func: Any, args: Sequence[Any], dtypes: Iterable[torch.dtype]) -> bool:
    """True if kernels warn of these numbers, or of results of these dtypes, at each call, so that none may be recorded without inference."""
    if torch.complex32 in dtypes and torch.is_warn_always_enabled():
        return True
    if func not in _RANDOM_INTEGERS or not args[0].dtype.is_floating_point:
        return False
    whole = 2 / torch.finfo(args[0].dtype).eps  # up to here the dtype holds all integers
    return any(type(number) is int and abs(number) > whole for number in args[1:])


def may_be_refused(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if kernels refuse such arguments, or may, and meta kernels take them: the executor decides. They are meta tensors."""
    refuses = _REFUSALS.get(func)
    return refuses is not None and refuses(*args, **kwargs)


def _same_dtype(*positions: int) -> Check:
    """The tensors at these positions must be of one dtype."""

    def check(*args: Any, **_: Any) -> None:
        given = [args[p].dtype for p in positions if p < len(args) and args[p] is not None]
        if len(set(given)) > 1:
            first, second = given[0], next(d for d in given if d != given[0])
            raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {_name(first)} != {_name(second)}")

    return check


def _matrices(left: int, right: int) -> Check:
    """Two matrices that are multiplied, the last two operands of the op."""
    same_dtype = _same_dtype(*range(left, right + 1)) if left == 0 else _same_dtype(0, left, right)

    def check(*args: Any, **_: Any) -> None:
        a, b = args[left], args[right]
        if a.dim() == b.dim() == 2 and a.shape[1] != b.shape[0]:
            shapes = f"{a.shape[0]}x{a.shape[1]} and {b.shape[0]}x{b.shape[1]}"
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
        same_dtype(*args)

    return check


def _linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    if given.dim() and weight.dim() == 2 and given.shape[-1] != weight.shape[1]:
        rows = given.numel() // given.shape[-1] if given.shape[-1] else 0
        shapes = f"{rows}x{given.shape[-1]} and {weight.shape[1]}x{weight.shape[0]}"
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
    _same_dtype(0, 1, 2)(given, weight, bias)


def _convolution(
    given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any, **__: Any
) -> None:
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != given.dtype:
            raise RuntimeError(
                f"Input type ({_name(given.dtype)}) and {name} type ({_name(other.dtype)}) should be the same"
            )


def _dimension(given: torch.Tensor, dim: int, *_: Any, **__: Any) -> None:
    most = max(given.dim(), 1)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")


def _not_empty(name: str) -> Check:
    def check(given: torch.Tensor, *_: Any) -> None:
        if not given.numel():
            raise RuntimeError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with "
                "the 'dim' argument."
            )

    return check


def _dimension_not_empty(name: str) -> Check:
    def check(given: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> None:
        _dimension(given, dim)
        if given.dim() and not given.shape[dim]:
            raise IndexError(f"{name}(): Expected reduction dim {dim % given.dim()} to have non-zero size.")

    return check


def _index_select(given: torch.Tensor, dim: int, index: torch.Tensor) -> None:
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.dtype not in {torch.int32, torch.int64}:
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    _dimension(given, dim)


def _index(given: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any, **__: Any) -> None:
    dim = 0
    for index in indices:
        if index is not None and index.dtype == torch.uint8:
            warn_user(_BYTE_MASK)
        if index is not None and index.dtype in {torch.bool, torch.uint8}:
            _mask(given, index, dim)
            dim += index.dim()
        else:
            dim += 1
    if any(i is not None and i.dtype.is_floating_point for i in indices):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    _fit_each_other([i.shape for i in indices if i is not None and i.dtype not in {torch.bool, torch.uint8}])


def _fit_each_other(shapes: Sequence[torch.Size]) -> None:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        said = ", ".join(str(list(shape)) for shape in shapes)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {said}"
        ) from None


def _mask(given: torch.Tensor, mask: torch.Tensor, first: int) -> None:
    for dim, (size, wanted) in enumerate(zip(mask.shape, given.shape[first:], strict=False)):
        if size != wanted:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape of the indexed tensor "
                f"{list(given.shape)} at index {first + dim}"
            )


def _warns_of_expanded(name: str, written: str) -> Check:
    """A warning about filling an expanded tensor with the op `name`, which an assignment like `written` is as well."""
    message = (
        f"Use of {name} on expanded tensors is deprecated. Please clone() the tensor before performing this operation. "
        f"This also applies to advanced indexing e.g. {written}"
    )

    def check(given: torch.Tensor, *_: Any, **__: Any) -> None:
        if any(not step and size > 1 for size, step in zip(given.shape, given.stride(), strict=True)) and given.numel():
            warn_user(message)

    return check


def _both(*checks: Check) -> Check:
    def check(*args: Any, **kwargs: Any) -> None:
        for one in checks:
            one(*args, **kwargs)

    return check


def _nothing_there(given: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any, **__: Any) -> bool:
    """Elements of a dimension that has none."""
    sizes = [n for n, i in zip(given.shape, indices, strict=False) if i is not None]
    return 0 in sizes and all(i is None or i.numel() for i in indices)


def _convolves(
    _given: torch.Tensor, _weight: torch.Tensor, _bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> bool:
    positive = all(n > 0 for n in (*stride, *dilation))
    return not positive or any(n < 0 for n in (*padding, *rest[1]))


def _gradient_unlike(gradient: torch.Tensor, given: torch.Tensor, **_: Any) -> bool:
    return gradient.shape != given.shape or gradient.dtype != given.dtype


def _beyond_reductions(given: torch.Tensor, *_: Any, **__: Any) -> bool:
    return given.dim() > 64


def _beyond_places(given: torch.Tensor, *_: Any, **__: Any) -> bool:
    return given.dim() > 64 or given.dtype == torch.bool


def _is_bool_or_complex(given: torch.Tensor, *_: Any, **__: Any) -> bool:
    return given.dtype == torch.bool or given.is_complex()


def _multinomial(given: torch.Tensor, samples: int, replacement: bool = False, **_: Any) -> bool:
    categories = given.shape[-1] if given.dim() else 0
    return samples <= 0 or categories > 1 << 24 or (not replacement and samples > categories)


def _as_strided_scatter(
    given: torch.Tensor, _source: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> bool:
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=False)) + (offset or 0)
    return 0 not in size and reach >= given.numel()


def _scatters_in_place(given: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> bool:
    """A mask of another shape, or one that may choose more elements than there are to take their place."""
    fits = mask.shape == given.shape or torch.broadcast_shapes(mask.shape, given.shape) == given.shape
    return not fits or mask.dtype != torch.bool or source.numel() < given.numel()


def _written_like(name: str, position: int) -> Check:
    def check(*args: Any, **_: Any) -> None:
        if args[position].dtype != args[0].dtype:
            raise RuntimeError(
                f"{name}(): self ({_name(args[0].dtype)}) and source ({_name(args[position].dtype)}) must have the same "
                "scalar type"
            )

    return check


def _targets(_given: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> None:
    if target.dtype not in {torch.int64, torch.uint8}:
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {_name(target.dtype)}")


def _loss(given: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> None:
    if given.dtype != target.dtype:
        raise RuntimeError(f"Found dtype {_name(target.dtype)} but expected {_name(given.dtype)}")


def _spread(given: torch.Tensor, *_: Any, **__: Any) -> None:
    if not (given.dtype.is_floating_point or given.dtype.is_complex):
        raise RuntimeError("std and var only support floating point and complex dtypes")


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, {"float32": "float", "int32": "int"}.get(str(dtype)[6:], str(dtype)[6:]))


_ABOUT_VALUES = re.compile(r"without overflow|[Cc]omplex|only supports boolean masks|different dtypes")
# Ops whose meta kernels take dtypes that no kernel takes.
_TRIED = frozenset({
    aten.heaviside.default,
    aten.heaviside_.default,
    aten.heaviside.out,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
})  # fmt: skip

_BYTE_MASK = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."

_MASKED = _warns_of_expanded("masked_fill_", "tensor[mask] = scalar")
_FILLED = _warns_of_expanded("index_fill_", "tensor[index] = scalar")
_PUT = _warns_of_expanded("index_put_", "tensor[indices] = tensor")

_RANDOM_INTEGERS = frozenset({getattr(aten.random_, "from"), aten.random_.to})
_DISTRIBUTIONS = frozenset({
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.uniform_.default,
})  # fmt: skip

_REFUSALS: dict[Any, Callable[..., bool]] = {
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.bucketize.Tensor: lambda _, boundaries, **__: boundaries.dim() != 1,
    aten.complex.default: lambda real, imaginary: real.dtype != imaginary.dtype,
    aten.polar.default: lambda length, angle: length.dtype != angle.dtype,
    aten.convolution.default: _convolves,
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), _beyond_places),
    aten.nansum.default: _beyond_reductions,
    **dict.fromkeys((aten.histc.default, aten.topk.default), _is_bool_or_complex),
    aten.embedding_renorm_.default: lambda weight, *_: not (weight.is_floating_point() or weight.is_complex()),
    **dict.fromkeys((aten.gelu_backward.default, aten.gelu_backward.grad_input), _gradient_unlike),
    aten.index.Tensor: _nothing_there,
    aten.index_select.default: lambda given, *_: 0 in given.shape,
    aten.masked_scatter.default: lambda _, mask, __: mask.dtype != torch.bool,
    aten.masked_scatter_.default: _scatters_in_place,
    aten.multinomial.default: _multinomial,
}

_CHECKS: dict[Any, Check] = {
    aten.mm.default: _matrices(0, 1),
    aten.addmm.default: _matrices(1, 2),
    aten.bmm.default: _same_dtype(0, 1),
    aten.baddbmm.default: _same_dtype(0, 1, 2),
    aten.mv.default: _same_dtype(0, 1),
    aten.addmv.default: _same_dtype(0, 1, 2),
    aten.dot.default: _same_dtype(0, 1),
    aten.vdot.default: _same_dtype(0, 1),
    aten.matmul.default: _same_dtype(0, 1),
    aten.linear.default: _linear,
    aten.convolution.default: _convolution,
    aten._softmax.default: _dimension,
    aten._log_softmax.default: _dimension,
    aten.max.default: _not_empty("max"),
    aten.min.default: _not_empty("min"),
    aten.max.dim: _dimension_not_empty("max"),
    aten.min.dim: _dimension_not_empty("min"),
    aten.median.dim: _dimension_not_empty("median"),
    aten.nanmedian.dim: _dimension_not_empty("median"),
    aten.mode.default: _dimension_not_empty("mode"),
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.masked_fill_.Scalar: _MASKED,
    aten.masked_fill_.Tensor: _MASKED,
    aten.index_fill_.int_Scalar: _FILLED,
    aten.index_fill_.int_Tensor: _FILLED,
    aten.index_put.default: _index,
    aten.index_put_.default: _both(_index, _PUT),
    aten.index_add.default: _written_like("index_add_", 3),
    aten.index_add_.default: _written_like("index_add_", 3),
    aten.index_copy.default: _written_like("index_copy_", 3),
    aten.index_copy_.default: _written_like("index_copy_", 3),
    aten.nll_loss_forward.default: _targets,
    aten.nll_loss2d_forward.default: _targets,
    aten.binary_cross_entropy.default: _loss,
    aten.var.correction: _spread,
    aten.std.correction: _spread,
    aten.var_mean.correction: _spread,
    aten.std_mean.correction: _spread,
}
