"""Connections with a socket for frames and small buffers, and UCX for large buffers.

The socket provides authentication, TLS, order, limits, timeouts, close reasons, and detection of dead peers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from djinn.errors import ProtocolError, TransportError
from djinn.hooks import Connection, Frame, Limits, LinkFacts, SocketConnection, get_logger
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.frames import allocate, flatten
from djinn_ucx.bulk import BulkChannel, Message, StrandedChannels
from djinn_ucx.endpoints import AddressTrials
from djinn_ucx.opening import Offer, Opening, decode_opening, encode_opening, layout, socket_limits

_GRACE_SECONDS: Final = 2.0  # seconds for pending buffers after the other end has hung up
_INTERRUPTED_SECONDS: Final = 1.0  # seconds for a buffer that the other end does not receive, after Ctrl-C
_COMMIT: Final = b"\x01"
log = get_logger("djinn.ucx")


@attrs.frozen
class _Arriving:
    """A frame whose large buffers arrive over UCX.

    Attributes:
        frame: the frame, with the memory of the arriving buffers.
        messages: the pending transfers. The last is a byte that confirms that all buffers were sent.
        bulk_bytes: bytes of the arriving buffers.
    """

    frame: Frame
    messages: list[Message]
    bulk_bytes: int


@attrs.frozen
class Shared:
    """State that all UCX connections of this process share.

    Attributes:
        stranded: counter of channels that cannot be released.
        trials: process that tests addresses.
    """

    stranded: StrandedChannels = attrs.field(factory=StrandedChannels)
    trials: AddressTrials = attrs.field(factory=AddressTrials)


class UcxConnection(Connection):
    """A connection whose large buffers are sent over UCX.

    `send` of a large buffer returns after the other end has received it, because UCX does not buffer it. The first large
    buffer arrives over the socket. Then the receiving end offers to receive later large buffers over UCX. A client without a
    valid token may not send large buffers, so it uses no more resources than over TCP.

    Attributes:
        peer: name of the other end, for messages.
    """

    peer: str = ""

    def __init__(self, socket: SocketConnection, limits: Limits, local: bool, shared: Shared, bulk_bytes: int) -> None:
        """Wrap a connected socket.

        Args:
            socket: the connection for frames and small buffers.
            limits: largest frame, in both directions.
            local: True if the other end is on this machine.
            shared: state of all UCX connections of this process.
            bulk_bytes: minimum bytes of a buffer that is sent over UCX.
        """
        self.peer = socket.peer
        self._socket = socket
        self._limits = limits
        self._local, self._shared, self._bulk_bytes = local, shared, bulk_bytes
        self._process = os.getpid()
        self._send_lock, self._receive_lock, self._making = threading.Lock(), threading.Lock(), threading.Lock()
        self._channel: BulkChannel | None = None
        self._outgoing: BulkChannel | None = None  # channel for sent buffers, once the other end has made an offer
        self._offered = self._is_accepted = False
        self._arriving: _Arriving | None = None
        self._end_reason = ""
        self._send_closed = ""
        self._beside_sent = self._beside_received = 0
        socket.limits = socket_limits(limits)

    @property
    def limits(self) -> Limits:
        """Return the maximum size of a frame, in both directions."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._socket.limits = socket_limits(limits)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over the socket and UCX, without UCX's own messages."""
        return self._socket.bytes_sent + self._beside_sent

    @property
    def bytes_received(self) -> int:
        """Return the bytes received over the socket and UCX."""
        return self._socket.bytes_received + self._beside_received

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes in memory of frames that `receive` has not returned."""
        arriving = self._arriving
        return self._socket.buffered_bytes + (arriving.bulk_bytes if arriving is not None else 0)

    @property
    def certificate(self) -> bytes:
        """Return the other end's TLS certificate in DER, or empty bytes if it has none."""
        return self._socket.certificate

    @property
    def link(self) -> LinkFacts:
        """Return the measurements of the socket's network."""
        return self._socket.link

    @property
    def over_ucx(self) -> bool:
        """Return True if the next large buffer will be sent over UCX."""
        return self._outgoing is not None

    # --- sending --------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Send a frame, as `Connection.send`.

        If Ctrl-C interrupts a large buffer and the other end does not receive it within a second, the connection ends.
        """
        views = [flatten(buffer) for buffer in frame.body]
        self._limits.check(len(frame.head), len(views), sum(map(len, views)))
        with interrupt_mask, self._send_lock:
            self._check_sending()
            channel = self._outgoing
            large = [] if channel is None else [n for n, view in enumerate(views) if len(view) >= self._bulk_bytes]
            if channel is not None and large:
                self._send_beside(channel, frame.head, views, large)
            else:
                self._socket.send(Frame(frame.head, [b"", *views] if views else ()))

    def _check_sending(self) -> None:
        if self._send_closed or self._end_reason:
            raise TransportError(self._end_reason or self._send_closed)

    def _send_beside(
        self, channel: BulkChannel, head: bytes, views: Sequence[memoryview], large: Sequence[int]
    ) -> None:
        if self._socket.hung_up:
            raise TransportError(self._stop_sending("the peer closed the connection"))
        opening = Opening(tuple((n, len(views[n])) for n in large))
        inline = [view for n, view in enumerate(views) if n not in {*large}]
        check = self._wait_check(interruptible=True)
        try:
            # Start the large buffers before the frame, so that the other end finds them when it reads the frame.
            messages = [channel.send(views[n]) for n in large]
            self._socket.send(Frame(head, [encode_opening(opening), *inline]))
            for message in messages:
                channel.wait(message, check)
            # The other end may have discarded the buffers when it closed.
            if self._socket.hung_up:
                raise TransportError("the peer closed the connection")
            # Confirm the frame only now: an interrupted buffer may have changed while it was sent.
            channel.wait(channel.send(_COMMIT), check)
        except BaseException as error:
            reason = self._stop_sending(f"cannot send: {error}")
            if isinstance(error, Exception):
                raise TransportError(reason) from error
            raise
        self._beside_sent += sum(len(views[n]) for n in large)

    def _stop_sending(self, reason: str) -> str:
        self._send_closed = self._send_closed or self._socket.stop_sending(reason)
        return self._send_closed

    # --- receiving ------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Frame:
        """Return the next frame, as `Connection.receive`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._receive_lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"{self.peer}: another thread has been receiving for more than {timeout} s")
        try:
            while self._arriving is None:
                seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
                frame = self._socket.receive(seconds_left)
                if not frame.body:
                    return frame
                complete = self._begin(frame)
                if complete is not None:
                    return complete
            return self._finish(self._arriving, deadline)
        except ProtocolError as error:
            raise ProtocolError(self._end(str(error))) from error
        finally:
            self._receive_lock.release()

    def _begin(self, on_socket: Frame) -> Frame | None:
        """Return a frame that is complete. Otherwise, take the offered channel or receive buffers over it, and return None."""
        first, *inline = on_socket.body
        opening = decode_opening(first) if len(first) else Opening()
        if opening.offer is not None:
            self._take_offer(opening.offer)
            return None
        parts = layout(opening, len(on_socket.head), inline, self._limits).parts
        if not opening.beside:
            if not self._offered and any(len(buffer) >= self._bulk_bytes for buffer in inline):
                self._offered = True
                threading.Thread(target=self._make_offer, name="djinn-ucx-offer", daemon=True).start()
            return Frame(on_socket.head, inline)
        channel = self._channel
        if channel is None:
            raise ProtocolError("a buffer arrived over UCX that was not requested")
        buffers = [allocate(part) if isinstance(part, int) else part for part in parts]
        places = [n for n, part in enumerate(parts) if isinstance(part, int)]
        by_place = dict(zip(places, [memoryview(buffers[n]) for n in places], strict=True))
        try:
            messages = [channel.receive(by_place[n]) for n, _ in opening.beside]
            messages.append(channel.receive(bytearray(len(_COMMIT))))
        except TransportError as error:
            raise TransportError(self._end(str(error))) from error
        self._arriving = _Arriving(Frame(on_socket.head, buffers), messages, sum(map(len, by_place.values())))
        return None

    def _finish(self, arriving: _Arriving, deadline: float | None) -> Frame:
        channel, check = self._channel, self._wait_check()
        assert channel is not None
        try:
            for message in arriving.messages:
                if not channel.wait(message, check, deadline):
                    raise TimeoutError(f"{self.peer}: nothing arrived in time")
        except TransportError as error:
            raise TransportError(self._end(str(error))) from error
        self._beside_received += arriving.bulk_bytes
        self._arriving = None
        return arriving.frame

    # --- offers ---------------------------------------------------------------------------------------------

    def _make_offer(self) -> None:
        """Offer to receive large buffers over UCX. This runs in a thread, because sending may block."""
        try:
            channel = self._made_channel()
            if channel is not None:
                with self._send_lock:
                    self._check_sending()
                    self._socket.send(Frame(b"", [encode_opening(Opening(offer=channel.offer))]))
        except TransportError as error:
            log.info("large buffers from the peer come over the socket, not UCX", peer=self.peer, reason=str(error))

    def _take_offer(self, offer: Offer) -> None:
        if self._is_accepted:
            raise ProtocolError("the peer sent its UCX address twice")
        self._is_accepted = True
        threading.Thread(target=self._follow_offer, args=(offer,), name="djinn-ucx-offer", daemon=True).start()

    def _follow_offer(self, offer: Offer) -> None:
        """Send large buffers over UCX if the offered address is valid. This runs in a thread, because the test takes time."""
        try:
            if reason := self._shared.trials.reason_against(offer.address, self._local):
                raise TransportError(f"the peer's UCX address was not accepted: {reason}")
            channel = self._made_channel()
            if channel is not None:
                channel.connect(offer)
                with self._making:
                    self._outgoing = None if self._end_reason else channel
        except TransportError as error:
            log.warning(
                "large buffers to the peer are sent over the socket, not UCX", peer=self.peer, reason=str(error)
            )

    def _made_channel(self) -> BulkChannel | None:
        """Return the UCX channel, created at the first call, or None if UCX is disabled or the connection has ended."""
        with self._making:
            if self._end_reason or self._shared.stranded.full:
                return None
            if self._channel is None:
                self._channel = BulkChannel(self._local, self._shared.stranded)
            return self._channel

    # --- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close both directions. A waiting `send` or `receive` raises `TransportError`."""
        self._end("the connection was closed at this end")

    def _end(self, reason: str) -> str:
        """End both directions. Return the reason of the first call, with the peer's name."""
        with self._making:
            self._end_reason = self._end_reason or (
                reason if reason.startswith(self.peer) else f"{self.peer}: {reason}"
            )
            channel, self._channel, self._outgoing, self._arriving = self._channel, None, None, None
        # Close the channel first: the other end may wait until its buffers are received before it closes.
        if channel is not None:
            channel.close()
        self._socket.close()
        return self._end_reason

    def _wait_check(self, interruptible: bool = False) -> Callable[[], None]:
        """Return a function that raises `TransportError` if a wait can no longer succeed.

        `interruptible`: True to also raise a second after Ctrl-C.
        """
        since: dict[str, float] = {}

        def lasts(what: str, seconds: float) -> bool:
            return time.monotonic() - since.setdefault(what, time.monotonic()) >= seconds

        def look() -> None:
            if self._end_reason:
                raise TransportError(self._end_reason)
            if self._socket.hung_up and lasts("hung up", _GRACE_SECONDS):
                raise TransportError("the peer closed the connection in the middle of a frame")
            if interruptible and interrupt_mask.pending and lasts("interrupted", _INTERRUPTED_SECONDS):
                raise TransportError("interrupted while the peer received nothing")

        return look
