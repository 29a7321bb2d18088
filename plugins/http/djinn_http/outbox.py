"""Bounded queue of frames to send, from the thread that sends them to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Final

import attrs

from djinn.errors import TransportError
from djinn.hooks import Buffer
from djinn_http.inbox import call_in

# What is copied, so that `send` may return before a client asks for it. Beyond this `send` waits until it is written.
_COPY_BYTES: Final = 1 << 20


@attrs.define(eq=False)
class Parcel:
    """An encoded frame.

    Attributes:
        buffers: the bytes of the frame.
        size: number of bytes.
        borrowed: True if `buffers` belong to the sender, which waits until they are sent. False if they are a copy.
        written: True if the bytes were sent.
    """

    buffers: Sequence[Buffer]
    size: int
    borrowed: bool
    written: bool = False


class FrameOutbox:
    """Queues encoded frames of any thread, and passes them to the event loop in batches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parcels: deque[Parcel] = deque()
        self._copied = 0
        self._error: TransportError | None = None
        self._changed = threading.Condition()
        self._filled = asyncio.Event()

    # --- in any thread --------------------------------------------------------------------------------------

    def put(self, buffers: Sequence[Buffer], size: int) -> None:
        """Queue a frame of `size` bytes. After the return, the caller may change the buffers.

        Raises:
            TransportError: the channel has ended.
        """
        with self._changed:
            self._check()
            borrowed = self._copied + size > _COPY_BYTES
            parcel = Parcel(buffers if borrowed else [b"".join(buffers)], size, borrowed)
            self._parcels.append(parcel)
            self._copied += 0 if borrowed else size
            call_in(self._loop, self._filled)
            while borrowed and not parcel.written:
                self._check()
                self._changed.wait()

    def end(self, error: TransportError) -> None:
        """Accept no more frames, and make waiting senders raise `error`. Frames that were copied can still be fetched."""
        with self._changed:
            self._error = self._error or error
            self._parcels = deque(parcel for parcel in self._parcels if not parcel.borrowed)
            self._changed.notify_all()
        call_in(self._loop, self._filled)

    def _check(self) -> None:
        if self._error is not None:
            raise copy(self._error)  # a raised exception refers to stack frames, which refer to this object

    # --- in the event loop ----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Return True if the outbox is closed and empty."""
        return self._error is not None and not self._parcels

    async def batch(self, seconds: float) -> list[Parcel]:
        """Return all queued frames. If none is queued, wait at most `seconds` for one, and return an empty list if none arrives."""
        self._filled.clear()
        if not self._parcels and self._error is None:
            try:
                await asyncio.wait_for(self._filled.wait(), seconds)
            except TimeoutError:
                return []
        with self._changed:
            parcels = list(self._parcels)
            self._parcels.clear()
            return parcels

    def is_alive(self, parcel: Parcel) -> bool:
        """Return True if the parcel's buffers may be read. They may not if its sender has stopped waiting."""
        return not parcel.borrowed or self._error is None

    def written(self, parcels: Sequence[Parcel]) -> None:
        """Mark the parcels as sent, so that their senders continue."""
        with self._changed:
            for parcel in parcels:
                parcel.written = True
                self._copied -= 0 if parcel.borrowed else parcel.size
            self._changed.notify_all()
