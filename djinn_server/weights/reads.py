"""Read weights from files in background threads, and make them values of a session.

The session's thread creates the values between messages. Programs that do not use a value do not wait for its read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import attrs
import torch

from djinn_core.errors import WeightsUnavailable
from djinn_core.ir.values import contiguous_strides
from djinn_core.wire.tensors import dtype_from_name
from djinn_core.wire.upload_messages import UploadPart
from djinn_core.wire.weight_messages import ReadWeights
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.limited import ledger_of
from djinn_server.memory.spill import bytes_on_device
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.snapshot_format import StoredValue
from djinn_server.running.storage_names import StorageNames
from djinn_server.running.values import ValueTable
from djinn_server.session_machine import Cause, Wait
from djinn_server.weights.shared_weights import Origin, SessionShares, WeightKey
from djinn_server.weights.uploads import UploadAssembly, is_countable
from djinn_server.weights.weight_reader import PartRead, WeightReader

READ_AHEAD: Final = 1 << 30  # maximum bytes that are read but not on the device yet
READ_AHEAD_SHARE: Final = 8  # with a memory limit, the maximum is limit / READ_AHEAD_SHARE if that is less


@attrs.define
class _PendingRead:
    """A weight to be read.

    Attributes:
        header: handle and layout of the value.
        origin: position of the bytes in a weight file.
        reading: the running read; None while it is queued.
    """

    header: UploadPart
    origin: Origin
    reading: PartRead | None = None


class WeightReads:
    """Pending weight reads of one session. Used by the session's thread.

    Attributes:
        reading: running and queued reads, by handle.
        shares: storages of the session that other sessions may share.
        journal: the session's journal; a closed one, which logs nothing, if it has none.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        values: ValueTable,
        uploads: UploadAssembly,
        reader: WeightReader,
        wakeup: Callable[[], None] = lambda: None,
        names: StorageNames | None = None,
    ) -> None:
        """Prepare the reads of a session.

        Args:
            runtime: device of the session.
            values: the session's values.
            uploads: the session's uploads, which create values and count pending bytes.
            reader: reads the files.
            wakeup: called when a read is complete.
            names: names of storages, as in `SessionShares`.
        """
        self._wakeup = wakeup
        self._runtime = runtime
        self._values = values
        self._uploads = uploads
        self._reader = reader
        self._ledger = ledger_of(runtime)
        self._in_place = runtime.device.type == "cpu" and self._ledger is None  # the read buffer becomes the value
        self._ahead = READ_AHEAD if self._ledger is None else min(READ_AHEAD, self._ledger.limit // READ_AHEAD_SHARE)
        self.shares = SessionShares(values, self._ledger, names)
        self.journal = Journal()
        self.reading: OrderedDict[int, _PendingRead] = OrderedDict()  # by handle

    def pending_bytes(self) -> int:
        """Return the bytes of running and queued reads."""
        return sum(pending.header.size for pending in self.reading.values())

    def clear(self) -> None:
        """Drop all pending reads and shares."""
        self.forget(list(self.reading))
        self.shares.clear()
        self.journal = Journal()

    def in_use(self, handle: int) -> bool:
        """Return True if this handle has a value or a pending read, so that an upload under it must wait."""
        return (handle in self._values or handle in self.reading) and not self._uploads.is_open(handle)

    def read(self, request: ReadWeights) -> None:
        """Create the value of a `ReadWeights` request, or queue its read. If the files have changed, the value is poison.

        Raises:
            ProtocolError: dtype, shape or size are invalid, or the handle is in use.
        """
        strides = contiguous_strides(request.shape) if is_countable(request.shape) else ()
        header = UploadPart(request.handle, request.dtype, request.shape, strides, request.size)
        self._uploads.check_new(header)
        key = WeightKey(request.version, request.name, request.start, request.size)
        origin = Origin(request.address, self._reader.canonical_key(request.address, key))
        self._hold_file(request.address, request.version)
        try:
            if self._find(header, origin) or self._map(header, origin):
                return
        except WeightsUnavailable as error:
            self._uploads.poison(request.handle, "WeightsUnavailable", str(error))
        else:
            self.reading[request.handle] = _PendingRead(header, origin)
            self._uploads.reading.add(request.handle)
            self._begin()

    def _begin(self) -> None:
        """Start queued reads in order, until the read-ahead limit is reached."""
        for handle, pending in list(self.reading.items()):
            size = pending.header.size
            if pending.reading is not None:
                continue
            if self._uploads.reading_bytes and not self._in_place and self._uploads.reading_bytes + size > self._ahead:
                return
            try:
                self._uploads.check_limit(size)
                pending.reading = self._reader.read(pending.origin.address, pending.origin.key)
                self._uploads.reading_bytes += size
                pending.reading.data.add_done_callback(lambda _: self._wakeup())
            except WeightsUnavailable as error:
                self.forget([handle])
                self._uploads.poison(handle, "WeightsUnavailable", str(error))
            except RuntimeError as error:
                self.forget([handle])
                self._uploads.refuse_bytes(pending.header, error)

    def wait(self, handles: Collection[int] | None = None) -> Wait:
        """Return the `Wait` for the reads of these values, or of all values if `handles` is None."""
        reading = self.reading
        handles_read = [*reading] if handles is None else [handle for handle in handles if handle in reading]
        return Wait([(Cause.READ, handle) for handle in handles_read], has_arrived=lambda key: key[1] not in reading)

    def take_finished(self) -> None:
        """Create the values of completed reads, and start queued reads."""
        for handle, pending in list(self.reading.items()):
            if pending.reading is not None and pending.reading.data.done():
                self.forget([handle])
                self._finish(pending, pending.reading)
        if self.reading:
            self._begin()

    def forget(self, handles: Iterable[int]) -> None:
        """Drop the reads of these values. A running read ends without a value."""
        for handle in handles:
            pending = self.reading.pop(handle, None)
            if pending is not None:
                self._uploads.reading.discard(handle)
                self._uploads.reading_bytes -= pending.header.size if pending.reading is not None else 0

    def _finish(self, pending: _PendingRead, reading: PartRead) -> None:
        try:
            data = reading.result()
            if not pending.header.size:
                self._uploads.finish(pending.header, data)
            elif not self._find(pending.header, pending.origin):
                self._store_value(pending.header, pending.origin, data)
        except WeightsUnavailable as error:
            self._uploads.poison(pending.header.handle, "WeightsUnavailable", str(error))
        except (RuntimeError, MemoryError) as error:
            self._uploads.refuse_bytes(pending.header, error)

    def _map(self, header: UploadPart, origin: Origin, offset: int = 0) -> bool:
        """Create a value over a memory-mapped file. Return False if the bytes must be read instead."""
        if not self._in_place:  # mapped memory cannot be evicted, and accelerators cannot use it
            return False
        mapped = self._reader.map(origin.address, origin.key)
        if mapped is not None:
            self._share(header, self._reader.shared.share(origin.key, mapped.untyped_storage()), origin, offset)
            self._reader.populate(origin.key)
        return mapped is not None

    # --- memory that others have -----------------------------------------------------------------------------------

    def _memory_lock(self) -> AbstractContextManager[object]:
        """Return the lock without which no thread evicts or restores values; without a ledger, an empty context."""
        return nullcontext() if self._ledger is None else self._ledger.lock

    def _find(self, header: UploadPart, origin: Origin, offset: int = 0) -> bool:
        """Create a value over bytes that another session has read. If evicted bytes cannot be restored, it is poison.

        Return False if no session has the bytes.
        """
        with self._memory_lock():
            storage = self._reader.shared.find(origin.key)
            if storage is None:
                return False
            try:
                if self._ledger is not None:
                    self._ledger.reload(bytes_on_device(storage, self._runtime.device))
                self._share(header, storage, origin, offset)
            except (RuntimeError, OSError) as error:
                self._uploads.refuse_bytes(header, error)
            return True

    def _store_value(self, header: UploadPart, origin: Origin, data: torch.Tensor, offset: int = 0) -> None:
        """Create a value from bytes that were read, and share its memory with other sessions.

        Raises:
            RuntimeError: the device has no memory for the value.
        """
        with self._memory_lock(), torch.inference_mode():
            storage = self._runtime.receive(data).untyped_storage()
            if self._ledger is not None and not storage.resizable():  # eviction must be able to free the memory
                storage = storage.clone()
            self._share(header, self._reader.shared.share(origin.key, storage), origin, offset)

    def _share(self, header: UploadPart, storage: torch.UntypedStorage, origin: Origin, offset: int) -> None:
        with torch.inference_mode():
            value = torch.empty(0, dtype=dtype_from_name(header.dtype), device=self._runtime.device)
            self._values[header.handle] = value.set_(storage, offset, header.shape, header.stride)
        self._note_shared(header.handle, value, origin)

    def _note_shared(self, handle: int, value: torch.Tensor, origin: Origin) -> None:
        self.shares.add(handle, origin)
        if self.shares.names is not None:
            key = origin.key
            self.shares.names.set_name(value, f"{key.version.hex()} {key.start} {key.size} {key.name}".encode())
        if self._ledger is not None:
            source = self._reader.source_of(origin.address, origin.key)
            if source is not None:
                self._ledger.set_source(value, source)

    def read_again(self, stored: Sequence[StoredValue]) -> None:
        """Read the unmodified weights of a snapshot again from their files.

        If a file is missing or has changed, its values are poison.
        """
        for entry in stored:
            origin = Origin(entry.address, WeightKey(entry.version, entry.name, entry.start, entry.size))
            header = UploadPart(entry.handle, entry.dtype, entry.shape, entry.stride, entry.size)
            self._hold_file(entry.address, entry.version)
            try:
                if not (self._find(header, origin, entry.offset) or self._map(header, origin, entry.offset)):
                    data = self._reader.read(origin.address, origin.key).result()
                    self._store_value(header, origin, data, entry.offset)
            except WeightsUnavailable as error:
                self._uploads.poison(entry.handle, "WeightsUnavailable", str(error))
            except (RuntimeError, MemoryError) as error:
                self._uploads.refuse_bytes(header, error)

    # --- files that a journal needs --------------------------------------------------------------------------------

    def _hold_file(self, address: str, version: bytes) -> None:
        """Link a weight file into the journal, because the file may be removed before the session is recovered."""
        if self.journal.open:
            self._reader.keep_file(address, version, self.journal.contents.path(version))

    def hold_only(self, versions: set[bytes]) -> None:
        """Drop all weight files from the journal except those of `versions`, because a snapshot replaces the records."""
        self.journal.contents.used_weights = versions
