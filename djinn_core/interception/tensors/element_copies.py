"""CPU copies of small storages whose elements are fetched one by one.

Each fetch is a round trip. A program that asks for a third part of the same memory, which has not been written since the first,
is given it and all further ones from a copy of the whole. The first write that is recorded drops the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from djinn_core.errors import RemoteError
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.interception.tensors.memory_views import from_the_beginning, view_of

LIMIT: Final = 1 << 16  # bytes of a storage: as much as travels in the time of a round trip over most links
SMALL_PART: Final = 4  # how many times as large as a part a storage is at least
_FETCHES: Final = 2  # parts that are fetched by themselves


class ElementCopy:
    """Copy of a storage that is made when enough parts of it were fetched.

    Attributes:
        fetches: parts that were fetched since the storage was written last.
        memory: its bytes; None as long as there are none.
        changes: `port.memory_changes` when it was made.
    """

    __slots__ = ("changes", "fetches", "memory")

    def __init__(self) -> None:
        self.fetches = 0
        self.memory: torch.Tensor | None = None
        self.changes = port.memory_changes


def is_small_part(tensor: LazyTensor) -> bool:
    """True if `tensor` is a small part of a small storage."""
    value = tensor.remote
    return value.meta.nbytes * SMALL_PART <= value.storage.nbytes <= LIMIT


def fetch_part(tensor: LazyTensor, fetch: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
    """The elements of a part of a storage: `fetch` gets them, or those of the whole, where they are not here.

    Raises:
        RemoteError: they could not be computed.
    """
    value = tensor.remote
    storage = value.storage
    copy = getattr(storage, "elements", None)
    if copy is None or copy.changes != port.memory_changes:
        copy = storage.elements = ElementCopy()
    if copy.memory is None:
        copy.fetches += 1
        if copy.fetches <= _FETCHES:
            return fetch(tensor)
        try:
            # A write in another thread in the meantime takes `copy` from the storage, so nothing is found in it later.
            copy.memory = fetch(from_the_beginning(value, storage.nbytes)).clone()
        except RemoteError:  # of this part, or of one that was not asked for
            return fetch(tensor)
    return view_of(copy.memory, value.meta).clone()
