"""Ops on sparse COO tensors.

What only looks at a sparse tensor, or makes one of indices and values, happens here without a message. Every other op is one
instruction, `SPARSE_CALL`, whose operands are the strided parts of its sparse arguments. How many elements its results have
depends on data, so the executor is asked: a round trip each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.device.current_device import current_device, existing_index
from djinn_core.interception.device.device_state import DEVICE_NAME, Handler
from djinn_core.interception.dispatch import handles, record, slots_of
from djinn_core.interception.recording.append import append
from djinn_core.interception.recording.encode import encode_form
from djinn_core.interception.recording.recorder import SyncRequest, current
from djinn_core.interception.remote_infer import described_on, unknown_meta, wrap_described
from djinn_core.interception.shape_inference.meta_infer import signature_of
from djinn_core.interception.sync import fetch
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device
from djinn_core.interception.tensors.sparse_tensor import SparseTensor, wrap_sparse
from djinn_core.interception.tensors.upload import upload_copy
from djinn_core.ir.operators import SPARSE_CALL, resolve_sparse
from djinn_core.ir.program import Call
from djinn_core.ir.sparse_operators import (
    CONVERSIONS,
    COO,
    COO_RESULT,
    COO_WRITTEN,
    NO_RESULT,
    PLACES,
    SPARSE_OPERATORS,
)
from djinn_core.torch_private import schema_of
from djinn_core.tracebacks import for_users

aten = torch.ops.aten


def dispatch_sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implementation of `SparseTensor.__torch_dispatch__`, and of remote ops with a sparse tensor among their arguments.

    Raises:
        UnsupportedOperation: remote sparse tensors have no such op.
    """
    handler = _LOCAL.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if func.name() in SPARSE_OPERATORS:
        return _call(func, args, kwargs)
    kernel = torch_private.composite_kernel(func)
    if kernel is not None:
        return kernel(*args, **kwargs)
    raise UnsupportedOperation(
        f"{func.name()} cannot run on sparse tensors of {DEVICE_NAME}: it is not among the ops that take them. "
        "Convert them with .to_dense(), or move them to the CPU first"
    )


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Have the executor run `func`, and wait for the kind and the sizes of what it returns."""
    schema = schema_of(func)
    written = [
        a
        for i, a in enumerate(args)
        if schema.arguments[i].alias_info is not None and schema.arguments[i].alias_info.is_write
    ]
    given = {name: value for name, value in kwargs.items() if name not in {"non_blocking", "pin_memory"}}
    results = _ask(func, args, given)
    if written:
        _write(written[0], results[0])
        return written[0]
    return results[0] if len(results) == 1 else tuple(results)


def _ask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    operands: list[LazyTensor] = []
    positional = [_apart(a, func, operands) for a in args]
    named = {name: _apart(value, func, operands) for name, value in kwargs.items()}
    places = PLACES * len(schema_of(func).returns)
    form = encode_form(func, (func.name(), *positional), named, (True,) * places, sequence=True, op=SPARSE_CALL)
    metas = tuple(o.remote.meta for o in operands)
    signature = signature_of(form, metas)
    signature.layout_trusted, signature.predicts = True, False
    none = (-1,) * places
    unknown = (unknown_meta(operands),) * places
    call = Call(
        signature, metas, unknown, none, none, (), random=True, operand_count=form.operand_count,
        slot_count=form.slot_count, new_count=form.new_count, nbytes=(0,) * places
    )  # fmt: skip
    made = append(call, operands, slots_of(positional, named))
    values = [tensor.remote for tensor in made]
    del made
    handles = tuple(value.handle for value in values)
    answer = current().ask(SyncRequest(describe=handles, fetch=handles[::PLACES]))
    device = metas[0].device
    described = [described_on(device, d) for d in answer.described] if device else list(answer.described)
    results: list[Any] = []
    for index, header in enumerate(answer.tensors):
        kind, *rest = header.tolist()
        first, second = [
            wrap_described(values[at], described[at]) for at in (PLACES * index + 1, PLACES * index + 2)
        ]  # fmt: skip
        if kind in {COO_RESULT, COO_WRITTEN}:
            made_sparse = wrap_sparse(first, second, tuple(rest[1:]), bool(rest[0]))
            made_sparse.in_place = kind == COO_WRITTEN
            results.append(made_sparse)
        else:
            results.append(None if kind == NO_RESULT else first)
    return results


def _apart(argument: Any, func: Any, operands: list[LazyTensor]) -> Any:
    """The argument as it travels; appends tensors to `operands`."""
    if isinstance(argument, SparseTensor):
        operands += (argument.held_indices, argument.held_values)
        size = [int(n) for n in argument.shape]
        return [COO, argument.coalesced, size, argument.held_indices, argument.held_values]
    if isinstance(argument, LazyTensor):
        operands.append(argument)
    elif isinstance(argument, torch.Tensor) and (argument.dim() or argument.layout != torch.strided):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE_NAME}:0 and "
            f"{argument.device}! (when checking arguments of {func.name()})"
        )
    elif isinstance(argument, (list, tuple)):
        return [_apart(a, func, operands) for a in argument]
    return argument


def _write(target: Any, result: Any) -> None:
    """Make `result` the content of `target`, which an op wrote in place."""
    if isinstance(target, LazyTensor):
        record(aten.copy_.default, (target, result), {})
        return
    if result.in_place:  # other tensors may look at these values
        record(aten.copy_.default, (target.held_values, result.held_values), {})
        target.held_indices = result.held_indices
    else:
        target.held_indices, target.held_values = result.held_indices, result.held_values
    target.coalesced = result.coalesced


def _indices(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (args[0].held_indices,), {})


def _values(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return record(aten.detach.default, (args[0].held_values,), {})


def _coalesced_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args[0].coalesced:
        name = "indices" if func is aten.indices.default else "values"
        raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
    return (_indices if func is aten.indices.default else _values)(func, args, kwargs)


def _nnz(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return int(args[0].held_values.shape[0])


def _sparse_dim(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return int(args[0].held_indices.shape[0])


def _dense_dim(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return args[0].held_values.dim() - 1  # type: ignore[no-any-return]


def _is_coalesced(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return bool(args[0].coalesced)


def _set_coalesced(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    args[0].coalesced = bool(args[1])
    return args[0]


def _detach(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    return wrap_sparse(source.held_indices, source.held_values, source.shape, source.coalesced)


def _clone(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    source = args[0]
    indices = record(aten.clone.default, (source.held_indices,), {})
    return wrap_sparse(indices, record(aten.clone.default, (source.held_values,), {}), source.shape, source.coalesced)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device = args[0], kwargs.get("device")
    if kwargs.get("layout") not in {None, torch.sparse_coo}:
        raise UnsupportedOperation(f"a sparse tensor on {DEVICE_NAME} cannot become one of layout {kwargs['layout']}")
    if device is not None and not is_remote(device):
        return _fetched(source).to(device=device, dtype=kwargs.get("dtype"))
    given = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    moved = {"device": device} if device is not None else {}
    indices = record(func, (source.held_indices,), moved)
    return wrap_sparse(indices, record(func, (source.held_values,), given), source.shape, source.coalesced)


def _fetched(source: SparseTensor) -> torch.Tensor:
    """The tensor on the CPU."""
    indices, values = fetch(source.held_indices), fetch(source.held_values)
    return torch.sparse_coo_tensor(
        indices, values, tuple(source.shape), check_invariants=False, is_coalesced=source.coalesced, device="cpu"
    )


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, SparseTensor) and not isinstance(source, (SparseTensor, LazyTensor)):
        if source.layout != torch.sparse_coo:
            raise UnsupportedOperation(f"a tensor of layout {source.layout} cannot be copied into a sparse one")
        target.held_indices, target.held_values = _uploaded(
            source.to(target.dtype), target.held_values.remote.meta.device
        )
        target.coalesced = source.is_coalesced()
        return target
    if not isinstance(target, (SparseTensor, LazyTensor)):
        return target.copy_(_fetched(source))
    return _call(func, args, kwargs)


def _uploaded(source: torch.Tensor, device: int) -> tuple[LazyTensor, LazyTensor]:
    indices, values = torch_private.sparse_parts(source)
    return upload_copy(indices, device), upload_copy(values, device)


def _zeros_like(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dtype = args[0], kwargs.get("dtype")
    device = kwargs.get("device")
    if kwargs.get("layout") not in {None, torch.sparse_coo} or (device is not None and not is_remote(device)):
        made = torch.zeros(source.shape, dtype=dtype or source.dtype, device=device or source.device)
        return made if kwargs.get("layout") == torch.strided else made.to_sparse()
    sparse = int(source.held_indices.shape[0])
    return _without_elements(source.shape, sparse, dtype or source.dtype, source.held_values.device)


def _without_elements(shape: Sequence[int], sparse_dim: int, dtype: torch.dtype, device: torch.device) -> SparseTensor:
    indices = record(aten.zeros.default, ([sparse_dim, 0],), {"dtype": torch.int64, "device": device})
    values = record(aten.zeros.default, ([0, *shape[sparse_dim:]],), {"dtype": dtype, "device": device})
    return wrap_sparse(indices, values, tuple(shape), coalesced=True)


def _is_pinned(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return False


def _empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    return _with_dims(len(size), 0, size, **options)


def _with_dims(sparse_dim: int, _dense_dim: int, size: Sequence[int], **options: Any) -> torch.Tensor:
    """`aten::_sparse_coo_tensor_with_dims` on the remote device."""
    device, dtype = options.get("device"), options.get("dtype") or torch.get_default_dtype()
    index = existing_index(device) if device is not None else current_device()
    return _without_elements(size, sparse_dim, dtype, logical_device(index))


@handles(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def _with_tensors(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`aten::_sparse_coo_tensor_with_dims_and_tensors`: what makes sparse tensors of indices and values."""
    sparse_dim, dense_dim, size, indices, values = args
    if not isinstance(values, LazyTensor) or not isinstance(indices, LazyTensor):
        raise RuntimeError("indices and values must be on the same device")  # noqa: TRY004 - as PyTorch
    if indices.dim() != 2 or indices.shape[0] != sparse_dim or len(size) != sparse_dim + dense_dim:
        raise RuntimeError(
            "number of dimensions must be sparse_dim + dense_dim, and indices a matrix of sparse_dim rows"
        )
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype != values.dtype:
        values = record(aten._to_copy.default, (values,), {"dtype": dtype})
    return wrap_sparse(indices, values, tuple(int(n) for n in size), bool(kwargs.get("is_coalesced")))


