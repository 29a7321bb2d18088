"""Checks that kernels make before they write. Meta kernels do not make them.

Without these checks, an op that PyTorch refuses would be recorded. It would fail on the executor later, and make its
operand unusable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core import torch_private
from djinn_core.ir.operators import OWN_OPERATORS, is_custom, resolve, split_name
from djinn_core.ir.program import Call
from djinn_core.ir.values import TensorMeta, contiguous_strides

_COPY = torch.ops.aten.copy_.default
# These ops do not write even to a complete operand.
_REFUSE_OPERANDS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "_index_put_impl_ cat.out gather.out index_add_ index_copy_ index_fill_.int_Scalar index_fill_.int_Tensor index_put_ "
        "index_reduce_ index_select.out kthvalue.values linalg_cross.out masked_select.out put_ scatter_.src scatter_add_ "
        "scatter_reduce_.two stack.out take.out"
    ).split()
)

# Position of an operand that the kernel reads completely before it writes, so that it may overlap.
_READ_BEFORE = {
    "aten::index_fill_.int_Tensor": 2,
    "aten::ldexp.out": 1,
    "aten::ldexp_": 1,
    "aten::masked_fill_.Tensor": 2,
    "aten::mvlgamma.out": 0,
}

# These ops do not write to a part of an operand. Pointwise ops do not, either.
_REFUSE_PARTS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "__irshift__.Tensor addbmm.out addmm.out addmv.out addr.out addr_ aminmax.out baddbmm.out bernoulli.out "
        "binary_cross_entropy_backward.grad_input copysign_.Tensor cumprod.out cumsum.out elu.out elu_backward.grad_input eq_.Tensor "
        "floor_divide.out floor_divide_.Tensor gcd_ ge_.Tensor gelu.out gelu_backward.grad_input glu.out glu_backward.grad_input "
        "gt_.Tensor hardshrink.out hardshrink_backward.grad_input hardsigmoid.out hardsigmoid_backward.grad_input hardswish.out "
        "hardtanh.out hardtanh_backward.grad_input heaviside_ huber_loss.out huber_loss_backward.out index.Tensor_out index_add.out "
        "index_copy.out index_reduce.out lcm_ le_.Tensor leaky_relu.out leaky_relu_backward.grad_input "
        "log_sigmoid_backward.grad_input logcumsumexp.out lt_.Tensor masked_fill_.Scalar masked_fill_.Tensor max.dim_max min.dim_min "
        "mish.out mode.values mse_loss.out mse_loss_backward.grad_input ne_.Tensor normal.Tensor_Tensor_out normal.Tensor_float_out "
        "renorm.out scatter.reduce_out scatter.src_out scatter.value_out scatter_.reduce scatter_add.out scatter_reduce.two_out "
        "smooth_l1_loss.out smooth_l1_loss_backward.grad_input soft_margin_loss.out soft_margin_loss_backward.grad_input softplus.out "
        "softplus_backward.grad_input softshrink.out softshrink_backward.grad_input sort.values sort.values_stable topk.values "
        "triangular_solve.X where.self_out"
    ).split()
)

# Elementwise ops without PyTorch's pointwise tag.
_POINTWISE_IN_PLACE = frozenset(
    "copysign_ eq_ floor_divide_ gcd_ ge_ gt_ heaviside_ lcm_ le_ lt_ masked_fill_ ne_ true_divide_".split()
)
_POINTWISE = frozenset({"aten::floor_divide.out", "aten::where.self_out"})


def check_targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise an error if the op writes into a CPU tensor.

    Raises:
        RuntimeError: an operand that the op writes is on the CPU, as on every accelerator.
    """
    schema = {a.name: a for a in torch_private.schema_of(func).arguments}
    for name, argument in (*zip(schema, args, strict=False), *kwargs.items()):
        info = schema[name].alias_info
        if info is None or not info.is_write:
            continue
        targets = argument if isinstance(argument, (list, tuple)) else (argument,)
        if any(isinstance(t, torch.Tensor) and not isinstance(t, LazyTensor) for t in targets):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func.name()} cannot write its result on "
                f"{DEVICE_NAME} to `{name}`, which is on another device"
            )


def check_shape(func: Any, args: Sequence[Any]) -> None:
    """Raise an error if an in-place op's result does not have its target's shape. The arguments are meta tensors.

    Raises:
        RuntimeError: the error of eager PyTorch.
    """
    packet = split_name(func.name())[0]
    pointwise = torch.Tag.pointwise in func.tags or packet in _POINTWISE_IN_PLACE
    if not pointwise or not packet.endswith("_") or packet.endswith("__"):
        return
    shape = torch.broadcast_shapes(*[a.shape for a in args if isinstance(a, torch.Tensor)])
    if shape != args[0].shape:
        shapes = f"{list(args[0].shape)} doesn't match the broadcast shape {list(shape)}"
        raise RuntimeError(f"output with shape {shapes}")


def _writes_out(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in torch_private.schema_of(func).arguments)


