"""Copies of small values and pages that were fetched, so that the next read needs no round trip.

A copy is valid while its storage has the version that was fetched. C++ counts the versions. Contents that were never fetched, since the
client uploaded them or knows what ops make of them, are in `djinn_native/csrc/known.cpp`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, ref

import torch

from djinn_client.interception.native.library import ops

LARGEST_VALUE: Final = 4096  # bytes of a value that is kept when it was fetched, or fetched ahead
BUDGET: Final = 1 << 24  # bytes of all that is known
_OVERHEAD: Final = 1024  # bytes that are counted for each part beside its own
_FEWEST: Final = 64  # storages whose contents are known before those that are gone are looked for


class Page(NamedTuple):
    """A page of a storage, as a key."""

    number: int


class KnownContents:
    """What is known of a storage at one version of it. Whoever fetches gets this object before, so that no write is missed.

    Attributes:
        copies: elements of small values by handle, and bytes of pages; not to be changed.
        fetches: parts of a page, by its number, that were fetched by themselves.
        asks: an op that made the storage, its operand, and the version that the storage of the operand had: the operand is fetched instead.
    """

    __slots__ = ("__weakref__", "asks", "copies", "fetches", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.asks: tuple[Any, Any, int] | None = None
        self.copies: dict[int | Page, torch.Tensor] = {}
        self.fetches: dict[int, int] = {}

    def keep(self, key: int | Page, copy: torch.Tensor) -> None:
        """Keep a copy that was fetched."""
        self.copies[key] = copy
        known_contents.count(self, key, copy.nbytes)

    def drop(self, key: Any) -> None:
        """Forget the copy `key`."""
        self.copies.pop(key, None)


class _ContentsTable:
    """The known contents of all storages.

    Attributes:
        counted: owners of known bytes with a key of theirs, and how many; the oldest first.
        nbytes: of all of them.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, KnownContents] = {}
        self._sweep_at = _FEWEST
        self.counted: deque[tuple[ReferenceType[KnownContents], Any, int]] = deque()
        self.nbytes = 0

    def get(self, storage: int) -> KnownContents | None:
        """Return what is known about the contents of a storage, or None."""
        found = self._by_storage.get(storage)
        return found if found is not None and found.version == ops.storage_version(storage) else None

    def at(self, storage: int, version: int) -> KnownContents:
        """What is known of a storage at a version; nothing at first. Of one that is gone nothing is kept: its writes are not counted."""
        if version < 0:
            return KnownContents(version)
        found = self._by_storage.get(storage)
        if found is None or found.version != version:
            if len(self._by_storage) >= self._sweep_at:
                self._sweep()
            found = self._by_storage[storage] = KnownContents(version)
        return found

    def _sweep(self) -> None:
        for number in [n for n in [*self._by_storage] if ops.storage_version(n) < 0]:  # other threads add to it
            self._by_storage.pop(number, None)
        self._sweep_at = max(_FEWEST, 2 * len(self._by_storage))

    def count(self, owner: KnownContents, key: Any, nbytes: int) -> None:
        """Count bytes that `owner` has from now on; beyond `BUDGET` drop the oldest."""
        self.counted.append((ref(owner), key, nbytes + _OVERHEAD))
        self.nbytes += nbytes + _OVERHEAD
        try:
            while self.nbytes > BUDGET:
                oldest, what, size = self.counted.popleft()
                self.nbytes -= size
                if (dropped := oldest()) is not None:
                    dropped.drop(what)
        except IndexError:  # several threads count without a lock: what was counted twice is gone with the last one
            self.nbytes = 0

    def clear(self) -> None:
        """Forget everything: a session has ended."""
        self._by_storage.clear()
        ops.forget_known()


known_contents: Final = _ContentsTable()
