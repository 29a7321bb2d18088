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
    """A tensor that is being uploaded.

    Attributes:
        header: dtype, shape and strides.
        data: the tensor's bytes.
        is_copy: True if `data` is not the caller's memory.
        is_promised: True if the executor reported that it has these bytes.
        sent_bytes: number of bytes that were sent.
    """

    header: TensorHeader
    data: memoryview
    is_copy: bool = False
    is_promised: bool = False
    sent_bytes: int = 0


_Content = tuple[int, int, int]


def _content(tensor: torch.Tensor) -> _Content:
    """Return a key of a live tensor's bytes: address, size, and version count."""
    return tensor.data_ptr(), tensor.nbytes, writes_to(tensor)


class _ExpectedUpload(msgspec.Struct, frozen=True):
    """A tensor that will be uploaded soon.

    Attributes:
        tensor: the tensor. This reference keeps its memory, so that no other tensor gets the same address.
        digest: digest of the tensor's bytes.
    """

    tensor: torch.Tensor
    digest: bytes


class Uploader:
    """Send tensors to the executor. Offer large tensors by digest first.

    Attributes:
        open: as `UploadOffers.open`.
        unsent: as `UploadOffers.unsent`.
        queries: as `UploadOffers.unanswered_queries`.
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
        upload_offers = replies.offers
        self.open: dict[int, _Upload] = upload_offers.open
        self.unsent, self.queries = upload_offers.unsent, upload_offers.unanswered_queries
        upload_offers.send_wanted = self.send_wanted
        self._copied_bytes = 0
        self._promised_digests: set[bytes] = set()
        self._expected_uploads: dict[_Content, _ExpectedUpload] = {}
        self._is_sending = False
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
            self._replies.await_offer_reply()
        header, data = tensor_to_wire(source)
        if self._offers and data.nbytes >= OFFER_BYTES:
            expected = self._expected_uploads.pop(_content(source), None)
            self._offer(handle, header, data, expected.digest if expected is not None else b"")
        else:
            self._send_or_withdraw(handle, _Upload(header, data))

    def read(self, handle: int, stored: StoredTensor) -> None:
        """Ask the executor to read the stored tensor `stored` as the value `handle`."""
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
        """Ask in one message which of these tensors, which will be uploaded next, the executor has.

        Small tensors are ignored, and so is a single large tensor. A call forgets the tensors of earlier calls.
        """
        self._expected_uploads.clear()
        large = [t for t in tensors if t.nbytes > COPY_BYTES][: limits.BLOBS_ASKED] if self._offers else []
        if len(large) < 2:
            return
        digests = [digest_of_content(tensor_to_wire(tensor)[1]) for tensor in large]
        self._expected_uploads = {
            _content(t): _ExpectedUpload(t.detach(), digest) for t, digest in zip(large, digests, strict=True)
        }
        self.queries.append(digests)
        self._link.send(Frame(encode(BlobQuery(tuple([tensor.nbytes for tensor in large]), tuple(digests)))))
        self._stats.round_trips += 1
        begun = time.perf_counter()
        while self.queries:
            self._replies.await_offer_reply()
        self._replies.notify_waited(begun, cause=Cause.UPLOAD)

    def _answered(self, reply: BlobNeeded | BlobHit | BlobQueryReply, _: Sequence[Buffer]) -> None:
        """Record the executor's reply to an offer or a query. The next `send_wanted` sends the bytes that it needs.

        Raises:
            ProtocolError: the client made no such offer, or the executor requests bytes that it had reported to have.
        """
        if isinstance(reply, BlobQueryReply):
            digests = self.queries.popleft() if self.queries else []
            if len(digests) != len(reply.found):
                raise ProtocolError(
                    f"the executor answered for {len(reply.found)} tensors, but the client asked about {len(digests)}"
                )
            self._promised_digests = {
                digest for digest, is_present in zip(digests, reply.found, strict=True) if is_present
            }
            return
        upload = self.open.get(reply.handle)
        if upload is None:
            raise ProtocolError(
                f"the executor answered an offer of the value {reply.handle}, but the client made no such offer"
            )
        if isinstance(reply, BlobNeeded):
            if upload.is_promised:
                raise ProtocolError("the executor requested bytes that it had reported to have")
            self.unsent.append(reply.handle)
        else:
            size = self._close(reply.handle)
            self._stats.bytes_recalled += size
            self._observers.emit("uploaded", bytes=size, recalled=True)

    def send_wanted(self) -> None:
        """Send the bytes that the executor needs, including bytes that it requests meanwhile.

        A nested call does nothing. After an interrupt, the next call sends the remaining bytes.
        """
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self.unsent:
                handle = self.unsent[0]
                self._send(handle, self.open[handle])
                self.unsent.popleft()
                self._close(handle)
        finally:
            self._is_sending = False

    def _offer(self, handle: int, header: TensorHeader, data: memoryview, digest: bytes) -> None:
        """Offer a tensor to the executor. Store a copy of `data` if the executor may request the bytes later.

        If the data exceed `COPY_BYTES`, wait for the reply instead of copying them.

        `digest`: digest of the data. If empty, it is computed from the copy, which no other thread can write.
        """
        is_promised = digest in self._promised_digests
        self._promised_digests.discard(digest)  # once
        large = not is_promised and data.nbytes > COPY_BYTES
        must_copy = not is_promised and not large
        upload = _Upload(header, memoryview(bytes(data)) if must_copy else data, must_copy, is_promised)
        digest = digest or digest_of_content(upload.data)
        self.open[handle] = upload
        self._copied_bytes += data.nbytes if must_copy else 0
        try:
            self._link.send(
                Frame(encode(BlobOffer(handle, header.dtype, header.shape, header.stride, data.nbytes, digest)))
            )
        except BaseException:
            self._close(handle)
            raise
        self._await(handle, upload, large)

    def _await(self, handle: int, upload: _Upload, large: bool) -> None:
        """Wait until a `large` upload does not need the caller's memory, and all copies have at most `HELD_BYTES`."""
        try:
            self._replies.read_arrived()
            waits, begun = large and handle in self.open, time.perf_counter()
            self._stats.round_trips += waits
            while (large and handle in self.open) or self._copied_bytes > HELD_BYTES:
                self._replies.await_offer_reply()
            if waits:
                self._replies.notify_waited(begun, cause=Cause.UPLOAD)
        except BaseException:  # the caller's memory is free again; the executor still waits for the bytes
            if large and handle in self.open:
                upload.data = memoryview(bytes(upload.data))
            raise

    def _close(self, handle: int) -> int:
        """Remove an offer that is answered and sent. Return its size in bytes."""
        upload = self.open.pop(handle, None)
        size = upload.data.nbytes if upload is not None else 0
        self._copied_bytes -= size if upload is not None and upload.is_copy else 0
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
            self._replies.read_arrived()
            part = upload.data[upload.sent_bytes : upload.sent_bytes + CHUNK]
            begun = time.perf_counter()
            self._send_part(handle, upload, part)
            upload.sent_bytes += part.nbytes
            self._stats.bytes_uploaded += part.nbytes
            seconds = time.perf_counter() - begun
            self._observers.emit("uploaded", bytes=part.nbytes, recalled=False, duration=seconds)
            if upload.sent_bytes >= size:
                return

    def _send_part(self, handle: int, upload: _Upload, part: memoryview) -> None:
        header, size = upload.header, upload.data.nbytes
        compressed_part = self._compressor.compress(part, dtype_from_name(header.dtype).itemsize)
        coding = (PLANES_ZSTD, part.nbytes) if compressed_part is not None else ("", 0)
        message = UploadPart(handle, header.dtype, header.shape, header.stride, size, upload.sent_bytes, *coding)
        body = part if compressed_part is None else compressed_part
        begun = time.perf_counter()
        self._link.send(Frame(encode(message), [body]))
        seconds = time.perf_counter() - begun
        self._compressor.note_sent(part.nbytes, seconds, compressed=compressed_part is not None)


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

    def __init__(self, compressions: Sequence[str]) -> None:
        """Begin without measurements. `compressions`: those that the executor supports."""
        self._is_possible = PLANES_ZSTD in compressions and PLANES_ZSTD in supported_compressions()
        self._measured_bytes = 0
        self._measured_seconds = 0.0
        self._compressed_bytes = 0  # since the last measurement

    def note_sent(self, nbytes: int, seconds: float, *, compressed: bool) -> None:
        """Record that sending `nbytes` took `seconds`. Recent rates have more weight.

        Compressed bytes do not measure the link, because the executor may decompress them more slowly than they arrive.
        """
        if compressed:
            self._compressed_bytes += nbytes
            return
        self._compressed_bytes = 0
        if self._measured_bytes > 4 * SEEN:
            self._measured_bytes, self._measured_seconds = self._measured_bytes // 2, self._measured_seconds / 2
        self._measured_bytes += nbytes
        self._measured_seconds += seconds

    def compress(self, data: memoryview, item: int) -> bytes | None:
        """Return `data` (elements of `item` bytes) compressed, or None if sending the data uncompressed is faster."""
        if not self._is_possible or len(data) < SMALLEST or not self._pays(data, item):
            return None
        compressed_data = compressed(data, item)
        return compressed_data if len(compressed_data) < len(data) else None

    def _pays(self, data: memoryview, item: int) -> bool:
        """Return True if compression saves time, including decompression. The estimate uses a sample of the data."""
        measured_bytes, measured_seconds = self._measured_bytes, self._measured_seconds
        if measured_bytes < SEEN or measured_bytes > FASTEST * measured_seconds or self._compressed_bytes > _RENEWED:
            return False
        link_seconds = measured_seconds / measured_bytes  # per byte
        middle = len(data) // 2 // item * item
        sample = data[middle : middle + SAMPLE // item * item]
        begun = time.thread_time()
        compressed_sample = compressed(sample, item)
        expanded(compressed_sample, PLANES_ZSTD, item, len(sample))  # takes about as long as on the executor
        coding_seconds = (time.thread_time() - begun) / len(sample)  # per byte
        ratio = len(compressed_sample) / len(sample)
        return coding_seconds + ratio * link_seconds < _GAIN * link_seconds
