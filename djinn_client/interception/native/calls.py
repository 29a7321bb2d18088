"""Cached calls: Python infers a call once, and C++ repeats it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Final

from djinn_client.interception.native.library import dtype_number, ops
from djinn_client.interception.shape_inference.write_checks import raises_versions, refuses_overlap
from djinn_client.torch_dispatch import returns_list
from djinn_core.ir.program import Call, Signature
from djinn_core.ir.values import TensorMeta, tensor_meta

IDENTITY, LIST, BUMPS, NO_OVERLAP, EMPTY = 1, 2, 4, 8, 16  # flags of `add_call`
_NEW, _VIEW, _SAME, _NONE = range(4)  # kinds of results
_EMPTY_OPS: Final = frozenset({"aten::empty.memory_format", "aten::empty_strided"})

calls: list[Call | None] = []  # by number; None or too short for a call that C++ made and Python has not requested
generation = 0  # generation of the list `calls`: increased when numbers are reused
_numbers: Final[dict[int, int]] = {}  # numbers by the id of a call; `calls` keeps the call alive


def number_of(call: Call) -> int:
    """Return the number of a call in C++. The first request assigns it."""
    number = _numbers.get(id(call))
    if number is None:
        number = _add(call, _description(call))
        _numbers[id(call)] = number
    return number


_identity = -1  # the number that `identity_number` returns, once it is assigned
_add_lock = threading.RLock()


def identity_number() -> int:
    """Return the number that stands for all calls that return their operand unchanged."""
    global _identity
    if _identity < 0:
        _identity = _add(None, [1, 0, 0, 0, IDENTITY, 0, 0])
    return _identity


def _add(call: Call | None, description: Sequence[int]) -> int:
    with _add_lock:  # C++ assigns numbers without holding the GIL
        return _add_alone(call, description)


def _add_alone(call: Call | None, description: Sequence[int]) -> int:
    if ops.calls_are_full():
        _sweep()
    number = int(ops.add_call(description))
    _store_call(calls, number, call)
    return number


def _store_call(call_list: list[Call | None], number: int, call: Call | None) -> None:
    call_list += [None] * (number + 1 - len(call_list))
    call_list[number] = call


def calls_of(call_list: list[Call | None], numbers: Sequence[int]) -> tuple[Call, ...]:
    """Return the calls with these numbers.

    `call_list`: the list `calls` at the time when the numbers came from C++.
    """
    try:
        calls = [call_list[number] for number in numbers]
    except IndexError:
        calls = [None]
    if None in calls:
        calls = [_call_of(call_list, number) for number in numbers]
    return tuple(calls)  # type: ignore[arg-type]


def _call_of(call_list: list[Call | None], number: int) -> Call:
    call = call_list[number] if number < len(call_list) else None
    if call is None:
        call = _call_by_rule(call_list, number)
        _store_call(call_list, number, call)
    return call


def _call_by_rule(call_list: list[Call | None], number: int) -> Call:
    like_number, *dims = ops.describe_call(number)
    like, numbers = call_list[like_number], iter(dims)
    assert like is not None

    def meta_like(meta: TensorMeta) -> TensorMeta:
        offset, rank = next(numbers), len(meta.shape)
        shape, stride = tuple(islice(numbers, rank)), tuple(islice(numbers, rank))
        return tensor_meta(shape, stride, offset, meta.dtype, meta.device, meta.conj, meta.neg)

    operands = tuple([meta_like(meta) for meta in like.operands])
    results = tuple([
        operands[same] if same >= 0 else meta and meta_like(meta)
        for meta, same in zip(like.results, like.inplace, strict=True)
    ])  # fmt: skip
    origins = zip(results, like.aliases, like.inplace, strict=True)
    nbytes = tuple([0 if meta is None or alias >= 0 or same >= 0 else meta.nbytes for meta, alias, same in origins])
    call: Call = like.of_other_sizes(operands, results, nbytes, None)
    return call


def begin_in_child() -> None:
    """Replace the lock in a forked child, because a thread of the parent may have held it."""
    global _add_lock
    _add_lock = threading.RLock()


def forget(signature: Signature | None = None) -> None:
    """Make C++ ask Python again about every call, or about every call of `signature`."""
    ops.forget_calls(-1 if signature is None else signature.id)


_unused_before: set[int] = set()  # numbers of calls that the last sweep found unused


def _sweep() -> None:
    """Evict unused calls. Without this, a program whose sizes always change would fill the table of calls.

    A thread may be about to append a call that the sweep found unused. So its number is reused only if the next sweep
    finds the call unused as well. Python appends such a call under a new number.
    """
    global calls, generation
    unused = set(ops.unused_calls()) - {_identity}
    freed = [number for number in _unused_before if number in unused]
    if freed:
        calls_of(calls, freed)  # entries may refer to the current list, and read it later
        calls, generation = [*calls], generation + 1
    for number in freed:
        calls[number] = None
    ops.release_calls(freed)
    _unused_before.clear()
    _unused_before.update(unused.difference(freed))
    for number in _unused_before:
        call = calls[number] if number < len(calls) else None
        if call is not None and _numbers.get(id(call)) == number:
            del _numbers[id(call)]


def _description(call: Call) -> list[int]:
    new = [meta is not None and same < 0 for meta, same in zip(call.results, call.inplace, strict=True)]
    flags = 0
    if returns_list(call.op):
        flags |= LIST
    if call.writes:
        if not any(call.results) and raises_versions(call.op):
            flags |= BUMPS
        if call.operand_count > 1 and refuses_overlap(call.op):
            flags |= NO_OVERLAP
    if call.op in _EMPTY_OPS:
        flags |= EMPTY
    description = [
        call.operand_count,
        call.slot_count,
        call.signature.id,
        call.kind,
        flags,
        len(call.writes),
        *call.writes,
        len(new),
    ]
    for meta, alias, same, nbytes in call.outcome:
        description += _result(meta, alias, same, nbytes)
    for meta in call.operands:
        description += (meta.offset, *meta.shape, *meta.stride)
    return description


def _result(meta: TensorMeta | None, alias: int, same: int, nbytes: int) -> list[int]:
    if same >= 0:
        return [_SAME, same]
    if meta is None:
        return [_NONE]
    result = [_NEW, 0] if alias < 0 else [_VIEW, alias]
    result += [dtype_number(meta.dtype), meta.device, meta.conj + 2 * meta.neg, meta.offset, nbytes]
    return [*result, len(meta.shape), *meta.shape, *meta.stride]
