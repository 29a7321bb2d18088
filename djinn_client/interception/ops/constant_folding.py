"""Constant folding on the client: what ops make of small integers that the client knows is known to it as well (`host_values.py`).

The ops are recorded as always; nothing is computed here before a number is asked for. Floats are compared only: the last bits
of what is calculated with them depend on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import msgspec
import torch

from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.ops.canonicalize import fill
from djinn_client.interception.sync import read_only, to_copy
from djinn_client.interception.tensors.host_values import (
    INTEGERS,
    LARGEST,
    HostOperand,
    HostValue,
    computed,
    known_elements,
)
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, wrap
from djinn_client.interception.tensors.storage import Value
from djinn_client.interception.tensors.upload import upload_copy, upload_dense
from djinn_core.ir.values import TensorMeta

aten: Final = torch.ops.aten
_CPU: Final = torch.device("cpu")
_OPERAND: Final = object()  # stands for the next tensor among the arguments
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_FLOATS: Final = frozenset({  # ops whose results are exact for floats as well
    *(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Scalar", "Tensor")),
    *(getattr(aten, name).default for name in ("logical_and", "logical_or", "logical_not", "all", "any")),
    *(aten.all.dim, aten.any.dim),
})  # fmt: skip
_OF_INTEGERS: Final = (
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "bitwise_and", "bitwise_or", "bitwise_xor")),
    *(getattr(aten, name).default for name in ("bitwise_not", "neg", "abs", "cat", "stack", "clone", "repeat", "flip")),
    *(getattr(aten, name).default for name in ("cumsum", "sum", "max", "min", "amax", "amin")),
    *(aten.sum.dim_IntList, aten.where.self, aten.masked_fill.Scalar, aten.isin.Tensor_Tensor),
)
_IN_PLACE: Final = (*(getattr(aten, name).Tensor for name in ("add_", "sub_", "mul_")), aten.masked_fill_.Scalar)
_LIKE: Final = tuple(
    getattr(aten, name).default
    for name in ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
)
_EXACT: Final = frozenset(map(id, _OF_FLOATS))  # hashes of ops are Python's
_OF_ANY_DTYPE: Final = frozenset(
    {*_LIKE, aten.full.default, aten.ones.default, aten.zeros.default, aten.scalar_tensor.default}
)


@handles(*_OF_FLOATS, *_OF_INTEGERS)
def fold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an op; where all its operands are known, so is its result."""
    first = args[0]
    if type(first) is list:
        first = first[0] if first else None
    if not isinstance(first, LazyTensor) or first.remote.storage.host is None:  # as nearly always
        return record(func, args, kwargs)
    of_floats = id(func) in _EXACT or (bool(kwargs) and kwargs.get("dtype") is torch.bool)
    if not of_floats and first.remote.meta.dtype not in INTEGERS:
        return record(func, args, kwargs)
    operands = _known_operands(args, of_floats)
    made = record(func, args, kwargs)
    if operands and isinstance(made, LazyTensor) and _is_small(made.remote):
        _note(made.remote, func, args, kwargs, operands)
    return made