def may_refuse_target(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if an `out=` tensor has another dtype than the result. The arguments are meta tensors.

    Some kernels cast in this case, others raise an error. Meta kernels do not always agree with them.
    """
    names = _targets(func)
    twin = returning(func) if names else None
    if twin is None:
        return False
    result = twin(*args, **{name: value for name, value in kwargs.items() if name not in names})
    results = result if isinstance(result, (list, tuple)) else [result]
    targets = [kwargs[name] for name in names]
    flat = targets[0] if len(targets) == 1 and isinstance(targets[0], (list, tuple)) else targets
    return any(t.dtype != r.dtype for t, r in zip(flat, results, strict=True))


@functools.cache
def _targets(func: Any) -> tuple[str, ...]:
    """Return the names of the op's `out=` arguments."""
    return tuple(a.name for a in torch_private.schema_of(func).arguments if a.kwarg_only and a.is_out)


@functools.cache
def returning(func: Any) -> Any:
    """Return the variant of `func` that returns its results instead of writing to `out=` arguments, or None if none exists."""
    if is_custom(func):
        return None
    packet = getattr(torch.ops.aten, func.name().removeprefix("aten::").partition(".")[0])
    signature = [(a.name, str(a.type)) for a in torch_private.schema_of(func).arguments if not a.is_out]
    for overload in (getattr(packet, name) for name in packet.overloads()):
        offered_signature = [(a.name, str(a.type)) for a in torch_private.schema_of(overload).arguments]
        if offered_signature == signature and not _writes_out(overload):
            return overload
    return None


def only_kernels_know(func: Any, call: Call) -> bool:
    """Return True if kernels check or decide more than meta kernels do, so that only the executor knows the results.

    Kernels refuse to write to overlapping elements. They lay out resized tensors like the inputs.
    """
    if any(overlaps_itself(call.operands[w]) for w in call.writes):
        return True
    if not call.changes or not _targets(func):
        return False
    return _is_lapack(func) or not all(m.stride == contiguous_strides(m.shape) for m in call.operands)


@functools.cache
def _is_lapack(func: Any) -> bool:
    """Return True if LAPACK computes the op. LAPACK lays out matrices by columns."""
    packet = func.name().removeprefix("aten::").partition(".")[0]
    return "linalg" in packet or packet in {"geqrf", "ormqr", "triangular_solve", "cholesky", "lu_unpack", "qr"}


def overlaps_itself(meta: TensorMeta) -> bool:
    """Return True if elements share memory because a dimension has stride 0."""
    return any(not step and size > 1 for size, step in zip(meta.shape, meta.stride, strict=True)) and meta.numel > 0


@functools.cache
def raises_versions(op: str) -> bool:
    """Return True if recording `op` must increment the `_version` of its targets.

    This is necessary if neither autograd nor a decomposed op increments it.
    """
    return op not in OWN_OPERATORS and torch_dispatch.kernels_raise_versions(resolve(op))


@functools.cache
def refuses_overlap(op: str) -> bool:
    """Return True if kernels of `op` refuse operands that overlap the written tensor. Kernels of ops over lists do not."""
    if op in OWN_OPERATORS:
        return False
    func = resolve(op)
    return func is _COPY or op in _REFUSE_OPERANDS or op in _REFUSE_PARTS or torch.Tag.pointwise in func.tags


def check_overlap(op: str, position: int, operands: Sequence[LazyTensor]) -> None:
    """Raise an error if the op writes memory that it also reads. Call this only if `refuses_overlap(op)`.

    `position`: position of the written operand.

    Raises:
        RuntimeError: the error of eager PyTorch, under the same conditions.
    """
    target = operands[position].remote
    for other_position, operand in enumerate(operands):
        value = operand.remote
        if value.storage != target.storage or other_position in {position, _READ_BEFORE.get(op)}:
            continue
        is_same = value.meta is target.meta
        if (is_same and target.meta.numel and op in _REFUSE_OPERANDS) or (
            not is_same and _overlap(target.meta, value.meta)
        ):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation."
            )


@functools.cache
def refuses_resize(op: str) -> bool:
    """Return True if kernels of `op` do not resize a target that they read."""
    return op in _POINTWISE or (op not in OWN_OPERATORS and torch.Tag.pointwise in resolve(op).tags)


def check_resize(op: str, position: int, meta: TensorMeta, operands: Sequence[LazyTensor]) -> None:
    """Raise an error if the op would resize a target that it also reads, and its kernels refuse this (`refuses_resize`).

    `position`: position of the target among the operands. `meta`: its new metadata.

    Raises:
        RuntimeError: the error of eager PyTorch.
    """
    target = operands[position]
    if sum(operand is target for operand in operands) > 1 and refuses_resize(op):
        shapes = f"{list(target.shape)} doesn't match the broadcast shape {list(meta.shape)}"
        raise RuntimeError(f"output with shape {shapes}")


def _overlap(a: TensorMeta, b: TensorMeta) -> bool:
    """Return True if two dense tensors of one storage overlap, unless they have equal elements in equal order."""
    if not (a.numel and b.numel and _is_dense(a) and _is_dense(b)):
        return False
    (start, end), (other_start, other_end) = _range(a), _range(b)
    if (start, end) == (other_start, other_end):
        return a.stride != b.stride
    return start < other_end and other_start < end


def _range(meta: TensorMeta) -> tuple[int, int]:
    return meta.offset * meta.dtype.itemsize, (meta.offset + meta.numel) * meta.dtype.itemsize


def _is_dense(meta: TensorMeta) -> bool:
    """Return True if the elements fill one contiguous memory range, each exactly once."""
    step = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(meta.shape, meta.stride, strict=True) if size != 1
    ):
        if stride != step:
            return False
        step *= size
    return True
