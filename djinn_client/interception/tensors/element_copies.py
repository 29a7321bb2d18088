"""CPU copies of memory whose elements are fetched one by one.

Each fetch is a round trip. A program that asks for a third part of the same page of a storage, which has not been written since
the first, is given it and all further ones from a copy of the page. A small storage is fetched whole when its first part is asked for. The first
write that is recorded drops the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.memory_views import memory_between, view_of
from djinn_core.errors import RemoteError
from djinn_core.system.lru import LruCache

PAGE: Final = 1 << 16  # bytes: as much as travels in the time of a round trip over most links
PAGES: Final = 64  # of one storage, whose copies are kept
SMALL_PART: Final = 4  # how many times as large as a part its page is at least
_FETCHES: Final = 2  # parts of a page that are fetched by themselves
_SMALL: Final = 4096  # bytes of a storage that is fetched whole


class ElementCopy:
    """Copies of those pages of a storage of which enough parts were fetched.

    Attributes:
        fetches: parts of a page that were fetched since the storage was written last.
        pages: the bytes of pages.
        changes: `port.memory_changes` when it was made.
    """

    __slots__ = ("changes", "fetches", "pages")

    def __init__(self) -> None:
        self.fetches: dict[int, int] = {}
        self.pages: LruCache[int, torch.Tensor] = LruCache(PAGES)
        self.changes = port.memory_changes


def is_small_part(tensor: LazyTensor) -> bool:
    """True if `tensor` is a small part of a page of its storage."""
    value = tensor.remote
    meta = value.meta
    weight = meta.nbytes * SMALL_PART
    # Values whose size only the executor knows, such as random states, have no bytes here.
    if not 0 < weight <= min(value.storage.nbytes, PAGE):
        return False
    return value.storage.nbytes <= PAGE or _page_of(tensor) == (meta.extent * meta.dtype.itemsize - 1) // PAGE


def fetch_part(tensor: LazyTensor, fetch: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
    """The elements of a part of a page: `fetch` gets them, or those of the page, where they are not here.

    Raises:
        RemoteError: they could not be computed.
    """
    value = tensor.remote
    storage, page = value.storage, _page_of(tensor)
    copy = storage.elements
    if copy is None or copy.changes != port.memory_changes:
        copy = storage.elements = ElementCopy()
    memory = copy.pages.use(page)
    if memory is None:
        copy.fetches[page] = count = copy.fetches.get(page, 0) + 1
        if count <= _FETCHES and storage.nbytes > _SMALL:
            return fetch(tensor)
        try:
            # A write in another thread in the meantime takes `copy` from the storage, so nothing is found in it later.
            end = min(storage.nbytes, (page + 1) * PAGE)
            memory = fetch(memory_between(value, page * PAGE, end)).clone()
        except RemoteError:  # of this part, or of one that was not asked for
            return fetch(tensor)
        copy.pages.store(page, memory)
    return view_of(memory, value.meta, page * PAGE).clone()


def _page_of(tensor: LazyTensor) -> int:
    meta = tensor.remote.meta
    return meta.offset * meta.dtype.itemsize // PAGE