@handles(aten._to_copy.default)
def fold_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.to(...)`: as `fold` where it stays remote."""
    device, waits = kwargs.get("device"), not kwargs.get("non_blocking")
    kwargs = {k: v for k, v in kwargs.items() if k not in {"non_blocking", "pin_memory"}}
    return fold(func, args, kwargs) if device is None or is_remote(device) else to_copy(args[0], kwargs, waits=waits)


@handles(aten.nonzero.default)
def find_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Upload the places of known elements that are not zero: their number is known then. Record the op for other operands."""
    found = _places(args[0])
    if found is None:
        return record(func, args, kwargs)
    return upload_dense(found, args[0].remote.meta.device)


@handles(aten.index.Tensor)
def fold_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `fold`; a known mask becomes the places where it is true, so that the size of the result is known."""
    source, indices = args
    if any(isinstance(i, LazyTensor) and i.dtype is torch.bool and i.remote.storage.host is not None for i in indices):
        indices = list(_without_masks(source.shape, indices))
    return fold(func, (source, indices), kwargs)


def _without_masks(shape: torch.Size, indices: Iterable[Any]) -> Iterator[Any]:
    """The indices; in place of a known mask that fits one for each of its dimensions."""
    at = 0
    for index in indices:
        mask = isinstance(index, LazyTensor) and index.dtype is torch.bool
        width = index.dim() if mask else 1
        fits = mask and width > 0 and shape[at : at + width] == index.shape
        places = _places(index) if fits else None
        if places is None:
            yield index
        else:
            yield from [upload_copy(column, index.remote.meta.device) for column in places.unbind(1)]
        at += width


def _places(tensor: Any) -> torch.Tensor | None:
    if not isinstance(tensor, LazyTensor) or tensor.remote.storage.host is None:
        return None
    known = known_elements(tensor.remote)
    return None if known is None else known.nonzero()


@handles(*_IN_PLACE)
def fold_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a write; where its operands are known and it writes all of a storage, so is what it leaves there."""
    target = args[0]
    known = isinstance(target, LazyTensor) and target.remote.storage.host is not None
    operands = _known_operands(args, of_floats=False) if known else None
    made = record(func, args, kwargs)
    if operands and isinstance(made, LazyTensor) and _is_small(made.remote) and _is_whole(made.remote):
        _note(made.remote, partial(_on_a_copy, func), args, kwargs, operands)
    return made


@handles(*_LIKE)
def fold_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an op that looks at no more than the metadata of its operand."""
    made = record(func, args, kwargs)
    if isinstance(made, LazyTensor) and _is_small(made.remote, of_floats=True):
        _note(made.remote, partial(_on_metadata, func, args[0].remote.meta), args[1:], kwargs, ())
    return made


@handles(aten.fill_.Scalar)
def fold_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record `fill_`; where it writes all of a storage, what it leaves there is known."""
    made = fill(func, args, kwargs)
    if isinstance(made, LazyTensor) and _is_small(made.remote, of_floats=True) and _is_whole(made.remote):
        _note(made.remote, partial(_on_metadata, aten.full_like.default, made.remote.meta), args[1:], {}, ())
    return made


def record_factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an op without operands; where its result is small, it is known."""
    made = record(func, args, kwargs)
    if (
        isinstance(made, LazyTensor)
        and _is_small(made.remote, func in _OF_ANY_DTYPE)
        and not func.name().startswith("aten::empty")
    ):
        _note(made.remote, func, args, kwargs, ())
    return made


class _FetchedNumber(msgspec.Struct, frozen=True):
    """A number that is fetched when something that follows from it is asked for.

    Attributes:
        contents: of its storage, where they are not known yet; the storage has these until it is written.
    """

    value: Value
    contents: HostValue
    depth: int = 0

    def tensor(self) -> torch.Tensor | None:
        """As of a `FoldOperand`; None where it has been written."""
        if self.value.storage.host is not self.contents:
            return None
        if self.contents.memory() is None:
            self.contents.become(read_only(wrap(self.value)))
        return HostOperand(self.contents, self.value.meta).tensor()


@handles(aten.isnan.default, aten.isinf.default)
def is_no_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the op. Of a single number: it is the number that is fetched, so that `isnan(x) or isinf(x)` is one round trip."""
    made = record(func, args, kwargs)
    value = args[0].remote
    if value.meta.numel == 1 and value.storage.nbytes == value.meta.nbytes and not value.meta.offset:
        if value.storage.host is None:
            value.storage.host = HostValue(None)
        number = _FetchedNumber(value, value.storage.host)
        made.remote.storage.host = computed(lambda operands: func(*operands), (number,), made.remote.meta)
    return made


def of_any_dtype(func: Any) -> bool:
    """True if what an op makes of floats that are known may be known."""
    return id(func) in _EXACT or func in {aten._to_copy.default, aten.nonzero.default}


def _is_small(value: Value, of_floats: bool = False) -> bool:
    dtype = value.meta.dtype
    return (dtype in INTEGERS or (of_floats and dtype.is_floating_point)) and 0 < value.storage.nbytes <= LARGEST


def _is_whole(value: Value) -> bool:
    """True if the value is all of its storage."""
    meta = value.meta
    return meta.offset == 0 and meta.extent == meta.numel and meta.nbytes == value.storage.nbytes


def _known_operands(args: Iterable[Any], of_floats: bool) -> list[HostOperand] | None:
    """The known tensors among the arguments; None if another one is among them, or one of floats and `of_floats` is false."""
    found: list[HostOperand] = []
    for a in args:
        if isinstance(a, LazyTensor):
            value = a.remote
            host = value.storage.host
            if host is None or not (of_floats or value.meta.dtype in INTEGERS):
                return None
            found.append(HostOperand(host, value.meta))
        elif isinstance(a, torch.Tensor):
            return None
        elif type(a) is list or type(a) is tuple:
            inner = _known_operands(a, of_floats)
            if inner is None:
                return None
            found += inner
    return found


def _note(
    value: Value, func: Any, args: Iterable[Any], kwargs: dict[str, Any], operands: Iterable[HostOperand]
) -> None:
    given = [_without_tensors(a) for a in args]
    options = {name: _without_tensors(a) for name, a in kwargs.items()}
    value.storage.host = computed(partial(_call, func, given, options), tuple(operands), value.meta)


def _without_tensors(a: Any) -> Any:
    if isinstance(a, LazyTensor):
        return _OPERAND
    if type(a) is list or type(a) is tuple:
        return [_without_tensors(one) for one in a]
    return _CPU if isinstance(a, torch.device) else a


def _call(func: Any, given: list[Any], options: dict[str, Any], operands: list[torch.Tensor]) -> Any:
    rest = iter(operands)

    def filled(a: Any) -> Any:
        if a is _OPERAND:
            return next(rest)
        return [filled(one) for one in a] if type(a) is list else a

    return func(*map(filled, given), **options)


def _on_a_copy(func: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(target.clone(), *args, **kwargs)


def _on_metadata(func: Any, meta: TensorMeta, *args: Any, **kwargs: Any) -> Any:
    like = torch.empty(1, dtype=meta.dtype, device=_CPU).expand(meta.shape)
    return func(like, *args, **kwargs)
