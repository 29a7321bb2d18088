"""Uploads of the client: large tensors are offered by digest, and sent if the executor lacks their bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from djinn_client.interception.tap import Cause
from djinn_client.runtime.executor_link import ExecutorLink
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.receiving.replies import Replies
from djinn_client.runtime.stats import Stats
from djinn_client.torch_dispatch import writes_to
from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire import limits
from djinn_core.wire.compression import PLANES_ZSTD, compressed, expanded, supported_compressions
from djinn_core.wire.digests import digest_of_content
from djinn_core.wire.messages import TensorHeader, encode
from djinn_core.wire.tensors import dtype_from_name, dtype_name, tensor_to_wire
from djinn_core.wire.upload_messages import (
    AbortUpload,
    BlobHit,
    BlobNeeded,
    BlobOffer,
    BlobQuery,
    BlobQueryReply,
    UploadPart,
)
from djinn_core.wire.weight_messages import ReadWeights

CHUNK: Final = 4 << 20  # bytes of an upload per frame; a lost frame is sent again
OFFER_BYTES: Final = 64 << 10  # smaller tensors are sent without an offer
COPY_BYTES: Final = 32 << 20  # larger tensors are not copied: their upload waits for the reply to the offer
HELD_BYTES: Final = 256 << 20  # limit of all copies that wait for replies


class _Upload(msgspec.Struct):
    """A tensor that is being uploaded: its bytes, and the number of bytes sent."""

    header: TensorHeader
    data: memoryview
    copied: bool = False  # True if `data` is not the caller's memory
    promised: bool = False  # True if the executor reported that it has these bytes
    sent: int = 0


_Content = tuple[int, int, int]


def _content(tensor: torch.Tensor) -> _Content:
    """Return a key of a live tensor's bytes: address, size, and version count."""
    return tensor.data_ptr(), tensor.nbytes, writes_to(tensor)


class _ExpectedUpload(msgspec.Struct, frozen=True):
    """A tensor that will be uploaded next. The object keeps it alive, so that no other tensor gets its memory."""

    tensor: torch.Tensor
    digest: bytes


