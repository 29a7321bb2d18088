"""Client-side reference tracking of remote storages and the values over them."""

from __future__ import annotations

from functools import partial
from itertools import compress, repeat, starmap
from typing import TYPE_CHECKING, NoReturn

from djinn_core.interception.device.device_state import device_state
from djinn_core.ir.values import HANDLE_STEP, TensorMeta, make_handle, new_storage, storage_of
from djinn_core.reference_counts import counts_beside, only_listed

if TYPE_CHECKING:
    from djinn_core.interception.recording.recorder import Recorder
    from djinn_core.interception.tensors.element_copies import ElementCopy
    from djinn_core.interception.tensors.lazy_clones import SharedAddresses


def take_freed() -> list[Value]:
    """The values in `freed` that are gone for good; the others stay there."""
    freed = device_state.freed
    if not freed:
        return []
    taken = list(starmap(freed.popleft, repeat((), len(freed))))
    if not only_listed(taken):
        counts = counts_beside(taken)
        freed.extend(compress(taken, counts))
        taken = [value for value, count in zip(taken, counts, strict=True) if not count]
    try:
        for value in taken:
            value.handle  # noqa: B018 - copies that were made without a call of the constructor have none
    except AttributeError:
        return [value for value in taken if hasattr(value, "handle")]
    return taken


def still_to_free() -> list[int]:
    """The handles of the values that are gone for good, which stay in `freed`."""
    gone = take_freed()
    device_state.freed.extend(gone)
    return [value.handle for value in gone]


class Storage:
    """Memory on the remote side that one or more values look into.

    Attributes:
        last: the handle that was given out last. nbytes: its size.
        user: the recorder that recorded an op on it last. readers: other recorders with unsent reads of it.
        written: the recorder with an unsent write to it, and `written_at` that recorder's epoch at the write.
        addresses: results of `data_ptr()`; absent before its first call.
        elements: what is known here of its contents, or None; absent before it is asked for.
        shrunk: the size that the program gave it, where that is less than its memory; absent where it is not.
        sharing: the addresses that it has, or had until it was written, in common with a lazy clone; absent without one.
    """

    __slots__ = (
        "addresses",
        "elements",
        "last",
        "nbytes",
        "readers",
        "sharing",
        "shrunk",
        "user",
        "written",
        "written_at",
    )
    addresses: range
    shrunk: int
    sharing: SharedAddresses
    elements: ElementCopy | None

    def __init__(self, nbytes: int, user: Recorder | None) -> None:
        self.last = new_storage() * HANDLE_STEP  # `make_handle(..., 0)`, written out on the hot path
        self.nbytes = nbytes
        self.user = user
        self.readers: set[Recorder] | None = None
        self.written = user
        self.written_at = user.epoch if user is not None else 0

    @property
    def id(self) -> int:
        """Its number."""
        return storage_of(self.last)

    @property
    def views(self) -> int:
        """Number of handles of values over it that were given out."""
        return self.last - make_handle(self.id, 0)

    @views.setter
    def views(self, count: int) -> None:
        self.last = make_handle(self.id, count)

    def view(self) -> int:
        """A handle for one more value over this storage."""
        self.last = handle = self.last + 1
        return handle


class Value:
    """One remote tensor. When the last reference to it goes, its handle is freed."""

    __slots__ = ("handle", "meta", "storage")

    def __init__(self, storage: Storage, meta: TensorMeta) -> None:
        self.storage = storage
        self.meta = meta
        storage.last = self.handle = storage.last + 1

    @classmethod
    def at(cls, storage: Storage, meta: TensorMeta, handle: int) -> Value:
        """The value `handle`, which `storage.view()` gave out."""
        value = cls.__new__(cls)
        value.storage, value.meta, value.handle = storage, meta, handle
        return value

    def __reduce__(self) -> NoReturn:
        raise TypeError("a remote value cannot be pickled; pickle its tensor, which travels by way of the CPU")

    # `device_state.freed.append(self)`, without a step of Python's own: in one, the handler of a signal would run, and Python drops what a
    # finalizer raises, which is how Ctrl-C gets lost in the middle of a backward pass.
    __del__ = property(partial(partial, device_state.freed.append))


class BorrowedValue(Value):
    """A value owned elsewhere: its handle is not freed with this object."""

    __slots__ = ()

    def __init__(self, storage: Storage, meta: TensorMeta, handle: int) -> None:
        self.storage = storage
        self.meta = meta
        self.handle = handle

    __del__ = property(partial(partial, bool))  # nothing: another value frees it


def borrow(handle: int, meta: TensorMeta) -> BorrowedValue:
    """The value `handle` of a program, without holding it."""
    storage = Storage(meta.extent * meta.dtype.itemsize, None)
    storage.last = handle
    return BorrowedValue(storage, meta, handle)
