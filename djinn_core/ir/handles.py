"""Handles: the numbers by which client and executor name values.

How one is laid out is known here. Others make, split and compare handles by these functions; two modules shift by `VIEW_BITS` themselves, because
calls are counted there: the wire, which packs handles as differences (`wire/binding_delta.py`), and an executor's table of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final

VIEW_BITS: Final = 32
VIEW_MASK: Final = (1 << VIEW_BITS) - 1
# The number of the storage once more, in the lower bits: these decide where Python's sets and dictionaries put an int, and
# would be the same for nearly all handles, which makes every look-up several times as slow.
_STEP: Final = (1 << VIEW_BITS) + 1


def make_handle(storage: int, view: int) -> int:
    """The handle of the `view`-th tensor over storage `storage`. Tensors that share memory share `storage_of`."""
    return storage * _STEP + view


def storage_of(handle: int) -> int:
    """The number of the storage (the alias set) that the value `handle` looks into."""
    return handle >> VIEW_BITS


def storages_of(handles: Iterable[int]) -> list[int]:
    """`storage_of` of each handle, for paths where a call for each costs too much."""
    return [handle >> VIEW_BITS for handle in handles]


def view_of(handle: int) -> int:
    """The number of the value `handle` among those over its storage, as it was given to `make_handle`."""
    return handle - (handle >> VIEW_BITS) & VIEW_MASK


def views_of(handles: Iterable[int]) -> list[int]:
    """As `storages_of`: `view_of` of each handle."""
    return [handle - (handle >> VIEW_BITS) & VIEW_MASK for handle in handles]


# Random state is a value like any other: a random op reads and writes this storage.
RANDOM_STATE: Final = 0
_storages = itertools.count(_STEP, _STEP)
# `make_handle(storage, 0)` of a storage that this process has not used before; those of its further views follow it.
new_handle: Final = _storages.__next__


_reserve: Callable[[int], int] | None = None


def number_storages_by(reserve: Callable[[int], int]) -> None:
    """Have `reserve` number storages from now on: it reserves so many numbers in a row and returns the first."""
    global _reserve
    _reserve = reserve


def new_storage() -> int:
    """A storage number that this process has not used before."""
    return storage_of(new_handle()) if _reserve is None else _reserve(1)