@handles(
    aten._sparse_coo_tensor_unsafe.default,  # PyTorch calls it where a sparse CPU tensor moves here
    aten._embedding_bag_sparse_backward.default,
    aten.embedding_sparse_backward.default,
)
def _take_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op that makes a sparse tensor of strided ones; the executor checks what it made where it is used."""
    kernel = torch_private.composite_kernel(func)
    assert kernel is not None
    return kernel(*args, **kwargs)


@handles(aten._embedding_bag_backward.default)
def _embedding_bag_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradient of the table of an `nn.EmbeddingBag`; the executor's op would return the sparse one as one value."""
    given = {argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    if not given["sparse"]:
        return record(func, args, kwargs)
    indices, bags = given["indices"], given["offset2bag"]
    if bags.numel() == 0:  # as the executor's op does where the forward pass did not need it
        bags = torch.zeros(indices.shape[0] + 1, dtype=indices.dtype, device=indices.device)
        bags = bags.index_add_(0, given["offsets"], torch.ones_like(given["offsets"]))
        bags[0] -= 1
        bags = bags.cumsum(0)[: indices.shape[0]]
    return aten._embedding_bag_sparse_backward.default(
        given["grad"], indices, given["offsets"], bags, given["bag_size"], given["num_weights"],
        given["scale_grad_by_freq"], given["mode"], given.get("per_sample_weights"), given.get("padding_idx", -1)
    )  # fmt: skip


# What happens here, without the executor.
_LOCAL: Final[Mapping[Any, Handler]] = MappingProxyType(
    {
        aten._indices.default: _indices,
        aten._values.default: _values,
        aten.indices.default: _coalesced_part,
        aten.values.default: _coalesced_part,
        aten._nnz.default: _nnz,
        aten.sparse_dim.default: _sparse_dim,
        aten._dimI.default: _sparse_dim,
        aten.dense_dim.default: _dense_dim,
        aten._dimV.default: _dense_dim,
        aten.is_coalesced.default: _is_coalesced,
        aten._coalesced_.default: _set_coalesced,
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.zeros_like.default: _zeros_like,
        aten.empty_like.default: _zeros_like,
        aten.is_pinned.default: _is_pinned,
        aten._sparse_coo_tensor_with_dims_and_tensors.default: _with_tensors,
    }
)


def register() -> torch.library.Library:
    """Register the factories of sparse tensors; in force as long as the returned object lives."""
    handles(*(resolve_sparse(name) for name in CONVERSIONS))(_call)
    library = torch.library.Library("aten", "IMPL")
    kernels: Iterable[tuple[str, Callable[..., Any]]] = (
        ("empty.memory_format", _empty), ("zeros", _empty), ("_sparse_coo_tensor_with_dims", _with_dims)
    )  # fmt: skip
    for name, kernel in kernels:
        library.impl(name, torch_private.never_compiled(for_users(kernel)), "SparsePrivateUse1")
    return library
