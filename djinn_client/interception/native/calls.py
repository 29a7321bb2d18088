"""Calls that C++ knows: Python infers a call once, and C++ repeats it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from djinn_client.interception.native.library import dtype_number, ops
from djinn_client.interception.shape_inference.write_checks import raises_versions, refuses_overlap
from djinn_client.torch_backend import returns_list
from djinn_core.ir.program import Call, Signature, Slot
from djinn_core.ir.values import TensorMeta

NOTHING, LIST, BUMPS, NO_OVERLAP, EMPTY = 1, 2, 4, 8, 16  # flags of `add_call`
_NEW, _VIEW, _SAME, _NONE = range(4)  # kinds of results
_EMPTY_OPS: Final = frozenset({"aten::empty.memory_format", "aten::empty_strided"})
INT, FLOAT, UNSIGNED = range(3)  # kinds of slots

list_of: Final[Callable[[torch.Tensor], list[Any]]] = torch.Tensor.tolist  # PyTorch's own
calls: Final[list[Call | None]] = []  # by number
signature_ids: Final[list[int]] = []
_numbers: Final[dict[int, int]] = {}  # by the id of a call, which `calls` keeps


def number_of(call: Call) -> int:
    """The number of a call in C++, which gets it at the first time."""
    found = _numbers.get(id(call))
    if found is None:
        found = _add(call, _description(call))
        _numbers[id(call)] = found
    return found


_nothing = -1
_adding = threading.RLock()


def nothing() -> int:
    """The number of a call that returns its operand once more."""
    global _nothing
    if _nothing < 0:
        _nothing = _add(None, [1, 0, NOTHING, 0, 0])
    return _nothing


def _add(call: Call | None, description: Sequence[int]) -> int:
    with _adding:  # C++ gives the number without the interpreter's lock
        return _add_alone(call, description)


def _add_alone(call: Call | None, description: Sequence[int]) -> int:
    global _released
    if len(calls) - _released > _sweep_at:
        _sweep()
    number = int(ops.add_call(description))
    if number < len(calls):
        _released -= 1
    while number >= len(calls):  # several after a fork in the middle of this, on another thread
        calls.append(None)
        signature_ids.append(0)
    calls[number] = call
    signature_ids[number] = 0 if call is None else call.signature.id
    return number


def begin_in_child() -> None:
    """In a forked child: a thread that stayed in the parent may have held the lock."""
    global _adding
    _adding = threading.RLock()


def forget(signature: Signature | None = None) -> None:
    """Have C++ ask Python about the next call of each key, or of each call of `signature`."""
    if signature is None:
        ops.forget_calls([])
        return
    numbers = [n for n, known in enumerate(signature_ids) if known == signature.id and calls[n] is not None]
    if numbers:
        ops.forget_calls(numbers)


_FEWEST: Final = 16384  # calls before the first sweep
_sweep_at = _FEWEST
_released = 0  # numbers that C++ uses again
_doomed: set[int] = set()  # not used at the last sweep


def _sweep() -> None:
    """Forget calls that nothing uses: programs of ever new sizes make more and more.

    A thread may be about to append a call that is found unused. So its number goes to another call only if a second sweep finds it
    unused as well; Python appends it under a new number meanwhile.
    """
    global _sweep_at, _released
    unused = set(ops.unused_calls()) - {_nothing}
    gone = [number for number in _doomed if number in unused]
    for number in gone:
        calls[number] = None
    ops.release_calls(gone)
    _released += len(gone)
    _doomed.clear()
    _doomed.update(unused.difference(gone))
    for number in _doomed:
        call = calls[number]
        if call is not None and _numbers.get(id(call)) == number:
            del _numbers[id(call)]
    _sweep_at = max(_FEWEST, 2 * (len(calls) - _released))


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
    made = [call.operand_count, call.slot_count, flags, len(call.writes), *call.writes, len(new)]
    for meta, alias, same, nbytes in call.outcome:
        made += _result(meta, alias, same, nbytes)
    return made


def _result(meta: TensorMeta | None, alias: int, same: int, nbytes: int) -> list[int]:
    if same >= 0:
        return [_SAME, same]
    if meta is None:
        return [_NONE]
    made = [_NEW, 0] if alias < 0 else [_VIEW, alias]
    made += [dtype_number(meta.dtype), meta.device, meta.conj + 2 * meta.neg, meta.offset, nbytes]
    return [*made, len(meta.shape), *meta.shape, *meta.stride]


def encoded_slots(slots: Sequence[Slot]) -> tuple[list[int], list[int]]:
    """Scalars as C++ keeps them: 64 bits each, and what these are."""
    bits: list[int] = []
    kinds: list[int] = []
    for slot in slots:
        if isinstance(slot, float):
            bits.append(struct.unpack("q", struct.pack("d", slot))[0])
            kinds.append(FLOAT)
        elif slot >= 1 << 63:
            bits.append(slot - (1 << 64))
            kinds.append(UNSIGNED)
        else:
            bits.append(int(slot))
            kinds.append(INT)
    return bits, kinds


def decoded_slots(bits: torch.Tensor, kinds: torch.Tensor) -> tuple[Slot, ...]:
    """The scalars again."""
    numbers: list[Any] = list_of(bits)
    if not numbers:
        return ()
    which: bytes = kinds.numpy().tobytes()
    if 1 in which:
        floats = list_of(bits.view(torch.float64))
        numbers = [floats[i] if kind == FLOAT else numbers[i] for i, kind in enumerate(which)]
    if UNSIGNED in which:
        numbers = [n + (1 << 64) if kind == UNSIGNED and n < 0 else n for n, kind in zip(numbers, which, strict=True)]
    return tuple(numbers)
