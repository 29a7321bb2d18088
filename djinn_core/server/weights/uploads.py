"""Uploads of tensor bytes in one or more parts, which become values of a session."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import attrs
import torch

from djinn_core.errors import ProtocolError, WeightsUnavailable
from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.hookspecs.transports import Buffer
from djinn_core.ir.values import contiguous_strides, storage_of
from djinn_core.server.memory.limited import ledger_of
from djinn_core.server.recovery.journal import Journal
from djinn_core.server.recovery.snapshot_format import StoredValue
from djinn_core.server.running.values import Poison, ValueTable, memory_of
from djinn_core.server.weights.shared_weights import Origin, SessionShares, WeightKey
from djinn_core.server.weights.store import WeightStore, mapped_bytes
from djinn_core.server.weights.weight_reader import WeightReader
from djinn_core.wire import limits
from djinn_core.wire.compression import expanded
from djinn_core.wire.message_base import Failure
from djinn_core.wire.tensors import dtype_from_name
from djinn_core.wire.upload_messages import BlobOffer, BlobQuery, BlobQueryReply, UploadPart
from djinn_core.wire.weight_messages import ReadWeights

WITHDRAWN = "its upload was interrupted: make it again"
READ_AHEAD: Final = 1 << 30  # bytes that are read before the device takes them
_NUMBERS = 1 << 63  # what PyTorch counts with ends there


@attrs.define
class _Partial:
    header: UploadPart
    data: torch.Tensor | None  # None: there was no memory for it, and what still comes is dropped
    received: int


@attrs.frozen
class _Read:
    """A value that is being read by the executor itself."""

    header: UploadPart
    origin: Origin
    data: Future[torch.Tensor]


class UploadAssembly:
    """Collects the parts of each upload; a complete one becomes a value.

    Attributes:
        wanted: digests of offered blobs that are not here, by handle.
        journal: the session's journal, if it has one.
        shares: what was read and other sessions may have as well.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        values: ValueTable,
        store: WeightStore | None,
        reader: WeightReader = WeightReader(),  # noqa: B008 - without sources it opens nothing
    ) -> None:
        """`store`: where weights are kept, if they are. `reader`: reads those that the client only names."""
        self._reader = reader
        self.shares = SessionShares(values)
        self.reads: deque[_Read] = deque()
        self._reading: set[int] = set()  # their handles
        self._read_bytes = 0
        self._runtime = runtime
        self._values = values
        self._store = store
        self.wanted: dict[int, bytes] = {}
        self.journal: Journal | None = None
        self._partial: dict[int, _Partial] = {}
        self._held: dict[bytes, torch.Tensor] = {}

    @property
    def busy(self) -> bool:
        """True if an upload is incomplete, a value is being read, or a blob is held for a later offer by the client."""
        return bool(self.wanted or self._partial or self._held or self.reads)

    def clear(self) -> None:
        """Forget what is under way."""
        self.wanted.clear()
        self._partial.clear()
        self._held.clear()
        self.reads.clear()
        self._reading.clear()
        self.shares.clear()
        self.journal = None

    def hold(self, have: BlobQuery) -> BlobQueryReply:
        """Say which bytes are here, and hold on to them, so that they are still here when they are offered."""
        if len(have.sizes) != len(have.digests):
            raise ProtocolError(f"{len(have.digests)} digests come with {len(have.sizes)} sizes")
        return BlobQueryReply(tuple([self._hold(d, n) for d, n in zip(have.digests, have.sizes, strict=True)]))

    def _hold(self, digest: bytes, size: int) -> bool:
        if len(self._held) >= limits.BLOBS_ASKED:
            return False
        data = self._find(digest, size)
        if data is not None:
            self._held[digest] = data
        return data is not None

    def _find(self, digest: bytes, size: int) -> torch.Tensor | None:
        """These bytes; if the session is journaled, it holds on to them, whatever the store does."""
        contents = self.journal.contents if self.journal is not None and self.journal.open else None
        kept = contents.find(digest, size) if contents is not None else None
        if kept is not None:
            return mapped_bytes(kept, size)
        found = self._store.find(digest, size) if self._store is not None else None
        if found is not None and contents is not None and self._store is not None:
            contents.link(digest, self._store.file_of(digest))
        return found

    def _find_offered(self, offer: BlobOffer) -> torch.Tensor | None:
        held = self._held.pop(offer.digest, None)
        return held if held is not None and held.nbytes == offer.size else self._find(offer.digest, offer.size)

    def consider(self, offer: BlobOffer, look: bool = True) -> bool:
        """Make a value of what was offered, if its bytes are here; whether they are. Otherwise they are wanted.

        Without a `look` they are.

        Raises:
            ProtocolError: nothing like it can be uploaded.
        """
        header = UploadPart(offer.handle, offer.dtype, offer.shape, offer.stride, offer.size)
        self._check_new(header)
        data = self._find_offered(offer) if look else None
        if data is None:
            self.wanted[offer.handle] = offer.digest
            if self.journal is not None:
                self.journal.expect(offer.handle, offer.digest, offer.size, again=not look)
            return False
        self._finish(header, data)
        return True

    def read(self, request: ReadWeights) -> None:
        """Begin to read a value from an opened address; `finish_reads` makes it.

        Raises:
            ProtocolError: nothing like it can be uploaded.
        """
        strides = contiguous_strides(request.shape) if _countable(request.shape) else ()
        header = UploadPart(request.handle, request.dtype, request.shape, strides, request.size)
        self._check_new(header)
        whole = WeightKey(request.version, request.name, request.start, request.size)
        key = self._reader.untied(request.address, whole)
        self._hold_file(request.address, request.version)
        known = self._reader.shared.find(key) if self._sharing else None
        if known is not None:
            self._share(header, known, Origin(request.address, key))
            return
        try:
            if self._map(header, Origin(request.address, key)):
                return
            while self.reads and self._read_bytes + request.size > READ_AHEAD:
                self._finish_read()
            self._check_room(request.size)
            data = self._reader.read(request.address, key)
        except WeightsUnavailable as error:
            self._poison(request.handle, "WeightsUnavailable", str(error))
        except RuntimeError as error:
            self._refuse(header, error)
        else:
            self.reads.append(_Read(header, Origin(request.address, key), data))
            self._reading.add(request.handle)
            self._read_bytes += request.size

    def _map(self, header: UploadPart, origin: Origin, offset: int = 0) -> bool:
        """Make a value of a file's mapping; False where its bytes must be read."""
        if not self._sharing or self._runtime.device.type != "cpu":
            return False
        mapped = self._reader.map(origin.address, origin.key)
        if mapped is not None:
            self._share(header, self._reader.shared.share(origin.key, mapped.untyped_storage()), origin, offset)
        return mapped is not None

    def finish_reads(self) -> None:
        """Wait for what is being read, and make values of it."""
        while self.reads:
            self._finish_read()

    def _finish_read(self) -> None:
        one = self.reads.popleft()
        self._reading.discard(one.header.handle)
        self._read_bytes -= one.header.size
        try:
            data = one.data.result()
        except WeightsUnavailable as error:
            self._poison(one.header.handle, "WeightsUnavailable", str(error))
        except (RuntimeError, MemoryError) as error:
            self._refuse(one.header, error)
        else:
            self._finish_shared(one, data)

    def _finish_shared(self, one: _Read, data: torch.Tensor) -> None:
        if not self._sharing or not one.header.size:
            self._finish(one.header, data.clone() if one.header.size else data)
            return
        try:
            with torch.inference_mode():
                placed = self._reader.shared.find(one.origin.key) or self._runtime.receive(data).untyped_storage()
        except (RuntimeError, MemoryError) as error:
            self._refuse(one.header, error)
        else:
            self._share(one.header, self._reader.shared.share(one.origin.key, placed), one.origin)

    @property
    def _sharing(self) -> bool:
        """False under a memory limit, which moves the memory of each session's values on its own."""
        return ledger_of(self._runtime) is None

    def _share(self, header: UploadPart, storage: torch.UntypedStorage, origin: Origin, offset: int = 0) -> None:
        with torch.inference_mode():
            value = torch.empty(0, dtype=dtype_from_name(header.dtype), device=self._runtime.device)
            self._values[header.handle] = value.set_(storage, offset, header.shape, header.stride)
        self.shares.add(header.handle, origin)

    def lend(self, address: str, saved: Mapping[str, int]) -> None:
        """Share the memory of values that were just saved at an address with sessions that read them there.

        `saved`: their handles, by the names of the tensors. Left out is what is not all of its memory, and what earlier programs
        may write by another value that the client numbers as other memory.
        """
        if not self._sharing:
            return
        try:
            opened = self._reader.open(address)
        except WeightsUnavailable:  # it was replaced or has expired already
            return
        owners: dict[int, set[int]] = {}
        for handle, value in self._values.items():
            if memory := memory_of(value):
                owners.setdefault(memory, set()).add(storage_of(handle))
        for name, handle in saved.items():
            value = self._values[handle]
            if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.is_conj() or value.is_neg():
                continue
            if not value.numel() or len(owners[memory_of(value)]) > 1:
                continue
            storage, size = value.untyped_storage(), opened.tensors[name].entry.size
            if storage.nbytes() != size:
                continue
            key = WeightKey(opened.version, name, 0, size)
            if self._reader.shared.share(key, storage) is storage:
                self._hold_file(opened.address, opened.version)
                self.shares.add(handle, Origin(opened.address, key))

    def read_again(self, stored: Sequence[StoredValue]) -> None:
        """Make the values of a snapshot that are read from where they came; those that cannot be are poison."""
        for one in stored:
            key = WeightKey(one.version, one.name, one.start, one.size)
            header = UploadPart(one.handle, one.dtype, one.shape, one.stride, one.size)
            self._hold_file(one.address, one.version)
            try:
                storage = self._reader.shared.find(key)
                if storage is None and self._map(header, Origin(one.address, key), one.offset):
                    continue
                if storage is None:
                    with torch.inference_mode():
                        data = self._reader.read(one.address, key).result()
                        storage = self._reader.shared.share(key, self._runtime.receive(data).untyped_storage())
                self._share(header, storage, Origin(one.address, key), one.offset)
            except WeightsUnavailable as error:
                self._poison(one.handle, "WeightsUnavailable", str(error))
            except (RuntimeError, MemoryError) as error:
                self._refuse(header, error)

    def _hold_file(self, address: str, version: bytes) -> None:
        """Have the journal hold on to a file that may be removed before this session is recovered."""
        if self.journal is not None and self.journal.contents is not None and self.journal.open:
            self._reader.hold(address, self.journal.contents.path(version))

    def hold_only(self, versions: set[bytes]) -> None:
        """Have the journal hold on to no other files, once a snapshot has taken its place."""
        if self.journal is not None and self.journal.contents is not None:
            self.journal.contents.held = versions

    def take(self, upload: UploadPart, body: Sequence[Buffer]) -> None:
        """Take one part.

        Raises:
            ProtocolError: it does not fit what came before, or its layout does not fit its size.
        """
        if len(body) != 1:
            raise ProtocolError(f"an upload carries one buffer, not {len(body)}")
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
                f"part of upload {upload.handle} at byte {upload.start} does not follow what came before"
            )
        self._continue(partial, upload, part, size)

    def withdraw(self, handle: int) -> None:
        """Give up an incomplete upload, the rest of which will not arrive."""
        self._partial.pop(handle, None)
        self.wanted.pop(handle, None)
        if handle not in self._values:
            self._values[handle] = Poison(Failure(0, -1, "upload", "ProgramStopped", WITHDRAWN))

    def _continue(self, partial: _Partial, upload: UploadPart, part: Buffer, size: int) -> None:
        partial.received += size
        if partial.data is not None and size:
            partial.data[upload.start : upload.start + size] = torch.frombuffer(part, dtype=torch.uint8)
        if partial.received == upload.size:
            del self._partial[upload.handle]
            if partial.data is not None:
                self._finish(partial.header, partial.data)

    def _begin(self, upload: UploadPart, part: Buffer, size: int) -> None:
        self._check_new(upload)
        if size == upload.size:
            data = torch.frombuffer(part, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            self._finish(upload, data)
        elif 0 < size < upload.size:
            self._partial[upload.handle] = _Partial(upload, self._room_for(upload), 0)
            self._continue(self._partial[upload.handle], upload, part, size)
        else:
            raise ProtocolError(f"upload {upload.handle} announces {upload.size} bytes and brings {size}")

    def _check_new(self, upload: UploadPart) -> None:
        _check_layout(upload)
        if upload.handle in self._values or upload.handle in self._partial or upload.handle in self._reading:
            raise ProtocolError(f"value {upload.handle} is uploaded twice")

    def _check_room(self, size: int) -> None:
        """Raises OutOfMemoryError where what is under way exceeds the executor's memory limit with `size` bytes more."""
        ledger = ledger_of(self._runtime)
        parts = sum(partial.header.size for partial in self._partial.values() if partial.data is not None)
        coming = parts + self._read_bytes
        if ledger is not None and coming + size > ledger.limit:
            raise torch.OutOfMemoryError(f"{coming:,} bytes of others are under way, {ledger.limit:,} are the limit")

    def _room_for(self, upload: UploadPart) -> torch.Tensor | None:
        try:
            self._check_room(upload.size)
            return torch.empty(upload.size, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            self._refuse(upload, error)
            return None

    def _finish(self, upload: UploadPart, data: torch.Tensor) -> None:
        digest = self.wanted.pop(upload.handle, None)
        if digest is not None and self._store is not None:
            self._keep(self._store, upload.handle, digest, data)
        try:
            with torch.inference_mode():
                placed = self._runtime.receive(data)
                typed = placed.view(dtype_from_name(upload.dtype))
                self._values[upload.handle] = typed.as_strided(upload.shape, upload.stride)
        except (RuntimeError, MemoryError) as error:
            self._refuse(upload, error)

    def _keep(self, store: WeightStore, handle: int, digest: bytes, data: torch.Tensor) -> None:
        contents = self.journal.contents if self.journal is not None and self.journal.open else None
        file = contents.whole(handle) if contents is not None else None
        if contents is None or file is None or not store.adopt(digest, file, contents.prove):
            store.keep(digest, data)
        elif self.journal is not None:
            self.journal.shared(data.nbytes)

    def refuse(self, handle: int, reason: str) -> None:
        """The bytes of a value cannot be taken: it is poison, if it is not there yet.

        Raises:
            ProtocolError: it is there, and was sent twice.
        """
        if handle in self._values and not isinstance(self._values[handle], Poison):
            raise ProtocolError(reason)
        self._partial.pop(handle, None)
        self.wanted.pop(handle, None)
        self._poison(handle, "ProtocolError", reason)

    def _poison(self, handle: int, kind: str, reason: str) -> None:
        self._values[handle] = Poison(Failure(0, -1, "upload", kind, reason[: limits.FAILURE_TEXT]))

    def _refuse(self, upload: UploadPart, error: Exception) -> None:
        """Make the value poison: ops that use it report the error, and the session goes on."""
        reason = f"no room for an upload of {upload.size:,} bytes: {str(error).splitlines()[0]}"
        self._poison(upload.handle, "OutOfMemoryError", reason)


def _check_layout(upload: UploadPart) -> None:
    """Raises ProtocolError where shape and strides reach beyond the announced size."""
    counts = (*upload.shape, *upload.stride, upload.size)
    if len(upload.shape) != len(upload.stride) or not _countable(counts):
        raise ProtocolError(f"upload {upload.handle} has an impossible layout")
    item = dtype_from_name(upload.dtype).itemsize
    last = sum((n - 1) * s for n, s in zip(upload.shape, upload.stride, strict=True))
    extent = 0 if 0 in upload.shape else (last + 1) * item
    if extent > upload.size or upload.size % item:
        raise ProtocolError(f"upload {upload.handle} needs {extent} bytes and announces {upload.size}")


def _countable(counts: Sequence[int]) -> bool:
    return all(0 <= n < _NUMBERS for n in counts)
