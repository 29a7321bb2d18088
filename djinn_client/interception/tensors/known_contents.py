"""Cached copies of fetched small values and pages, so that the next read needs no round trip.

A copy is valid while its storage has the fetched version. C++ counts versions. Contents that the client knows without a
fetch, from uploads or constant folding, are in `djinn_native/csrc/known.cpp`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, ref

import torch

from djinn_client.interception.native.library import ops

MAX_VALUE_BYTES: Final = 4096  # size limit in bytes of a value that is cached after a fetch, or fetched ahead
BUDGET: Final = 1 << 24  # limit in bytes of all cached contents
_OVERHEAD: Final = 1024  # overhead in bytes that each part counts in addition to its data
_FEWEST: Final = 64  # number of cached storages at which dead ones are searched for


class Page(NamedTuple):
    """A page of a storage, as a key of cached copies. `number`: number of the page, from 0."""

    number: int


class KnownContents:
    """Cached contents of a storage at one version.

    A fetch gets this object before it starts. A write during the fetch makes the object outdated.

    Attributes:
        version: the version.
        copies: read-only elements of small values by handle, and read-only bytes of pages.
        fetches: number of parts that were fetched separately, by page number.
        test: (op, operand, version of the operand's storage) if the storage is the result of a test such as `isnan`
            of one element. A read then fetches the operand, and computes the test on the client.
    """

    __slots__ = ("__weakref__", "copies", "fetches", "test", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.test: tuple[Any, Any, int] | None = None
        self.copies: dict[int | Page, torch.Tensor] = {}
        self.fetches: dict[int, int] = {}

    def keep(self, key: int | Page, copy: torch.Tensor) -> None:
        """Cache a copy that was fetched."""
        self.copies[key] = copy
        known_contents.count(self, key, copy.nbytes)

    def drop(self, key: Any) -> None:
        """Forget the copy `key`."""
        self.copies.pop(key, None)


class _ContentsTable:
    """Cached contents of all storages.

    Attributes:
        counted: (owner, key, bytes) of each cached copy, oldest first.
        nbytes: total number of bytes.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, KnownContents] = {}
        self._sweep_at = _FEWEST
        self.counted: deque[tuple[ReferenceType[KnownContents], Any, int]] = deque()
        self.nbytes = 0

    def get(self, storage: int) -> KnownContents | None:
        """Return the cached contents of a storage, or None if nothing is cached for its current version."""
        contents = self._by_storage.get(storage)
        return contents if contents is not None and contents.version == ops.storage_version(storage) else None

    def at(self, storage: int, version: int) -> KnownContents:
        """Return the cached contents of a storage at a version. They are empty at first.

        The contents of a dead storage are not cached, because its writes are not counted.
        """
        if version < 0:
            return KnownContents(version)
        contents = self._by_storage.get(storage)
        if contents is None or contents.version != version:
            if len(self._by_storage) >= self._sweep_at:
                self._sweep()
            contents = self._by_storage[storage] = KnownContents(version)
        return contents

    def _sweep(self) -> None:
        # other threads add entries meanwhile
        for number in [n for n in [*self._by_storage] if ops.storage_version(n) < 0]:
            self._by_storage.pop(number, None)
        self._sweep_at = max(_FEWEST, 2 * len(self._by_storage))

    def count(self, owner: KnownContents, key: Any, nbytes: int) -> None:
        """Count bytes that `owner` holds under `key` from now on. Above `BUDGET`, drop the oldest copies."""
        self.counted.append((ref(owner), key, nbytes + _OVERHEAD))
        self.nbytes += nbytes + _OVERHEAD
        try:
            while self.nbytes > BUDGET:
                owner_ref, oldest_key, size = self.counted.popleft()
                self.nbytes -= size
                if (oldest_owner := owner_ref()) is not None:
                    oldest_owner.drop(oldest_key)
        # several threads count without a lock: bytes that were counted twice are removed with the last owner
        except IndexError:
            self.nbytes = 0

    def clear(self) -> None:
        """Forget everything, because a session has ended."""
        self._by_storage.clear()
        ops.forget_known()


known_contents: Final = _ContentsTable()
