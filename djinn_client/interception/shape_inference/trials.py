"""Trials: run the CPU kernel on tensors of one element to learn which arguments it rejects.

Meta kernels accept dtypes, numbers and dimensions that kernels refuse. Such an op would be recorded and fail on the
executor, and the user's line would be only a note in the message. So the client tries the listed ops, and all pointwise
ops, before it infers a call. If the CPU kernel refuses small tensors, the client asks the executor. The executor's
error is raised on the user's line, or its result is used. The client remembers the executor's answer for dtypes without
a CPU kernel. Errors about sizes do not count, because small tensors have other sizes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.inference_cache import inference_cache
from djinn_client.interception.shape_inference.write_checks import returning
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.tracebacks import warn_user
from djinn_core import torch_private
from djinn_core.ir.operators import is_custom, split_name
from djinn_core.ir.values import TensorMeta, contiguous_strides, tensor_meta

aten = torch.ops.aten
# Ops that are tried, named without the `_` of in-place ops. One element must not harm their kernels, and no number in
# their arguments may make large tensors.
_TRIED: Final = frozenset(
    (
        "__and__ __or__ __xor__ _cdist_forward _fused_dropout _linalg_eigh _log_softmax _prelu_kernel _softmax _unsafe_masked_index "
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d abs "
        "addbmm addmm addmv addr amax amin aminmax arange argmax argmin avg_pool1d avg_pool2d avg_pool3d baddbmm bernoulli "
        "binary_cross_entropy bmm bucketize cauchy complex constant_pad_nd convolution count_nonzero cummax cummin cumprod cumsum dot "
        "embedding_renorm exponential eye fill flip full full_like gather gcd ge geometric glu grid_sampler_2d gt hardswish heaviside "
        "histc huber_loss im2col index index_add index_copy index_fill index_put index_select isin kaiser_window kthvalue lcm le "
        "linalg_cross linalg_vector_norm linear linspace log_normal log_sigmoid_forward logcumsumexp logspace logsumexp lt masked_fill "
        "masked_scatter matmul max max_pool2d_with_indices max_pool3d_with_indices mean median min mm mode mse_loss multi_margin_loss "
        "multinomial mv nanmedian nansum native_batch_norm native_dropout native_layer_norm new_full nll_loss2d_forward nll_loss_forward "
        "normal poisson polar prod put rand_like randint_like randn randn_like random randperm reflection_pad1d reflection_pad2d renorm "
        "rrelu_with_noise rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted segment_reduce smooth_l1_loss sort std "
        "std_mean sum take threshold topk trace tril triu uniform upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot"
    ).split()
)
_ABOUT_SIZES: Final = re.compile(
    r"(?<!non-zero )[Ss]izes?(?! 0$)|shape|kernel|small|length|groups|channels|number of elements"
)
_SIZES: Final = frozenset({"size", "pad", "output_size"})
_PADDINGS: Final = frozenset({"padding", "output_padding"})
_COUNTS: Final = {"steps": 2, "bins": 2, "n": 2, "m": 2, "window_length": 2, "k": 1, "num_samples": 1}
_CHOICES: Final = frozenset(
    {torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Generator, list, tuple}
)
_RANGE: Final = {"start": 0, "end": 1, "step": 1}
# These ops write a number to a single element without a check, but check it if there are no elements.
_FILLING: Final = frozenset({"fill", "full", "full_like", "new_full"})


def refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Return the error with which the CPU kernel refuses the call with small tensors instead of the meta tensors.

    Return None if the op is not tried, the kernel accepts the call, or its error does not hold for large tensors.
    """
    if is_custom(func):
        return None
    pointwise = is_pointwise(func) or {torch.Tag.pointwise, torch.Tag.out}.issubset(func.tags)
    if not (pointwise or _op_packet(func) in _TRIED or any(isinstance(a, complex) for a in (*args, *kwargs.values()))):
        return None
    if any(isinstance(a, torch.Tensor) and a.dtype is torch.uint8 for a in _indices(func, args)):
        return None  # a uint8 mask, for which the kernel warns
    try:
        try_small(func, args, kwargs)
    except NotImplementedError as error:
        supported = _kinds(func, args, kwargs) in inference_cache.supported
        # A capture starts no server.
        return None if supported or (current().captures and not port.is_open()) else error
    except Exception as error:
        return None if _ABOUT_SIZES.search(str(error)) else error
    return None


