"""Base of connections over byte streams: locks for concurrent callers, and shutdown."""

from __future__ import annotations

import os
import threading
import time
from _thread import LockType
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import ClassVar, Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.frames import Buffer, Frame, FrameDecoder, Limits, encode_frame

LEAVE_SECONDS: Final = 1.0


class StreamConnection(Connection):
    """A `Connection` over one byte stream per direction. A subclass moves the bytes.

    Several threads may send; frames do not mix. One thread may receive meanwhile. A failed `send` ends only the sending
    direction: earlier frames of the other end can still be received. In a forked child, `close` only drops the child's
    copy of the connection.

    A subclass calls `__init__` and implements `_torn`, `_write`, `_receive_some`, `_hang_up`, `_shut_down` and `_drop`.
    It may override `_finish`, `_stripe`, `_send_large`, `_receive_undated` and `_undated_seconds`. It feeds received
    bytes to `_decoder`, and reads `_end_reason` and `_send_closed`. All names in `OWN` belong to this class: a subclass assigns
    none of them. `TransportConformance` checks that.

    Attributes:
        limits: as in `Connection`.
        peer: the other end, as in `Connection` and in messages.
    """

    OWN: ClassVar[Mapping[str, type]] = MappingProxyType({
        "_decoder": FrameDecoder, "_process": int, "_send_lock": LockType, "_receive_lock": LockType, "_sent": list, "_unsent_rest": list,
        "_send_closed": str, "_end_reason": str,
    })  # fmt: skip

    peer: str = ""
    _undated_seconds = 0.0  # seconds for which a read waits without a deadline; 0: it needs a deadline

    def __init__(self, limits: Limits, peer: str) -> None:
        self.peer = peer
        self._decoder = FrameDecoder(limits)
        self._process = os.getpid()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._sent: list[int] = []  # sizes of the sent parts of the current frame
        self._unsent_rest: list[bytes] = []  # rest of an interrupted frame, which is sent before the next one
        self._send_closed = ""  # reason why nothing can be sent any more
        self._end_reason = ""  # reason why both directions have ended

    # --- methods for subclasses ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def _torn(self) -> bool:
        """True if received bytes of a frame are lost, for example because of an interrupt."""

    @abstractmethod
    def _write(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write all of `buffers`, and return `()`. `OSError` and `ProtocolError` end the sending direction.

        If the other end does not read and an interrupt is pending (`interrupt_mask.pending`), return the unsent rest.
        It is sent with the next frame.
        """

    def _stripe(self, buffers: Sequence[Buffer]) -> tuple[Sequence[Buffer], Sequence[memoryview]]:
        """Split a frame into the buffers to write and the large buffers for `_send_large`."""
        return buffers, ()

    def _send_large(self, large: Sequence[memoryview], unsent: Sequence[Buffer]) -> None:
        """Send the large buffers after `_write` has returned `unsent`. Raises the errors of `_write`."""
        raise NotImplementedError

    def _finish(self, buffers: Sequence[Buffer]) -> bool:
        """Send the rest of an interrupted frame. Return False if the sent amount is unknown.

        Half a frame would end the connection and the session, although the user has only interrupted a loop.
        """
        del buffers
        return False

    @abstractmethod
    def _receive_some(self, deadline: float | None) -> bool:
        """Feed the decoder once. Return False if nothing arrived until `deadline` of `time.monotonic()`.

        `OSError` and `ProtocolError` end the connection.
        """

    def _receive_undated(self) -> bool:
        """As `_receive_some`, but without a deadline or clock: wait about `_undated_seconds` at most."""
        return False

    @abstractmethod
    def _hang_up(self) -> None:
        """Tell the other end that no more data will be sent. Called once, after a failed send."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End both directions, and wake threads inside calls. Called once, in the owner's process."""

    @abstractmethod
    def _drop(self) -> None:
        """Close the sockets. Called when no thread uses them."""

    # --- Connection -----------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Maximum size of a frame, in both directions."""
        return self._decoder.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._decoder.limits = limits

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes in memory of frames that `receive` has not returned."""
        return self._decoder.buffered_bytes

    def send(self, frame: Frame) -> None:
        """Send a frame. A frame beyond `limits` raises `ProtocolError`; the connection stays usable.

        Ctrl-C does not lose a frame: if the other end does not read, the unsent part is copied, and sent before the
        next frame.
        """
        if not interrupt_mask.depth and get_ident() == interrupt_mask.main:
            with interrupt_mask:
                self.send(frame)
            return
        buffers: Sequence[Buffer] = encode_frame(frame, self._decoder.limits)
        large: Sequence[memoryview] = ()
        if len(buffers) > 1:
            buffers, large = self._stripe(buffers)
        try:
            with self._send_lock:
                if self._send_closed or self._end_reason:
                    raise TransportError(self._end_reason or self._send_closed)
                if self._unsent_rest:
                    buffers = [*self._unsent_rest, *buffers]
                self._sent = []
                try:
                    unsent = self._write(buffers)
                    if large:
                        self._send_large(large, unsent)
                    else:
                        self._unsent_rest = [bytes(buffer) for buffer in unsent] if unsent else []
                except (OSError, ProtocolError) as error:
                    raise TransportError(self.stop_sending(f"cannot send: {error}")) from error
                except BaseException:
                    self._finish_or_end(() if large else buffers)
                    raise
        finally:
            if self._end_reason:
                self._release()

    def _finish_or_end(self, buffers: Sequence[Buffer]) -> None:
        """Send the unsent part of an interrupted frame. If that fails or `buffers` is empty, end the connection."""
        is_complete, self._unsent_rest = False, []
        try:
            is_complete = bool(buffers) and self._finish(buffers)
        finally:
            if not is_complete:
                self._end("the connection was interrupted while it sent a frame")

    def receive(self, timeout: float | None = None) -> Frame:
        """Return the next frame. Wait at most `timeout` seconds, or forever if it is None."""
        if not self._receive_lock.acquire(blocking=False):
            started = time.monotonic()
            if not self._receive_lock.acquire(timeout=-1 if timeout is None else timeout):
                raise TimeoutError(f"{self.peer}: another thread has been receiving for more than {timeout} s")
            timeout = None if timeout is None else max(0.0, started + timeout - time.monotonic())
        try:
            if self._end_reason:
                raise TransportError(self._end_reason)
            frames = self._decoder.frames
            undated = timeout is None or timeout > self._undated_seconds > 0.0  # usually the clock need not be read
            deadline = None if undated or timeout is None else time.monotonic() + timeout
            while not frames:
                try:
                    has_arrived = self._receive_undated() if undated else self._receive_some(deadline)
                except TransportError as error:
                    raise TransportError(self._end(str(error))) from error
                except ProtocolError as error:
                    if not frames:  # frames before the first wrong byte are delivered first
                        raise ProtocolError(self._end(str(error))) from error
                except OSError as error:
                    raise TransportError(self._end(f"cannot receive: {error}")) from error
                else:
                    if undated:
                        undated = False
                        if timeout is not None and not frames:
                            deadline = time.monotonic() + timeout - (0.0 if has_arrived else self._undated_seconds)
                    elif not has_arrived:
                        raise TimeoutError(f"{self.peer}: no frame arrived in time")
            return frames.popleft()
        except BaseException:
            # An interrupt between reading bytes and processing them would tear the stream.
            if self._torn:
                self._end("the connection was interrupted while it received bytes")
            raise
        finally:
            self._receive_lock.release()
            if self._end_reason:
                self._release()

    def place_bodies(self, place: Callable[[bytes, int], memoryview | None]) -> None:
        """Receive large buffers in memory that `place` returns."""
        self._decoder.place = place

    def take_in(self) -> None:
        """Read arrived bytes up to the next frame, unless another thread receives.

        Never blocks. The next call raises errors.
        """
        if self._process != os.getpid() or not self._receive_lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            while not self._end_reason and not self._decoder.frames and self._receive_some(now):
                pass
        except (OSError, ProtocolError) as error:
            self._end(str(error))
        finally:
            self._receive_lock.release()

    def close(self) -> None:
        """Close both directions. A waiting `send` or `receive` raises `TransportError`."""
        self._end("the connection was closed at this end")
        self._release()

    # --- closing -------------------------------------------------------------------------------------------

    def stop_sending(self, reason: str) -> str:
        """End the sending direction only, and return the reason. Frames of the other end can still be received."""
        if not self._send_closed:
            self._send_closed = f"{self.peer}: {reason}"
            if not self._end_reason and self._process == os.getpid():
                self._hang_up()
        return self._end_reason or self._send_closed

    def _end(self, reason: str) -> str:
        """End both directions, wake the waiting threads, and return the reason."""
        if not self._end_reason:
            self._end_reason = f"{self.peer}: {reason}"
            # A shutdown would end the connection for a forked child's parent, too.
            if self._process == os.getpid():
                self._shut_down()
        return self._end_reason

    def _release(self) -> None:
        """Close the sockets once no thread is inside a call on them, because the kernel may reuse descriptors at once.

        Threads inside a call have `LEAVE_SECONDS` to leave it. A later one closes the sockets itself when it leaves.
        """
        if not self._send_lock.acquire(timeout=LEAVE_SECONDS):
            return
        if self._receive_lock.acquire(timeout=LEAVE_SECONDS):
            self._drop()
            self._receive_lock.release()
        self._send_lock.release()
