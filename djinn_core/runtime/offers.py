"""Uploads, on the client's side: large ones are offered by digest and sent where the executor has no such bytes."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, Protocol

import attrs
import torch

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Frame
from djinn_core.runtime.compressing import Compressing
from djinn_core.runtime.observing import Observers
from djinn_core.runtime.stats import Stats
from djinn_core.wire.compression import PLANES_ZSTD
from djinn_core.wire.content import digest_of_content
from djinn_core.wire.messages import Offer, Recalled, TensorHeader, Upload, Want, encode
from djinn_core.wire.tensors import dtype_from_name, tensor_to_wire

CHUNK: Final = 64 << 20  # bytes of an upload that travel in one frame
OFFER_BYTES: Final = 64 << 10  # smaller tensors travel at once
COPY_BYTES: Final = 32 << 20  # a larger tensor is not copied: its upload waits for the answer
HELD_BYTES: Final = 256 << 20  # copies that may wait for answers at a time


class Channel(Protocol):
    """What sending uploads needs of the session that it belongs to."""

    def send(self, frame: Frame) -> None:
        """Send a frame."""

    def take_what_came(self) -> None:
        """Take in the answers that are there."""

    def take_next(self) -> None:
        """Wait for an answer, for a while, and take it in."""


@attrs.define
class _Upload:
    """A tensor on its way: its bytes, and how many of them were sent."""

    header: TensorHeader
    data: memoryview
    sent: int = 0


class Uploads:
    """Sends tensors to the executor, and holds the offers that it has not answered."""

    def __init__(
        self, channel: Channel, stats: Stats, observers: Observers, offers: bool, compressing: Compressing
    ) -> None:
        """`offers`: whether the executor keeps weights, so that large tensors are offered first."""
        self._channel = channel
        self._stats = stats
        self._observers = observers
        self._offers = offers
        self._compressing = compressing
        self._open: dict[int, _Upload] = {}
        self._held = 0
        self._wanted: deque[int] = deque()
        self._sending = False

    @property
    def unanswered(self) -> bool:
        """Whether an offer waits for its answer, or for its bytes to be sent."""
        return bool(self._open)

    def upload(self, handle: int, source: torch.Tensor) -> None:
        """Send a CPU tensor as the value `handle`; its memory is the caller's again when this returns."""
        header, data = tensor_to_wire(source)
        if self._offers and data.nbytes >= OFFER_BYTES:
            self._offer(handle, header, data)
        else:
            self._send(handle, _Upload(header, data))

    def answered(self, answer: Want | Recalled) -> None:
        """Note what the executor says of an offer; what it wants goes with the next `send_wanted`.

        Raises:
            ProtocolError: there was no such offer.
        """
        if answer.handle not in self._open:
            raise ProtocolError(f"the executor answers an offer of {answer.handle}, which was not made")
        if isinstance(answer, Want):
            self._wanted.append(answer.handle)
        else:
            size = self._close(answer.handle)
            self._stats.bytes_recalled += size
            self._observers.tell("uploaded", bytes=size, recalled=True)

    def send_wanted(self) -> None:
        """Upload what the executor wants. More may be wanted meanwhile: one call does it all, and no other is inside it.

        What an interrupt leaves unsent, the next call sends.
        """
        if self._sending:
            return
        self._sending = True
        try:
            while self._wanted:
                handle = self._wanted[0]
                self._send(handle, self._open[handle])
                self._wanted.popleft()
                self._close(handle)
        finally:
            self._sending = False

    def _offer(self, handle: int, header: TensorHeader, data: memoryview) -> None:
        """Offer `data`, of which a copy is kept unless it is large: then this waits for the answer."""
        large = data.nbytes > COPY_BYTES
        offered = _Upload(header, data if large else memoryview(bytes(data)))
        digest = digest_of_content(offered.data)
        self._open[handle] = offered
        self._held += data.nbytes
        try:
            self._channel.send(
                Frame(encode(Offer(handle, header.dtype, header.shape, header.stride, data.nbytes, digest)))
            )
        except BaseException:
            self._close(handle)
            raise
        self._await(handle, offered, large)

    def _await(self, handle: int, offered: _Upload, large: bool) -> None:
        """Wait until the caller's memory is not needed any more, and not too much waits."""
        try:
            self._channel.take_what_came()
            while (large and handle in self._open) or self._held > HELD_BYTES:
                self._channel.take_next()
        except BaseException:  # the caller takes its memory back, and the executor waits for what it wants
            if large and handle in self._open:
                offered.data = memoryview(bytes(offered.data))
            raise

    def _close(self, handle: int) -> int:
        """The offer is answered, and its bytes were sent if they were wanted; how many they are."""
        offered = self._open.pop(handle, None)
        size = offered.data.nbytes if offered is not None else 0
        self._held -= size
        return size

    def _send(self, handle: int, upload: _Upload) -> None:
        size = upload.data.nbytes
        while True:
            self._channel.take_what_came()
            part = upload.data[upload.sent : upload.sent + CHUNK]
            self._send_part(handle, upload, part)
            upload.sent += part.nbytes
            self._stats.bytes_uploaded += part.nbytes
            self._observers.tell("uploaded", bytes=part.nbytes, recalled=False)
            if upload.sent >= size:
                return

    def _send_part(self, handle: int, upload: _Upload, part: memoryview) -> None:
        header, size = upload.header, upload.data.nbytes
        coded = self._compressing.smaller(part, dtype_from_name(header.dtype).itemsize)
        coding = (PLANES_ZSTD, part.nbytes) if coded is not None else ("", 0)
        message = Upload(handle, header.dtype, header.shape, header.stride, size, upload.sent, *coding)
        body = part if coded is None else coded
        started = time.perf_counter()
        self._channel.send(Frame(encode(message), [body]))
        self._compressing.sent(len(body), time.perf_counter() - started)
