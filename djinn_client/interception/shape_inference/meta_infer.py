"""Meta inference: find an op's result metadata by running the op once on meta tensors, and cache it.

Operands that share a storage get meta tensors that share a storage, so aliasing between results and operands is
observed instead of derived from the schema.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.indexes import existing_index
from djinn_client.interception.native.generators import operand as operand_of
from djinn_client.interception.recording.arguments import encode_form
from djinn_client.interception.shape_inference.inference_cache import inference_cache, keep
from djinn_client.interception.shape_inference.meta_overrides import (
    is_random,
    may_be_of_other_dtypes,
    must_ask,
    rule_for,
)
from djinn_client.interception.shape_inference.trials import (
    check_arguments,
    may_be_refused,
    pointwise_result,
    refusal,
    try_overlapping,
)
from djinn_client.interception.shape_inference.write_checks import (
    check_shape,
    check_targets,
    may_refuse_target,
    only_kernels_know,
    overlaps_itself,
)
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.storage import Storage
from djinn_client.torch_dispatch import CGenerator
from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.program import Call, Signature
from djinn_core.ir.values import TensorMeta, contiguous_strides, meta_of, tensor_meta
from djinn_core.system.interrupts import interrupt_mask


class UnknownResult(Exception):  # noqa: N818 - a signal between two functions, never seen by users
    """Raised by `infer` if only the executor can know the metadata of the results."""


class MetaKernelRefused(Exception):  # noqa: N818 - a signal between two functions, never seen by users
    """Raised by `infer` if the meta kernel refuses the arguments, or accepts arguments that other kernels may refuse.

    Attributes:
        error: error of the meta kernel, or None if the meta kernel accepts the arguments.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(str(error))
        self.error = error


# Errors of meta kernels: for `item()` inside composite ops, for custom ops with data-dependent shapes, and for missing
# meta kernels.
_NEEDS_DATA: Final = (
    "cannot be called on meta tensors",
    "there is no such meta implementation",
    "There was no fake impl registered",
)
SIGNATURES_LIMIT = 16384  # cached signatures; an evicted signature that recurs gets another id


class MetaConverter(msgspec.Struct):
    """Convert remote tensors to meta tensors. Tensors that share a storage get meta tensors that share a storage.

    Attributes:
        storages: for each converted storage, a meta tensor over it.
        tensors: the meta tensors of the operands, in order.
        sources: the converted tensors, in order.
    """

    storages: dict[Storage, torch.Tensor] = msgspec.field(default_factory=dict)
    tensors: list[torch.Tensor] = msgspec.field(default_factory=list)
    sources: list[LazyTensor | torch.Tensor] = msgspec.field(default_factory=list)

    def convert(self, argument: Any) -> Any:
        """Return `argument` with remote and CPU tensors replaced by meta tensors, and the device by `meta`."""
        if isinstance(argument, torch.Tensor):
            return self._tensor(argument)
        if isinstance(argument, (list, tuple)):
            return [self.convert(a) for a in argument]
        if isinstance(argument, torch.device):
            return torch.device("meta")
        if isinstance(argument, CGenerator):
            return self._generator(argument)
        return argument

    def metas(self, device: int) -> list[TensorMeta]:
        """Return the metadata of the meta tensors, on the logical devices of their originals.

        CPU tensors get the logical device `device`.
        """
        return [
            meta_of(meta, source.remote.meta.device if isinstance(source, LazyTensor) else device)
            for meta, source in zip(self.tensors, self.sources, strict=True)
        ]

    def _generator(self, generator: CGenerator) -> None:
        """Add a generator's state to the operands, because meta kernels take no generator."""
        state = operand_of(generator)
        if state is not None:
            self._tensor(state)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, LazyTensor):
            meta = self._view(tensor)
        elif tensor.dim() == 0:
            return tensor  # meta kernels accept a 0-dim CPU tensor unchanged
        else:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.tensors.append(meta)
        self.sources.append(tensor)
        return meta

    def _view(self, tensor: LazyTensor) -> torch.Tensor:
        value = tensor.remote
        base = self.storages.get(value.storage)
        if base is None:
            size = max(value.storage.nbytes, value.meta.extent * value.meta.dtype.itemsize)
            base = self.storages[value.storage] = torch.empty(size, dtype=torch.uint8, device="meta")
        view = torch.empty(0, dtype=value.meta.dtype, device="meta")
        view.set_(base.untyped_storage(), value.meta.offset, value.meta.shape, value.meta.stride)
        if value.meta.conj:
            view = torch.conj(view)
        if value.meta.neg:
            view = torch._neg_view(view)
        return view


