"""Scalars of programs as arrays: 64 bits for each scalar, and its type."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from djinn_core.ir.program import Slot

Words = np.ndarray[Any, np.dtype[np.int64]]
Kinds = np.ndarray[Any, np.dtype[np.uint8]]
INT, FLOAT, UNSIGNED = range(3)  # kinds of slots


def encoded_slots(slots: Sequence[Slot]) -> tuple[list[int], list[int]]:
    """Return the bits and the types of scalars."""
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


def slot_arrays(slots: Sequence[Slot]) -> tuple[Words, Kinds]:
    """Return the bits and the types of scalars as arrays."""
    bits, kinds = encoded_slots(slots)
    return np.array(bits, np.int64), np.array(kinds, np.uint8)


def decoded_slots(bits: Words, kinds: Kinds) -> tuple[Slot, ...]:
    """Return the scalars that `encoded_slots` encoded."""
    numbers: list[Any] = bits.tolist()
    kind_codes = kinds.tobytes()
    if FLOAT in kind_codes:
        floats = bits.view(np.float64).tolist()
        numbers = [floats[i] if kind == FLOAT else numbers[i] for i, kind in enumerate(kind_codes)]
    if UNSIGNED in kind_codes:
        numbers = [
            n + (1 << 64) if kind == UNSIGNED and n < 0 else n for n, kind in zip(numbers, kind_codes, strict=True)
        ]
    return tuple(numbers)