class Uploader:
    """Send tensors to the executor, and hold unanswered offers.

    Attributes:
        open: as in `UploadOffers`.
        unsent: as in `UploadOffers`.
        asked: as in `UploadOffers`.
    """

    def __init__(
        self,
        link: ExecutorLink,
        replies: Replies,
        stats: Stats,
        observers: Observers,
        offers: bool,
        compressor: UploadCompressor,
    ) -> None:
        """Begin without uploads.

        `offers`: True if the executor keeps weights, so that large tensors are offered first.
        """
        self._link = link
        self._replies = replies
        self._stats = stats
        self._observers = observers
        self._offers = offers
        self._compressor = compressor
        waiting = replies.offers
        self.open: dict[int, _Upload] = waiting.open
        self.unsent, self.asked = waiting.unsent, waiting.asked
        waiting.send_wanted = self.send_wanted
        self._held = 0
        self._promised: set[bytes] = set()
        self._expected: dict[_Content, _ExpectedUpload] = {}
        self._sending = False
        for kind in (BlobNeeded, BlobHit, BlobQueryReply):
            replies.handle(kind, self._answered)

    def upload(self, handle: int, source: torch.Tensor) -> None:
        """Send a CPU tensor as the value `handle`. The caller may change the tensor's memory when this returns."""
        try:
            self._replies.make_room(source.nbytes)
        except KeyboardInterrupt:
            self._link.send_message(AbortUpload(handle))
            raise
        try:
            self._upload(handle, source)
        finally:
            self._link.channel.copy_borrowed()

    def _upload(self, handle: int, source: torch.Tensor) -> None:
        while handle in self.open:  # an earlier value of this handle, whose bytes the executor may still request
            self._replies.take_next()
        header, data = tensor_to_wire(source)
        if self._offers and data.nbytes >= OFFER_BYTES:
            digest = self._expected.pop(_content(source), None)
            self._offer(handle, header, data, digest.digest if digest is not None else b"")
        else:
            self._send_or_withdraw(handle, _Upload(header, data))

    def read(self, handle: int, stored: StoredTensor) -> None:
        """Ask the executor to read the value `handle` itself."""
        message = ReadWeights(
            handle,
            stored.address,
            stored.version,
            stored.name,
            dtype_name(stored.dtype),
            stored.shape,
            stored.start,
            stored.nbytes,
        )
        try:
            self._replies.send(message)
        except KeyboardInterrupt:
            self._link.send_message(AbortUpload(handle))
            raise
        self._stats.bytes_read += stored.nbytes

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Ask in one message which of these large tensors the executor has. They will be uploaded next.

        They replace the tensors of an earlier call.
        """
        self._expected.clear()
        large = [t for t in tensors if t.nbytes > COPY_BYTES][: limits.BLOBS_ASKED] if self._offers else []
        if len(large) < 2:
            return
        digests = [digest_of_content(tensor_to_wire(tensor)[1]) for tensor in large]
        self._expected = {
            _content(t): _ExpectedUpload(t.detach(), digest) for t, digest in zip(large, digests, strict=True)
        }
        self.asked.append(digests)
        self._link.send(Frame(encode(BlobQuery(tuple([tensor.nbytes for tensor in large]), tuple(digests)))))
        self._stats.round_trips += 1
        begun = time.perf_counter()
        while self.asked:
            self._replies.take_next()
        self._replies.notify_waited(begun, cause=Cause.UPLOAD)

    def _answered(self, reply: BlobNeeded | BlobHit | BlobQueryReply, _: Sequence[Buffer]) -> None:
        """Record the executor's reply to an offer or a query. The next `send_wanted` sends the bytes that it needs.

        Raises:
            ProtocolError: there is no such offer, or the executor requests bytes that it said it had.
        """
        if isinstance(reply, BlobQueryReply):
            digests = self.asked.popleft() if self.asked else []
            if len(digests) != len(reply.found):
                raise ProtocolError(
                    f"the executor answered for {len(reply.found)} tensors; it was asked about {len(digests)}"
                )
            self._promised = {digest for digest, is_present in zip(digests, reply.found, strict=True) if is_present}
            return
        upload = self.open.get(reply.handle)
        if upload is None:
            raise ProtocolError(f"the executor answered an offer of {reply.handle}, which the client did not make")
        if isinstance(reply, BlobNeeded):
            if upload.promised:
                raise ProtocolError("the executor requested bytes that it said it had")
            self.unsent.append(reply.handle)
        else:
            size = self._close(reply.handle)
            self._stats.bytes_recalled += size
            self._observers.emit("uploaded", bytes=size, recalled=True)

    def send_wanted(self) -> None:
        """Send the bytes that the executor needs, including bytes that it requests meanwhile.

        A nested call does nothing. After an interrupt, the next call sends the rest.
        """
        if self._sending:
            return
        self._sending = True
        try:
            while self.unsent:
                handle = self.unsent[0]
                self._send(handle, self.open[handle])
                self.unsent.popleft()
                self._close(handle)
        finally:
            self._sending = False

    def _offer(self, handle: int, header: TensorHeader, data: memoryview, digest: bytes) -> None:
        """Offer `data`. Keep a copy unless the executor has the data.

        If the data are large, wait for the reply instead.

        `digest`: digest of the data. Empty: compute it from the copy, which no other thread can write.
        """
        promised = digest in self._promised
        self._promised.discard(digest)  # once
        large = not promised and data.nbytes > COPY_BYTES
        must_copy = not promised and not large
        upload = _Upload(header, memoryview(bytes(data)) if must_copy else data, must_copy, promised)
        digest = digest or digest_of_content(upload.data)
        self.open[handle] = upload
        self._held += data.nbytes if must_copy else 0
        try:
            self._link.send(
                Frame(encode(BlobOffer(handle, header.dtype, header.shape, header.stride, data.nbytes, digest)))
            )
        except BaseException:
            self._close(handle)
            raise
        self._await(handle, upload, large)

    def _await(self, handle: int, offered: _Upload, large: bool) -> None:
        """Wait until the caller's memory is no longer needed, and copies have at most `HELD_BYTES`."""
        try:
            self._replies.take_what_came()
            waits, begun = large and handle in self.open, time.perf_counter()
            self._stats.round_trips += waits
            while (large and handle in self.open) or self._held > HELD_BYTES:
                self._replies.take_next()
            if waits:
                self._replies.notify_waited(begun, cause=Cause.UPLOAD)
        except BaseException:  # the caller's memory is free again; the executor still waits for the bytes
            if large and handle in self.open:
                offered.data = memoryview(bytes(offered.data))
            raise

    def _close(self, handle: int) -> int:
        """Remove an answered offer without unsent bytes. Return the number of its bytes."""
        upload = self.open.pop(handle, None)
        size = upload.data.nbytes if upload is not None else 0
        self._held -= size if upload is not None and upload.copied else 0
        return size

    def _send_or_withdraw(self, handle: int, upload: _Upload) -> None:
        """Send an upload. After an interrupt, abort the upload on the executor."""
        try:
            self._send(handle, upload)
        except KeyboardInterrupt:
            self._link.send_message(AbortUpload(handle))
            raise

    def _send(self, handle: int, upload: _Upload) -> None:
        size = upload.data.nbytes
        while True:
            interrupt_mask.check()
            self._replies.take_what_came()
            part = upload.data[upload.sent : upload.sent + CHUNK]
            started = time.perf_counter()
            self._send_part(handle, upload, part)
            upload.sent += part.nbytes
            self._stats.bytes_uploaded += part.nbytes
            seconds = time.perf_counter() - started
            self._observers.emit("uploaded", bytes=part.nbytes, recalled=False, duration=seconds)
            if upload.sent >= size:
                return

    def _send_part(self, handle: int, upload: _Upload, part: memoryview) -> None:
        header, size = upload.header, upload.data.nbytes
        coded = self._compressor.compress(part, dtype_from_name(header.dtype).itemsize)
        coding = (PLANES_ZSTD, part.nbytes) if coded is not None else ("", 0)
        message = UploadPart(handle, header.dtype, header.shape, header.stride, size, upload.sent, *coding)
        body = part if coded is None else coded
        started = time.perf_counter()
        self._link.send(Frame(encode(message), [body]))
        self._compressor.note_sent(part.nbytes, time.perf_counter() - started, compressed=coded is not None)


