"""Create values of a session from uploads of tensor bytes, which arrive in one or more parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import attrs
import torch

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Buffer
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.compression import expanded
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import is_of_kind
from djinn_core.wire.tensors import dtype_from_name, extent
from djinn_core.wire.upload_messages import BlobOffer, BlobQuery, UploadPart
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.limited import ledger_of
from djinn_server.memory.room import is_out_of_memory
from djinn_server.recovery.blob_files import BlobFiles
from djinn_server.recovery.journal import Journal
from djinn_server.running.storage_names import StorageNames
from djinn_server.running.values import Poison, ValueTable
from djinn_server.session_machine import Cause, Wait
from djinn_server.weights.store import WeightStore, mapped_bytes

WITHDRAWN = "its upload was interrupted: create the tensor again"
_log = get_logger("djinn.server")
_SIZE_LIMIT = 1 << 63  # PyTorch's sizes are smaller


@attrs.define
class _Partial:
    header: UploadPart
    data: torch.Tensor | None  # None: memory was short, and the remaining parts are dropped
    received: int


class UploadAssembly:
    """Collects the parts of uploads, and creates a value of each complete upload.

    Attributes:
        wanted: digests by handle of offered blobs that the client must upload, because the executor lacks them.
        journal: the session's journal; a closed one, which logs nothing, if it has none.
        names: names of storages, as in `SessionShares`.
        reading: handles of pending weight reads.
        reading_bytes: bytes of the started reads.
    """

    def __init__(self, runtime: DeviceRuntime, values: ValueTable, store: WeightStore | None) -> None:
        """`store`: the tenant's weight store; None: uploads are not stored."""
        self.reading: set[int] = set()
        self.reading_bytes = 0
        self._runtime = runtime
        self._values = values
        self._store = store
        self.wanted: dict[int, bytes] = {}
        self.journal = Journal()
        self.names: StorageNames | None = None
        self._partial: dict[int, _Partial] = {}
        self._held_blobs: dict[bytes, torch.Tensor] = {}

    @property
    def busy(self) -> bool:
        """True while an upload is incomplete or a value is being read."""
        return bool(self.wanted or self._partial or self.reading)

    def is_open(self, handle: int) -> bool:
        """Return True if bytes of the upload of this handle are missing."""
        return handle in self.wanted or handle in self._partial

    @property
    def promised(self) -> tuple[tuple[bytes, int], ...]:
        """Digests and sizes of blobs that `hold` has reported as present, and that the client has not offered yet."""
        return tuple([(digest, data.nbytes) for digest, data in self._held_blobs.items()])

    def clear(self) -> None:
        """Drop all unfinished uploads."""
        self.wanted.clear()
        self._partial.clear()
        self._held_blobs.clear()
        self.journal = Journal()

    def hold(self, have: BlobQuery, before: bytes | None = None) -> bytes:
        """Return a byte for each queried blob: 1 if it is present, else 0. Present blobs are kept until the next query.

        `before`: in a replay, the result of the original call. Blobs with a 0 in it count as absent.

        Raises:
            ProtocolError: the query has unequal numbers of digests and sizes.
        """
        if len(have.sizes) != len(have.digests):
            raise ProtocolError(f"a blob query has {len(have.digests)} digests but {len(have.sizes)} sizes")
        earlier, self._held_blobs = self._held_blobs, {}
        for digest, size, flag in zip(have.digests, have.sizes, before or repeat(True), strict=False):
            data = earlier.get(digest)
            if data is None or data.nbytes != size:
                data = self._find(digest, size) if flag else None
            if data is not None and flag:
                self._held_blobs[digest] = data
        return bytes([digest in self._held_blobs for digest in have.digests])

    def _find(self, digest: bytes, size: int) -> torch.Tensor | None:
        """Return the bytes with this digest, or None.

        If the session has a journal, link the stored file into it, because the store may evict the file.
        """
        contents = self._journal_blobs()
        journal_file = contents.find(digest, size) if contents is not None else None
        if journal_file is not None:
            return mapped_bytes(journal_file, size)
        data = self._store.find(digest, size) if self._store is not None else None
        if data is not None and contents is not None and self._store is not None:
            contents.link(digest, self._store.file_of(digest))
        return data

    def _journal_blobs(self) -> BlobFiles | None:
        """Return the blob files of the session's journal, or None without a journal."""
        return self.journal.contents if self.journal.open or self.journal.replaying else None

    def _find_offered(self, offer: BlobOffer) -> torch.Tensor | None:
        data = self._held_blobs.pop(offer.digest, None)
        return data if data is not None and data.nbytes == offer.size else self._find(offer.digest, offer.size)

    def wait(self) -> Wait:
        """Return the `Wait` for all offered uploads."""
        digests = self.wanted
        return Wait([(Cause.UPLOAD, handle) for handle in digests], has_arrived=lambda key: key[1] not in digests)

    def take_or_refuse(self, upload: UploadPart, body: Sequence[Buffer]) -> None:
        """Add a part to its upload. If the part is invalid, make the value poison."""
        try:
            self.take(upload, body)
        except ProtocolError as error:
            _log.warning("an upload is refused", reason=str(error))
            self.refuse(upload.handle, str(error))

    def accept_offer(self, offer: BlobOffer, look_up: bool = True) -> bool:
        """Create the value of an offered blob that is present, and return True. Otherwise expect its upload.

        `look_up`: False to treat the blob as missing, without a lookup.

        Raises:
            ProtocolError: dtype, shape or size are invalid, or the handle is in use.
        """
        header = UploadPart(offer.handle, offer.dtype, offer.shape, offer.stride, offer.size)
        self.check_new(header)
        data = self._find_offered(offer) if look_up else None
        if data is None:
            self.wanted[offer.handle] = offer.digest
            self.journal.expect(offer.handle, offer.digest, offer.size, is_replay=not look_up)
            return False
        self.finish(header, data)
        value = self._values[offer.handle]
        if (
            self.names is not None
            and isinstance(value, torch.Tensor)
            and value.untyped_storage().nbytes() == offer.size
        ):
            self.names.set_name(value, offer.digest)  # the store has checked the digest
        return True

    def take(self, upload: UploadPart, body: Sequence[Buffer]) -> None:
        """Add a part to its upload, and create the value if the upload is complete.

        Raises:
            ProtocolError: the part does not fit earlier parts, or its layout does not fit its size.
        """
        if len(body) != 1:
            raise ProtocolError(f"a part of upload {upload.handle} has {len(body)} buffers instead of 1")
        part = body[0]
        if upload.compression:
            part = expanded(part, upload.compression, dtype_from_name(upload.dtype).itemsize, upload.length)
        size = memoryview(part).nbytes
        if upload.start == 0:
            self._begin(upload, part, size)
            return
        partial = self._partial.get(upload.handle)
        follows = partial is not None and partial.received == upload.start and partial.header.size == upload.size
        if partial is None or not follows or upload.start + size > upload.size:
            raise ProtocolError(
                f"part of upload {upload.handle} at byte {upload.start} does not continue the earlier parts"
            )
        self._continue(partial, upload, part, size)

    def withdraw(self, handle: int) -> None:
        """Drop an incomplete upload that the client aborted. Its value becomes poison."""
        self._partial.pop(handle, None)
        self.wanted.pop(handle, None)
        if handle not in self._values:
            self._values[handle] = Poison(Failure(0, -1, "upload", "ProgramStopped", WITHDRAWN))

    def _continue(self, partial: _Partial, upload: UploadPart, part: Buffer, size: int) -> None:
        partial.received += size
        if partial.data is not None and size:
            try:
                self._runtime.write(partial.data, upload.start, torch.frombuffer(part, dtype=torch.uint8))
            except RuntimeError as error:  # the device has failed, so the remaining parts are dropped
                partial.data = None
                self.refuse_bytes(partial.header, error)
        if partial.received == upload.size:
            del self._partial[upload.handle]
            if partial.data is not None:
                self.finish(partial.header, partial.data)
            else:
                self.wanted.pop(upload.handle, None)  # otherwise submissions would wait for the upload

    def _begin(self, upload: UploadPart, part: Buffer, size: int) -> None:
        self.check_new(upload)
        if size == upload.size:
            data = torch.frombuffer(part, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            self.finish(upload, data)
        elif 0 < size < upload.size:
            self._partial[upload.handle] = _Partial(upload, self._allocate(upload), 0)
            self._continue(self._partial[upload.handle], upload, part, size)
        else:
            raise ProtocolError(f"upload {upload.handle} announced {upload.size} bytes, but its first part has {size}")

    def check_new(self, upload: UploadPart) -> None:
        """Check that the header of an upload is valid and its handle is unused. Otherwise raise ProtocolError."""
        _check_layout(upload)
        if upload.handle in self._values or upload.handle in self._partial or upload.handle in self.reading:
            raise ProtocolError(f"value {upload.handle} is uploaded twice")

    def check_limit(self, size: int) -> None:
        """Raise torch.OutOfMemoryError if pending uploads and reads plus `size` bytes exceed the memory limit."""
        ledger = ledger_of(self._runtime)
        parts = sum(partial.header.size for partial in self._partial.values() if partial.data is not None)
        pending_bytes = parts + self.reading_bytes
        if ledger is not None and pending_bytes + size > ledger.limit:
            raise torch.OutOfMemoryError(
                f"{size:,} bytes cannot be received: {pending_bytes:,} bytes of other uploads are pending, and the memory limit is {ledger.limit:,} bytes. Send less at a time"
            )

    def _allocate(self, upload: UploadPart) -> torch.Tensor | None:
        try:
            self.check_limit(upload.size)
            if self._journal_blobs() is None and self._store is not None and upload.handle in self.wanted:
                return torch.empty(upload.size, dtype=torch.uint8)  # the store needs the bytes in host memory
            return self._runtime.allocate(upload.size)
        except (RuntimeError, MemoryError) as error:
            self.refuse_bytes(upload, error)
            return None

    def finish(self, upload: UploadPart, data: torch.Tensor) -> None:
        """Create the value of an upload from its bytes, and store offered bytes in the weight store.

        `data`: host memory, or memory of `DeviceRuntime.allocate`.
        """
        digest = self.wanted.pop(upload.handle, None)
        if digest is not None and self._store is not None:
            self._store_blob(self._store, upload.handle, digest, data)
        try:
            with torch.inference_mode():
                device_bytes = self._runtime.commit(data)
                typed = device_bytes.view(dtype_from_name(upload.dtype))
                self._values[upload.handle] = typed.as_strided(upload.shape, upload.stride)
        except (RuntimeError, MemoryError) as error:
            self.refuse_bytes(upload, error)

    def _store_blob(self, store: WeightStore, handle: int, digest: bytes, data: torch.Tensor) -> None:
        contents = self._journal_blobs()
        file = contents.finish(handle) if contents is not None else None
        if contents is None or file is None or not store.adopt(digest, file, contents.mark_verified):
            if data.device.type != "cpu":  # the copy to the device may still run
                data = self._runtime.commit(data)
            store.put(digest, self._runtime.deliver(data))
        else:
            self.journal.shared(data.nbytes)

    def refuse(self, handle: int, reason: str) -> None:
        """Make the value of an invalid upload poison, if the handle is unused.

        Raises:
            ProtocolError: the handle is in use, because the value was sent twice.
        """
        if handle in self._values and not isinstance(self._values[handle], Poison):
            raise ProtocolError(reason)
        self._partial.pop(handle, None)
        self.wanted.pop(handle, None)
        self.poison(handle, "ProtocolError", reason)

    def poison(self, handle: int, kind: str, reason: str) -> None:
        """Make a value poison, with an error of `kind` and `reason`."""
        self._values[handle] = Poison(Failure(0, -1, "upload", kind, reason[: limits.FAILURE_TEXT]))

    def refuse_bytes(self, upload: UploadPart, error: Exception) -> None:
        """Make a value poison with this error, so that ops that use it fail and the session continues."""
        text = str(error).partition("\n")[0]
        if is_out_of_memory(error):
            self.poison(
                upload.handle, "OutOfMemoryError", f"out of memory for an upload of {upload.size:,} bytes: {text}"
            )
        else:
            reason = f"cannot copy an upload of {upload.size:,} bytes to the device: {text}"
            self.poison(upload.handle, type(error).__name__, reason)


def place_part(runtime: DeviceRuntime, head: bytes, nbytes: int) -> memoryview | None:
    """Return memory of `DeviceRuntime.receive_buffer` for the body of a message, if `head` is that of an `UploadPart`.

    Return None for other messages, or if the device needs no such memory. `nbytes`: size of the body.
    """
    if not is_of_kind(head, UploadPart):
        return None
    try:
        return runtime.receive_buffer(nbytes)
    except RuntimeError as error:  # the next call of the device reports a lost device
        _log.debug("an upload is received into pageable memory", reason=str(error))
        return None


def _check_layout(upload: UploadPart) -> None:
    """Raise ProtocolError if the shape and strides of an upload do not fit its announced size."""
    counts = (*upload.shape, *upload.stride, upload.size)
    if len(upload.shape) != len(upload.stride) or not is_countable(counts):
        raise ProtocolError(f"upload {upload.handle} has an invalid shape, stride or size")
    item = dtype_from_name(upload.dtype).itemsize
    needed_bytes = extent(upload.shape, upload.stride) * item
    if needed_bytes > upload.size or upload.size % item:
        raise ProtocolError(f"upload {upload.handle} needs {needed_bytes} bytes but announced {upload.size}")


def is_countable(counts: Sequence[int]) -> bool:
    """Return True if PyTorch accepts these numbers as sizes."""
    return all(0 <= n < _SIZE_LIMIT for n in counts)
