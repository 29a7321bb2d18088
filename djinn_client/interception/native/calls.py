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

NOTHING, LIST, BUMPS, NO_OVERLAP, EMPTY = 1, 2, 4, 8, 16  # flags of `add_call`
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


_nothing = -1
_adding = threading.RLock()


def nothing() -> int:
    """Return the number that stands for all calls that return their operand unchanged."""
    global _nothing
    if _nothing < 0:
        _nothing = _add(None, [1, 0, 0, 0, NOTHING, 0, 0])
    return _nothing


def _add(call: Call | None, description: Sequence[int]) -> int:
    with _adding:  # C++ assigns numbers without holding the GIL
        return _add_alone(call, description)


def _add_alone(call: Call | None, description: Sequence[int]) -> int:
    if ops.calls_are_full():
        _sweep()
    number = int(ops.add_call(description))
    _keep(calls, number, call)
    return number


def _keep(known: list[Call | None], number: int, call: Call | None) -> None:
    known += [None] * (number + 1 - len(known))
    known[number] = call


def calls_of(known: list[Call | None], numbers: Sequence[int]) -> tuple[Call, ...]:
    """Return the calls with these numbers.

    `known`: the list `calls` at the time when the numbers came from C++.
    """
    try:
        calls = [known[number] for number in numbers]
    except IndexError:
        calls = [None]
    if None in calls:
        calls = [_call_of(known, number) for number in numbers]
    return tuple(calls)  # type: ignore[arg-type]


def _call_of(known: list[Call | None], number: int) -> Call:
    call = known[number] if number < len(known) else None
    if call is None:
        call = _made_by_rule(known, number)
        _keep(known, number, call)
    return call


def _made_by_rule(known: list[Call | None], number: int) -> Call:
    like_number, *dims = ops.describe_call(number)
    like, rest = known[like_number], iter(dims)
    assert like is not None

    def meta_like(meta: TensorMeta) -> TensorMeta:
        offset, rank = next(rest), len(meta.shape)
        shape, stride = tuple(islice(rest, rank)), tuple(islice(rest, rank))
        return tensor_meta(shape, stride, offset, meta.dtype, meta.device, meta.conj, meta.neg)

    operands = tuple([meta_like(meta) for meta in like.operands])
    results = tuple([
        operands[same] if same >= 0 else meta and meta_like(meta)
        for meta, same in zip(like.results, like.inplace, strict=True)
    ])  # fmt: skip
    own = zip(results, like.aliases, like.inplace, strict=True)
    nbytes = tuple([0 if meta is None or alias >= 0 or same >= 0 else meta.nbytes for meta, alias, same in own])
    call: Call = like.of_other_sizes(operands, results, nbytes, None)
    return call


def begin_in_child() -> None:
    """Replace the lock in a forked child, because a thread of the parent may have held it."""
    global _adding
    _adding = threading.RLock()


def forget(signature: Signature | None = None) -> None:
    """Make C++ ask Python again about every call, or about every call of `signature`."""
    ops.forget_calls(-1 if signature is None else signature.id)


_doomed: set[int] = set()  # unused at the last sweep


def _sweep() -> None:
    """Evict unused calls, because programs with ever new sizes create more and more calls.

    A thread may be about to append a call that the sweep found unused. So its number is reused only if the next sweep
    finds the call unused as well. Python appends such a call under a new number.
    """
    global calls, generation
    unused = set(ops.unused_calls()) - {_nothing}
    freed = [number for number in _doomed if number in unused]
    if freed:
        calls_of(calls, freed)  # entries may refer to the current list, and read it later
        calls, generation = [*calls], generation + 1
    for number in freed:
        calls[number] = None
    ops.release_calls(freed)
    _doomed.clear()
    _doomed.update(unused.difference(freed))
    for number in _doomed:
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