@torch_dispatch.without_modes
def infer(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: int) -> Call:
    """Return the call of `func` with these arguments, with results on logical device `device`.

    Raises:
        UnknownResult: the results depend on data, or the op has no meta kernel.
        MetaKernelRefused: the meta kernel raises, or only kernels can check the arguments.
        UnsupportedOperation: the op returns a type that the remote device lacks, such as a sparse tensor.
        Exception: the error of eager PyTorch for these arguments.
    """
    check_targets(func, args, kwargs)
    targets = written_tensors(func, args, kwargs)
    operands = list(_operands_in((*args, *kwargs.values()))) if targets else []
    if any(overlaps_itself(operands[position].remote.meta) for position in targets):
        try_overlapping(func, args, kwargs)
    if must_ask(func, kwargs) or _returns_number(func):
        raise UnknownResult
    pointwise = _infer_pointwise(func, args, kwargs, device)
    if pointwise is not None:
        return pointwise
    device = _result_index(kwargs, device)
    world = MetaConverter()
    meta_args = world.convert(args)
    meta_kwargs = {name: world.convert(value) for name, value in kwargs.items()}
    before = world.metas(device)
    try:
        with interrupt_mask, torch.no_grad():  # otherwise an interrupt in between would leave gradients off
            check_arguments(func, meta_args)
            error_of_trial = refusal(func, meta_args, meta_kwargs)
            if error_of_trial is not None:
                raise MetaKernelRefused(error_of_trial)
            check_shape(func, meta_args)
            is_doubtful = may_be_refused(func, meta_args, meta_kwargs) or may_refuse_target(
                func, meta_args, meta_kwargs
            )
            out = rule_for(func)(*meta_args, **meta_kwargs)
    except MetaKernelRefused:
        raise
    except NotImplementedError as error:
        raise UnknownResult from error
    except RuntimeError as error:
        raise (
            UnknownResult if any(words in str(error) for words in _NEEDS_DATA) else MetaKernelRefused(error)
        ) from error
    except Exception as error:
        raise MetaKernelRefused(error) from error
    if is_doubtful:
        raise MetaKernelRefused
    call = _build(func, args, kwargs, device, world, before, out)
    if only_kernels_know(func, call) or (may_be_of_other_dtypes(func, before) and call.signature.dtypes is None):
        raise UnknownResult
    return call


def _infer_pointwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: int) -> Call | None:
    """Return the call of a pointwise op that the CPU kernel accepts. Return None if the meta kernel must run."""
    with interrupt_mask, torch.no_grad():
        trial = pointwise_result(func, args, kwargs, device)
    if trial is None:
        return None
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, LazyTensor)]
    before, target = tuple([o.remote.meta for o in operands]), trial.target
    form = encode_form(func, args, kwargs, [target is None], sequence=False)
    signature = signature_of(form, before)
    result = trial.meta if target is not None or not signature.orders else laid_out(trial.meta, signature.orders[0])
    same = alias = -1
    if target is not None:
        # By position, not by object: the next call of this form may use two objects for the same memory, and returns
        # the target's.
        same = _position_of_target(args, kwargs)
        alias = next(i for i, o in enumerate(operands) if o.remote.storage == target.remote.storage)
    return Call(
        signature=signature,
        operands=before,
        results=(result,),
        aliases=(alias,),
        inplace=(same,),
        writes=() if target is None else written_operands(func, args, kwargs),
        random=False,
        operand_count=form.operand_count,
        slot_count=form.slot_count,
        new_count=form.new_count,
        changes=() if target is None or trial.meta is before[same] else ((same, trial.meta),),
        nbytes=(0 if target is not None else trial.meta.nbytes,),
    )