SMALLEST: Final = 1 << 20  # bytes of the smallest part that is compressed
SAMPLE: Final = 256 << 10  # bytes of a part that are compressed as a sample
# Bytes to send before the link rate is measured, because the first bytes only fill buffers.
SEEN: Final = 16 << 20
# Bytes per second, slower than executors decompress. On faster links, such as within a machine, nothing is compressed.
FASTEST: Final = 2e8
_GAIN: Final = 0.9  # maximum ratio of the time with compression to the time without
_RENEWED: Final = 256 << 20  # compressed bytes after which some bytes are sent uncompressed, to measure the link again


class UploadCompressor:
    """Compress the uploads of a connection if that saves time."""

    def __init__(self, theirs: Sequence[str]) -> None:
        """Begin without measurements. `theirs`: the compressions that the executor supports."""
        self._possible = PLANES_ZSTD in theirs and PLANES_ZSTD in supported_compressions()
        self._sent = 0
        self._seconds = 0.0
        self._compressed = 0  # bytes since the last measurement

    def note_sent(self, nbytes: int, seconds: float, *, compressed: bool) -> None:
        """Record that sending `nbytes` took `seconds`. Recent rates have more weight.

        Compressed bytes do not measure the link, because the executor may decompress them more slowly than they arrive.
        """
        if compressed:
            self._compressed += nbytes
            return
        self._compressed = 0
        if self._sent > 4 * SEEN:
            self._sent, self._seconds = self._sent // 2, self._seconds / 2
        self._sent += nbytes
        self._seconds += seconds

    def compress(self, data: memoryview, item: int) -> bytes | None:
        """Return `data` (elements of `item` bytes) compressed. Return None if sending it uncompressed is faster."""
        if not self._possible or len(data) < SMALLEST or not self._pays(data, item):
            return None
        coded = compressed(data, item)
        return coded if len(coded) < len(data) else None

    def _pays(self, data: memoryview, item: int) -> bool:
        """Return True if compression saves time, including decompression. The estimate uses a sample of the data."""
        if self._sent < SEEN or self._sent > FASTEST * self._seconds or self._compressed > _RENEWED:
            return False
        link = self._seconds / self._sent  # seconds a byte
        middle = len(data) // 2 // item * item
        sample = data[middle : middle + SAMPLE // item * item]
        started = time.thread_time()
        coded = compressed(sample, item)
        expanded(coded, PLANES_ZSTD, item, len(sample))  # takes about as long as on the executor
        coding = (time.thread_time() - started) / len(sample)
        return coding + len(coded) / len(sample) * link < _GAIN * link
