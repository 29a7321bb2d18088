"""Connections that were upgraded from HTTP: frames on the socket itself, as over TCP, instead of requests.

The client requests this when it opens a channel, by HTTP's `Upgrade` (RFC 9110, section 7.8), which proxies know from
WebSocket. A proxy that does not support it removes the header, and the server then opens a channel of requests. Proxies
close connections without traffic after a minute, so either end sometimes sends an idle frame.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Final

from djinn.hooks import Frame, Limits, SocketConnection, encode_frame
from djinn_core.protocol.net.sockets import AcceptedConnection
from djinn_core.system.tcp import DONTWAIT
from djinn_http.dialect import UPGRADE, WAIT_SECONDS

ASKING: Final = f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
ACCEPTING: Final = f"HTTP/1.1 101 Switching Protocols\r\n{ASKING}\r\n".encode("ascii")
# Heads of Djinn's frames are MessagePack, which never begins with 0xC1.
_IDLE: Final = b"\xc1idle"
_IDLE_BYTES: Final = b"".join(encode_frame(Frame(_IDLE), Limits()))


class UpgradedConnection(SocketConnection):
    """The client's end of an upgraded connection. `pulse` must be called periodically."""

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        peer: str,
        bytes_sent: int,
        bytes_received: int,
        leftover: bytes = b"",
    ) -> None:
        """`bytes_sent`, `bytes_received`: bytes on the socket so far. `leftover`: received bytes that begin the first frame."""
        super().__init__(sock, limits, peer)
        self._decoder.feed(leftover)
        self.bytes_sent, self.bytes_received = bytes_sent, bytes_received
        self._sent_by_then, self._since = bytes_sent, time.monotonic()

    def _receive_undated(self) -> bool:
        came = super()._receive_undated()
        self._leave_out_idle()
        return came

    def _receive_some(self, deadline: float | None) -> bool:
        came = super()._receive_some(deadline)
        self._leave_out_idle()
        return came

    def _leave_out_idle(self) -> None:
        """Drop received idle frames, each in one step, so that an interrupt loses no other frame."""
        frames = self._decoder.frames
        for position in reversed(range(len(frames))):
            if frames[position].head == _IDLE:
                del frames[position]

    def pulse(self) -> None:
        """Read arrived bytes, and send an idle frame if nothing was sent for `WAIT_SECONDS`. Never blocks."""
        self.take_in()
        now = time.monotonic()
        if self.bytes_sent != self._sent_by_then:
            self._sent_by_then, self._since = self.bytes_sent, now
        idle = now - self._since >= WAIT_SECONDS and self._process == os.getpid()
        if not idle or not self._send_lock.acquire(blocking=False):
            return
        with suppress(OSError):
            try:
                if not (self._end_reason or self._send_closed or self._unsent_rest):
                    count = self._socket.send(_IDLE_BYTES, DONTWAIT)
                    self.bytes_sent += count
                    self._unsent_rest = [_IDLE_BYTES[count:]] if count < len(_IDLE_BYTES) else []
            finally:
                self._send_lock.release()


class AcceptedUpgrade(UpgradedConnection, AcceptedConnection):
    """The server's end of an upgraded connection."""
