"""Bounded queue of received frames, from the event loop to the thread that receives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from copy import copy
from typing import Final

from djinn.errors import ProtocolError, TransportError
from djinn.hooks import Frame, FrameDecoder, Limits

# Beyond this the client has to wait. One frame may be larger; then it is alone.
_FULL_BYTES: Final = 8 << 20
_FULL_FRAMES: Final = 4096


class FrameInbox:
    """Decodes a stream of bytes in the event loop, and queues its frames for another thread."""

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.decoder = FrameDecoder(limits)
        self._loop = loop
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._error: TransportError | ProtocolError | None = None
        self._changed = threading.Condition()
        self._room = asyncio.Event()
        self._room.set()

    # --- in the event loop ----------------------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """Decode bytes, and queue the complete frames.

        Raises:
            ProtocolError: the bytes violate the format or the limits. `next` also raises it, after the earlier frames.
        """
        try:
            self.decoder.feed(data)
        except ProtocolError as error:
            self.end(error)
            raise
        finally:
            if self.decoder.frames:
                self._deliver()

    async def wait_for_space(self) -> None:
        """Wait until the inbox has space for another frame."""
        await self._room.wait()

    def _deliver(self) -> None:
        with self._changed:
            while self.decoder.frames:
                frame = self.decoder.frames.popleft()
                self._frames.append(frame)
                self._bytes += weight(frame)
            if self._is_full():
                self._room.clear()
            self._changed.notify()

    # --- in any thread --------------------------------------------------------------------------------------

    def next(self, timeout: float | None) -> Frame:
        """Return the next frame.

        Raises:
            TimeoutError: no frame arrived within the timeout.
            TransportError, ProtocolError: the error that was passed to `end`, after the last frame.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._frames:
                if self._error is not None:
                    raise copy(self._error)  # what is raised keeps the frames it comes through, and they keep this
                seconds_left = None if deadline is None else deadline - time.monotonic()
                if seconds_left is not None and seconds_left <= 0:
                    raise TimeoutError("no frame arrived within the timeout")
                self._changed.wait(seconds_left)
            frame = self._frames.popleft()
            was_full = self._is_full(frame)
            self._bytes -= weight(frame)
            if was_full and not self._is_full():
                call_in(self._loop, self._room)
            return frame

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of the incomplete frame and of queued frames."""
        return self._bytes + self.decoder.buffered_bytes

    def end(self, error: TransportError | ProtocolError) -> None:
        """Accept no more frames, and make `next` raise `error` after the last frame. Only the first call has an effect."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        call_in(self._loop, self._room)

    def clear(self) -> None:
        """Drop all queued frames."""
        with self._changed:
            self._frames.clear()
            self._bytes = 0

    def _is_full(self, *frames: Frame) -> bool:
        return self._bytes >= _FULL_BYTES or len(self._frames) + len(frames) >= _FULL_FRAMES


def weight(frame: Frame) -> int:
    """Return the bytes of a frame's head and body."""
    return len(frame.head) + sum(len(buffer) for buffer in frame.body)


def call_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set `event` of the event loop `loop` from any thread. Do nothing if the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