def _position_of_target(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the position, among the operands, of the operand that an op writes in place or as `out`."""
    if "out" not in kwargs:
        return 0
    names = list(kwargs)
    before = (*args, *[kwargs[name] for name in names[: names.index("out")]])
    return sum(isinstance(value, LazyTensor) for value in before)


def make_elsewhere(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a factory such as `empty_like` that creates a tensor on another device, modelled on remote tensors."""
    return func(*MetaConverter().convert(args), **kwargs)


def _result_index(kwargs: dict[str, Any], device: int) -> int:
    """Return the index of the results' device: the device that the op names, or else the device of its operands."""
    named_device = kwargs.get("device")
    return existing_index(named_device) if isinstance(named_device, torch.device) else device


def _returns_number(func: Any) -> bool:
    """Return True if a result is a Python number, which depends on the data."""
    return any("Tensor" not in str(r.type) for r in torch_private.schema_of(func).returns)


def _build(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: int,
    world: MetaConverter,
    before: list[TensorMeta],
    out: Any,
) -> Call:
    sequence = isinstance(out, (list, tuple))
    results = list(out) if sequence else [out]
    for result in results:
        _check_layout(func, result)
    positions = {id(tensor): i for i, tensor in reversed(list(enumerate(world.tensors)))}
    inplace = [positions.get(id(r), -1) for r in results]
    metas = [meta_of(r, device) if isinstance(r, torch.Tensor) else None for r in results]
    if any(r is not None and not isinstance(r, torch.Tensor) for r in results):
        raise UnknownResult  # a Python scalar, so its value is needed
    form = encode_form(
        func, args, kwargs, [m is not None and i < 0 for m, i in zip(metas, inplace, strict=True)], sequence
    )
    signature = signature_of(form, tuple(before))
    for index, order in signature.orders.items():
        metas[index] = laid_out(metas[index], order)
    for index, dtype in (signature.dtypes or {}).items():
        if (m := metas[index]) is not None:
            metas[index] = tensor_meta(m.shape, m.stride, m.offset, dtype, m.device, m.conj, m.neg)
    return Call(
        signature=signature,
        operands=tuple(before),
        results=tuple(metas),
        aliases=_aliases(world.tensors, results),
        inplace=tuple(inplace),
        writes=written_operands(func, args, kwargs),
        random=is_random(func),
        operand_count=form.operand_count,
        slot_count=form.slot_count,
        new_count=form.new_count,
        changes=_changes(world, before, device),
        nbytes=tuple(_storage_bytes(r, m) for r, m in zip(results, metas, strict=True)),
    )


def _storage_bytes(result: torch.Tensor | None, meta: TensorMeta | None) -> int:
    if result is None or meta is None:
        return 0
    return result.untyped_storage().nbytes() * meta.dtype.itemsize // result.dtype.itemsize


def _check_layout(func: Any, result: Any) -> None:
    if isinstance(result, torch.Tensor) and result.layout != torch.strided:
        raise UnsupportedOperation(
            f"{func.name()} returns a tensor of layout {result.layout}, which remote_accelerator does not have. "
            "Run the op on the CPU"
        )


def _aliases(operands: Sequence[torch.Tensor], results: Sequence[Any]) -> tuple[int, ...]:
    """Return, for each result, the position of the first operand with the same memory, or -1."""
    if not operands:
        return (-1,) * len(results)
    first = {torch_private.storage_key(tensor): i for i, tensor in reversed(list(enumerate(operands)))}
    return tuple([first.get(torch_private.storage_key(r), -1) if isinstance(r, torch.Tensor) else -1 for r in results])


def _changes(world: MetaConverter, before: list[TensorMeta], device: int) -> tuple[tuple[int, TensorMeta], ...]:
    after = world.metas(device)
    return tuple((i, new) for i, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new)


def written_operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the positions, among the operands, of the operands that the op writes.

    They are written by schema, or are running statistics or generator state.
    """
    if not _takes_generator(func):
        return (*written_tensors(func, args, kwargs), *_statistics(func, args))
    generators = [p for p, a in _operands(func, args, kwargs) if isinstance(a, CGenerator)]
    return (*written_tensors(func, args, kwargs), *_statistics(func, args), *generators)


@functools.lru_cache(maxsize=4096)
def _takes_generator(func: Any) -> bool:
    return any("Generator" in str(a.type) for a in torch_private.schema_of(func).arguments)


def _statistics(func: Any, args: Sequence[Any]) -> range:
    """Return the positions of the running statistics that batch normalisation updates, although its schema does not say so."""
    if func is not torch.ops.aten.native_batch_norm.default or not args[5]:
        return range(0)
    before, after = (len(list(_operands(func, args[:end], {}))) for end in (3, 5))
    return range(before, after)


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the positions, among the operands, of the tensors that the schema marks as written."""
    if not any(a.alias_info is not None and a.alias_info.is_write for a in torch_private.schema_of(func).arguments):
        return ()
    return tuple([p for p, a in _operands(func, args, kwargs) if a is True])


def _operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield each operand's position, and the generator itself or, for a tensor, whether the schema marks it as written."""
    schema = {a.name: a for a in torch_private.schema_of(func).arguments}
    position = 0
    for name, argument in (*zip(schema, args, strict=False), *kwargs.items()):
        info = schema[name].alias_info
        is_written = info is not None and bool(info.is_write)
        for leaf in _operands_in(argument):
            yield position, is_written if isinstance(leaf, LazyTensor) or not isinstance(leaf, CGenerator) else leaf
            position += 1


def _operands_in(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, LazyTensor):
                yield item
            else:
                yield from _operands_in(item)
    elif isinstance(argument, CGenerator):
        if operand_of(argument) is not None:
            yield argument
    elif isinstance(argument, torch.Tensor) and (isinstance(argument, LazyTensor) or argument.dim() > 0):
        yield argument


def laid_out(meta: TensorMeta | None, order: tuple[int, ...]) -> TensorMeta | None:
    """Return `meta` as a dense tensor with dimensions in memory order `order`, outermost first; None stays None."""
    if meta is None:
        return None
    strides = contiguous_strides(tuple(meta.shape[d] for d in order))
    by_dimension = dict(zip(order, strides, strict=True))
    stride = tuple(by_dimension[d] for d in range(len(order)))
    return tensor_meta(meta.shape, stride, 0, meta.dtype, meta.device, meta.conj, meta.neg)


def order_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the memory order of a dense tensor's dimensions. Return None if the tensor is not dense."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], d)))
    dense = laid_out(tensor_meta(shape, stride, 0, torch.uint8), order)
    return order if dense is not None and dense.stride == stride else None


def signature_of(form: Any, operands: tuple[TensorMeta, ...]) -> Signature:
    """Return the signature of a form and the tensor classes of its operands. Equal signatures are the same object."""
    classes = tuple([m.tensor_class for m in operands])
    key = (form, classes)
    signatures = inference_cache.signatures
    signature = signatures.get(key)
    return keep(signatures, key, Signature(form, classes), SIGNATURES_LIMIT) if signature is None else signature


def learn_dtypes(call: Call) -> None:
    """Predict these result dtypes for calls like `call` from now on, because the executor has described them."""
    signature = call.signature
    signature.dtypes = {index: meta.dtype for index, meta in enumerate(call.results) if meta is not None}
    signature.layout_trusted, signature.predicts = False, True  # later calls are predictions again


def forget_signatures() -> None:
    """Forget learnt layouts and dtypes, because another device may compute from now on.

    Calls that a capture keeps are verified again.
    """
    for signature in list(inference_cache.signatures.values()):
        if signature.predicts and not signature.form.op.startswith("djinn::"):
            signature.layout_trusted = False
    inference_cache.signatures.clear()