def note_support(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record that the executor has computed `func` with arguments of these dtypes."""
    inference_cache.supported.add(_kinds(func, args, kwargs))


def _kinds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of an op with its argument dtypes and types.

    A 0-dim CPU tensor differs from other tensors, as in kernels.
    """
    return (func, *(_kind(a) for a in (*args, *kwargs.values())))


def _kind(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return tuple(map(_kind, argument))
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.device.type == "cpu"
    return argument if type(argument) is torch.dtype else type(argument)


def _op_packet(func: Any) -> str:
    packet = split_name(func.name())[0]
    return packet if packet.endswith("__") else packet.removesuffix("_")


def may_be_refused(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if kernels may refuse sizes that a trial does not check, so that the executor must decide."""
    may_refuse = _MAY_REFUSE.get(func)
    return may_refuse is not None and may_refuse(*args, **kwargs)


def _gradient_unlike(gradient: torch.Tensor, operand: torch.Tensor, **_: Any) -> bool:
    return gradient.shape != operand.shape


def _multinomial(operand: torch.Tensor, samples: int, replacement: bool = False, **_: Any) -> bool:
    categories = operand.shape[-1] if operand.dim() else 0
    return categories > 1 << 24 or (not replacement and samples > categories)


def _as_strided_scatter(
    operand: torch.Tensor, _source: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> bool:
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=False)) + (offset or 0)
    return 0 not in size and reach >= operand.numel()


def _masked_scatter(operand: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if the mask does not broadcast to the operand, or may select more elements than the source has."""
    fits = mask.shape == operand.shape or torch.broadcast_shapes(mask.shape, operand.shape) == operand.shape
    return not fits or source.numel() < operand.numel()


_MAY_REFUSE: Final[Mapping[Any, Callable[..., bool]]] = {
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.gelu_backward.default: _gradient_unlike,
    aten.gelu_backward.grad_input: _gradient_unlike,
    aten.masked_scatter_.default: _masked_scatter,
    aten.multinomial.default: _multinomial,
}


def check_arguments(func: Any, args: Sequence[Any]) -> None:
    """Check the sizes of indices. Warn on the user's line if kernels warn of uint8 masks.

    Raises:
        IndexError: the error of eager PyTorch.
    """
    _check_indices(args[0] if args else None, _indices(func, args))


def _check_indices(source: Any, indices: Sequence[torch.Tensor | None]) -> None:
    dim, shapes = 0, []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            dim += 1
            shapes += [] if index is None else [index.shape]
            continue
        if index.dtype is torch.uint8:
            warn_user("indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead.")
        for axis, (size, limit) in enumerate(zip(index.shape, source.shape[dim:], strict=False)):
            if size != limit:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {axis} does not match the shape of the indexed tensor "
                    f"{list(source.shape)} at index {dim + axis}"
                )
        dim += index.dim()
    if shapes and broadcast([tuple(shape) for shape in shapes]) is None:
        listing = ", ".join(str(list(shape)) for shape in shapes)
        raise IndexError(f"shape mismatch: indexing tensors could not be broadcast together with shapes {listing}")


def _indices(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    return args[1] if _op_packet(func) in {"index", "index_put"} else ()


_MASKS: Final = frozenset({torch.bool, torch.uint8})


def warns_each_time(func: Any, args: Sequence[Any], dtypes: Iterable[torch.dtype]) -> bool:
    """Return True if kernels warn at each call with these numbers or result dtypes, so that no call may be cached."""
    if torch.complex32 in dtypes and torch.is_warn_always_enabled():
        return True
    if func not in {getattr(aten.random_, "from"), aten.random_.to} or not args[0].dtype.is_floating_point:
        return False
    whole = 2 / torch.finfo(args[0].dtype).eps  # up to this number the dtype holds all integers
    return any(type(number) is int and abs(number) > whole for number in args[1:])


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Return True if `func` is elementwise, and returns or writes one tensor."""
    schema = torch_private.schema_of(func)
    returns, parameters = schema.returns, schema.arguments
    if is_custom(func) or torch.Tag.pointwise not in func.tags or len(returns) != 1 or str(returns[0].type) != "Tensor":
        return False
    targets = [a for a in parameters if a.alias_info is not None]
    if returns[0].alias_info is None:
        return not targets
    return targets == parameters[:1] and bool(targets[0].alias_info.is_write)


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the common shape to which these shapes broadcast, or None if they do not broadcast."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    sizes = [1] * rank
    for shape in shapes:
        axis = rank - len(shape)
        for size in shape:
            if size != 1:
                if sizes[axis] not in {1, size}:
                    return None
                sizes[axis] = size
            axis += 1
    return tuple(sizes)


def try_small(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the CPU kernel's result for these arguments, with tensors of one element. Draws no random number.

    The element is 1 unless it is an index, because kernels refuse division by 0.

    Raises:
        Exception: the error of eager PyTorch, or an error because small tensors do not fit each other.
    """
    names = [a.name for a in torch_private.schema_of(func).arguments]
    length = 0 if _op_packet(func) in _FILLING else 1
    fill_value = int(torch.Tag.pointwise in func.tags or func is aten.multinomial.default)
    small = [_shrunk(name, argument, length, fill_value) for name, argument in zip(names, args, strict=False)]
    if func is aten.arange.start_step:
        small = [_RANGE[name] for name in names[: len(args)]]
    keywords = {name: _shrunk(name, value, length, fill_value) for name, value in kwargs.items()}
    if "correction" in names:
        keywords["correction"] = -1  # kernels warn of a variance of at most one element
    return _call_without_drawing(func, small, keywords)


def _call_without_drawing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op without drawing numbers from the CPU's generator.

    A few ops accept no generator. The state of the CPU's generator is restored after them. Another thread that draws at
    that moment gets the same numbers twice.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    if any(a.name == "generator" for a in torch_private.schema_of(func).arguments):
        return func(*args, **{**kwargs, "generator": torch.Generator()})
    state = torch.default_generator.get_state()
    try:
        return func(*args, **kwargs)
    finally:
        torch.default_generator.set_state(state)


def try_overlapping(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the CPU kernel on small tensors that overlap themselves as the operands of the call do.

    Draws no random number.

    Raises:
        RuntimeError: the error of eager PyTorch, if the kernel refuses to write to elements that share memory.
    """
    fill_value, small = int(torch.Tag.pointwise in func.tags), dict[int, torch.Tensor]()

    def overlapping(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [overlapping(item) for item in argument]
        if not isinstance(argument, LazyTensor):
            return torch.device("cpu") if isinstance(argument, torch.device) else argument
        meta = argument.remote.meta
        sizes = [min(n, 2) if step else min(n, 1) for n, step in zip(meta.shape, meta.stride, strict=True)]
        view = torch.full(sizes, fill_value, dtype=meta.dtype).expand([min(n, 2) for n in meta.shape])
        return small.setdefault(id(argument), view)

    try:
        with torch.no_grad():  # the kernel's warning comes on the user's line
            keywords = {name: overlapping(value) for name, value in kwargs.items() if name != "generator"}
            _call_without_drawing(func, [overlapping(argument) for argument in args], keywords)
    except Exception as error:
        if "more than one element of the written-to tensor" in str(error):
            raise RuntimeError(str(error)) from None
        # other errors about small tensors do not hold for large ones


class PointwiseResult(msgspec.Struct, frozen=True):
    """Metadata of a pointwise op's result.

    Attributes:
        meta: metadata of the result.
        target: the operand that the op writes and that gets this metadata, or None if the result is a new tensor.
    """

    meta: TensorMeta
    target: LazyTensor | None


def pointwise_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: int) -> PointwiseResult | None:
    """Return the result of a pointwise op, found by a trial. Return None if the meta kernel must run.

    PyTorch's meta kernels of these ops are written in Python. They take fifty times as long as the CPU kernel for one
    element. The trial gives the dtype. The shape follows from the operands' shapes. Row-major operands give a row-
    major result.
    """
    out = kwargs.get("out")
    variant = func if out is None else returning(func)
    if variant is None or not is_pointwise(variant) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    keywords = kwargs if out is None else {name: value for name, value in kwargs.items() if name != "out"}
    arguments = (*args, *keywords.values())
    tensors = [a for a in arguments if isinstance(a, LazyTensor)]
    if not tensors or not all(_is_plain(t.remote.meta) for t in tensors) or any(map(_is_unsuitable, arguments)):
        return None
    shape = _common_shape(variant, [t.remote.meta.shape for t in tensors])
    if shape is None:
        return None
    try:
        result = try_small(variant, args, keywords)
    except Exception:
        return None  # the meta kernel raises PyTorch's error
    meta = tensor_meta(shape, contiguous_strides(shape), 0, result.dtype, device)
    target = args[0] if torch_private.schema_of(variant).returns[0].alias_info is not None else out
    return PointwiseResult(meta, None) if target is None else _result_in_target(meta, target, tensors)


def _result_in_target(meta: TensorMeta, target: Any, operands: Sequence[LazyTensor]) -> PointwiseResult | None:
    """Return the result of an op that writes to `target`.

    Return None if the meta kernel must decide, for example because the dtype differs from that of `meta`.
    """
    before = target.remote.meta if isinstance(target, LazyTensor) else None
    if before is None or before.dtype is not meta.dtype or before.conj or before.neg:
        return None
    if before.shape == meta.shape and _is_plain(before):
        return PointwiseResult(before, target)
    if before.numel or any(o.remote.storage == target.remote.storage for o in operands):
        return None
    return PointwiseResult(tensor_meta(meta.shape, meta.stride, before.offset, meta.dtype, before.device), target)


def _is_plain(meta: TensorMeta) -> bool:
    """Return True if a tensor is row-major and has elements."""
    return 0 not in meta.shape and meta.stride == contiguous_strides(meta.shape) and not (meta.conj or meta.neg)


def _is_unsuitable(argument: Any) -> bool:
    """Return True for arguments that may affect more than the dtype, and for CPU tensors with dimensions."""
    if isinstance(argument, torch.Tensor):
        return not isinstance(argument, LazyTensor) and argument.dim() > 0
    return type(argument) in _CHOICES


def _common_shape(func: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the broadcast shape of the operands, or None if the shapes do not fit or the op does not broadcast."""
    if "_backward" in func.name() and any(shape != shapes[0] for shape in shapes):
        return None
    return broadcast(shapes)


def _shrunk(name: str, argument: Any, length: int, fill_value: int) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dim() == 0 and argument.device.type == "cpu":
        return argument  # a number, which affects dtypes differently than a tensor
    if isinstance(argument, torch.Tensor):
        shape = (0,) if name == "out" else [length if n else 0 for n in argument.shape]
        return torch.full(shape, 1 if name == "lengths" else fill_value, dtype=argument.dtype)
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    if name in _COUNTS and type(argument) is int:
        return min(argument, _COUNTS[name])
    if name in _SIZES and isinstance(argument, (list, tuple)):
        return [length] * len(argument)
    if name in _PADDINGS and isinstance(argument, (list, tuple)):
        return [min(n, 1) for n in argument]
    if isinstance(argument, (list, tuple)):
        return [_shrunk(name, item, length, fill_value) for item in argument]
    return argument
