"""Client-side reference tracking of remote storages and the values over them."""

from __future__ import annotations

import gc
from functools import partial
from itertools import compress, repeat, starmap
from types import MethodType
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

import msgspec

from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.native import library as native
from djinn_core.ir.handles import make_handle, new_handle, storage_of, view_of
from djinn_core.ir.values import TensorMeta
from djinn_core.reference_counts import counts_beside, only_listed

if TYPE_CHECKING:
    from djinn_core.interception.recording.recorder import Recorder
    from djinn_core.interception.tensors.element_copies import ElementCopy
    from djinn_core.interception.tensors.host_values import HostValue
    from djinn_core.interception.tensors.lazy_clones import SharedAddresses


# From here on views of borrowed memory are numbered, whose owner numbers its own.
OWN_VIEWS: Final = 1 << 30


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
    return taken


def still_to_free() -> list[int]:
    """The handles of the values that are gone for good, which stay in `freed`."""
    gone = take_freed()
    device_state.freed.extend(gone)
    return [value.handle for value in gone]


def live_values() -> list[tuple[int, int]]:
    """Return the handle of each value of the process that it owns, and the bytes of its storage.

    The garbage collector lists the values. It does not list objects after `gc.freeze()`, so they are unfrozen.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    return [(item.handle, item.storage.nbytes) for item in gc.get_objects() if type(item) is Value]


class Storage(msgspec.Struct, eq=False, gc=False):  # made in one step: each op makes one
    """Memory on the remote side that one or more values look into.

    The garbage collector does not look at it: what it refers to does not refer to tensors, so no cycle leads through one.

    Attributes:
        last: the handle that was given out last. nbytes: its size.
        user: the recorder that recorded an op on it last. readers: other recorders with unsent reads of it.
        written: the recorder with an unsent write to it, and `written_at` that recorder's epoch at the write.
        addresses: results of `data_ptr()`; None before its first call.
        elements: what was fetched of its contents, or None. host: its contents, where the client knows them without fetching; or None.
        shrunk: the size that the program gave it, where that is less than its memory; otherwise None.
        sharing: the addresses that it has, or had until it was written, in common with a lazy clone; None without one.
    """

    last: int
    nbytes: int
    user: Recorder | None
    readers: set[Recorder] | None
    written: Recorder | None
    written_at: int
    addresses: range | None = None
    elements: ElementCopy | None = None
    host: HostValue | None = None
    shrunk: int | None = None
    sharing: SharedAddresses | None = None

    @classmethod
    def begin(cls, nbytes: int, user: Recorder | None) -> Storage:
        """New memory of `nbytes` bytes, which `user` is about to write."""
        epoch = user.epoch if user is not None else 0
        return cls(new_handle(), nbytes, user, None, user, epoch)

    @property
    def id(self) -> int:
        """Its number."""
        return storage_of(self.last)

    @property
    def views(self) -> int:
        """Number of handles of values over it that were given out."""
        return view_of(self.last)

    @views.setter
    def views(self, count: int) -> None:
        self.last = make_handle(self.id, count)

    def view(self) -> int:
        """A handle for one more value over this storage."""
        self.last = handle = self.last + 1
        return handle


class Value(msgspec.Struct, eq=False):
    """One remote tensor. When the last reference to it goes, its handle is freed."""

    borrowed: ClassVar[bool] = False
    handle: int
    meta: TensorMeta
    storage: Storage

    @classmethod
    def begin(cls, storage: Storage, meta: TensorMeta) -> Value:
        """A new value over `storage`."""
        storage.last = handle = storage.last + 1
        return cls(handle, meta, storage)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a remote value cannot be pickled; pickle its tensor, which travels by way of the CPU")

    def __copy__(self) -> NoReturn:
        raise TypeError("a remote value cannot be copied: its handle would be freed twice")

    # `device_state.freed.append(self)`, without a step of Python's own: in one, the handler of a signal would run, and Python drops what a
    # finalizer raises, which is how Ctrl-C gets lost in the middle of a backward pass.
    __del__ = property(partial(MethodType, device_state.freed.append))


class BorrowedValue(Value, eq=False):
    """A value owned elsewhere: its handle is not freed with this object."""

    borrowed = True
    __del__ = property(partial(partial, bool))  # nothing: another value frees it


def borrow(handle: int, meta: TensorMeta, beside: Value | None = None) -> Value:
    """The value `handle` of a program, without holding it; over the memory of `beside`, where that is another view of the same."""
    if beside is None:
        storage = Storage.begin(meta.extent * meta.dtype.itemsize, None)
        storage.last = make_handle(storage_of(handle), OWN_VIEWS)
    else:
        storage = beside.storage
    return BorrowedValue(handle, meta, storage)


if native.ON:
    from djinn_core.interception.native import values as native_values

    Storage, Value = native_values.NativeStorage, native_values.NativeValue  # type: ignore[misc, assignment]
    borrow, still_to_free = native_values.borrow, native_values.still_to_free  # type: ignore[assignment]
    take_freed, live_values = native_values.take_freed, native_values.live_values  # type: ignore[assignment]
