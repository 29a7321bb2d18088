"""Remote storages and the values that look into them, as the client keeps track of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NoReturn

from djinn_core.ir.values import TensorMeta, make_handle, new_storage

if TYPE_CHECKING:
    from djinn_core.interception.recorder import Recorder

# Handles that nobody holds any more, with their storages. Finalizers run at any moment, also while their own thread
# holds a lock, so they append here and do nothing else; `Recorder.cut` sends what has gathered.
freed: deque[tuple[int, Storage]] = deque()


class Storage:
    """Memory on the remote side that one or more values look into.

    Attributes:
        id: its number. nbytes: its size.
        user: the recorder that recorded an op on it last. readers: other recorders with unsent reads of it.
        written: the recorder with an unsent write to it, and `written_at` that recorder's epoch at the write.
    """

    __slots__ = ("id", "nbytes", "readers", "user", "views", "written", "written_at")

    def __init__(self, nbytes: int, user: Recorder | None) -> None:
        self.id = new_storage()
        self.nbytes = nbytes
        self.views = 0
        self.user = user
        self.readers: set[Recorder] | None = None
        self.written = user
        self.written_at = user.epoch if user is not None else 0

    def view(self) -> int:
        """A handle for one more value over this storage."""
        self.views += 1
        return make_handle(self.id, self.views)


class Value:
    """One remote tensor. When the last reference to it goes, its handle is freed."""

    __slots__ = ("handle", "meta", "storage")

    def __init__(self, storage: Storage, meta: TensorMeta) -> None:
        self.storage = storage
        self.meta = meta
        storage.views = views = storage.views + 1
        self.handle = storage.id << 32 | views

    def __reduce__(self) -> NoReturn:
        raise TypeError("a remote value cannot be pickled; pickle its tensor, which travels by way of the CPU")

    def __del__(self) -> None:
        freed.append((self.handle, self.storage))
