"""Handles: the numbers by which client and executor name values. This module defines their layout.

Two modules shift by `VIEW_BITS` themselves for speed: `wire/binding_delta.py`, which packs handles as differences, and
an executor's table of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final

VIEW_BITS: Final = 32
VIEW_MASK: Final = (1 << VIEW_BITS) - 1
# The lower bits repeat the storage number. Python's sets and dictionaries hash an int by its lower bits, and equal
# lower bits would make each lookup several times as slow.
_STEP: Final = (1 << VIEW_BITS) + 1


def make_handle(storage: int, view: int) -> int:
    """Return the handle of the `view`-th tensor over storage `storage`. Tensors that share memory share `storage_of`."""
    return storage * _STEP + view


def storage_of(handle: int) -> int:
    """Return the number of the storage (the alias set) of the value `handle`."""
    return handle >> VIEW_BITS


def storages_of(handles: Iterable[int]) -> list[int]:
    """Return `storage_of` for each handle, without a call per handle."""
    return [handle >> VIEW_BITS for handle in handles]


def view_of(handle: int) -> int:
    """Return the view number that was given to `make_handle`."""
    return handle - (handle >> VIEW_BITS) & VIEW_MASK


def views_of(handles: Iterable[int]) -> list[int]:
    """Return `view_of` for each handle, without a call per handle."""
    return [handle - (handle >> VIEW_BITS) & VIEW_MASK for handle in handles]


# Random state is a value like any other: a random op reads and writes this storage.
RANDOM_STATE: Final = 0
_storages = itertools.count(_STEP, _STEP)
# Handle of view 0 of a new storage of this process. Handles of its further views follow.
new_handle: Final = _storages.__next__


_reserve: Callable[[int], int] | None = None


def number_storages_by(reserve: Callable[[int], int]) -> None:
    """Make `reserve` number storages from now on. It reserves consecutive numbers and returns the first."""
    global _reserve
    _reserve = reserve


def new_storage() -> int:
    """Return a new storage number of this process."""
    return storage_of(new_handle()) if _reserve is None else _reserve(1)
