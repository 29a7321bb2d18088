"""Link of a session to its executor: sends frames until the session is lost, and keeps the reason of the loss."""

from __future__ import annotations

from threading import get_ident
from typing import NoReturn

from djinn_client.hookspecs.client_channel import ClientChannel
from djinn_client.interception.tensors.known_contents import known_contents
from djinn_client.runtime.connecting.handshake import REASON_SECONDS, close_reason
from djinn_client.runtime.stats import Stats
from djinn_core.errors import DjinnError, ProtocolError, SessionLost, TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.logs import get_logger
from djinn_core.system.interrupts import InterruptibleLock, interrupt_mask
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Goodbye, encode

log = get_logger("djinn.session")


class ExecutorLink:
    """Send and receive frames of a session, from any thread.

    Attributes:
        channel: channel of the session.
        server: the address in use.
        name: the executor's name in messages: the configured address.
        lost: the reason why the session is lost. Empty while it is open.
        sent: number of sent frames.
        read_lock: held by the thread that reads the channel.
        write_lock: held by the thread that sends. Reentrant, because an observer of a reconnection may use the session.
    """

    def __init__(self, channel: ClientChannel, stats: Stats, server: str, name: str = "") -> None:
        self.channel = channel
        self._stats = stats
        self.server = server
        self.name = name or server
        self.lost: str = ""
        self.sent = 0
        self.read_lock = InterruptibleLock()
        self.write_lock = InterruptibleLock()

    def check(self) -> None:
        """Raise `SessionLost` if the session is lost."""
        if self.lost:
            raise SessionLost(self.lost)

    def send(self, frame: Frame) -> None:
        """Send a frame. Ctrl-C takes effect after the send.

        Raises:
            SessionLost: the executor is gone.
        """
        if self.lost:
            self.check()
        if not interrupt_mask.uninterruptible.depth and get_ident() == interrupt_mask.main:
            with interrupt_mask.uninterruptible:
                self.send(frame)
            return
        try:
            with self.write_lock:
                self.sent += 1
                self._stats.messages_sent += 1
                self.channel.send(frame)
        except TransportError as error:
            self._lose_with_reason(error)

    def send_message(self, message: Message) -> None:
        """Send a message without a body. It raises the errors of `send`."""
        self.send(Frame(encode(message)))

    def receive(self, timeout: float) -> Frame:
        """Receive a frame. The caller holds `read_lock`.

        Raises:
            TimeoutError: no frame arrived in time.
            TransportError: the executor is gone.
        """
        frame = self.channel.receive(timeout)
        self._stats.messages_received += 1
        return frame

    def _lose_with_reason(self, error: TransportError) -> None:
        """Lose the session after a failed send.

        If the executor has sent a reason, the error has it. Wait up to `REASON_SECONDS` for a thread that reads it.
        """
        has_lock = self.read_lock.acquire(timeout=REASON_SECONDS)
        try:
            self.check()
            reason = close_reason(self.channel) if has_lock else ""
        finally:
            if has_lock:
                self.read_lock.release()
        self.lose(ProtocolError(reason) if reason else error)

    def lose(self, error: Exception) -> NoReturn:
        """Mark the session as lost because of `error`.

        Raises:
            SessionLost: always.
        """
        reason = str(error)
        if self.server != self.name:  # users do not know the executor's own address
            reason = reason.replace(f"server {self.server}", "its executor").replace(
                self.server, "its executor's address"
            )
        known_contents.clear()
        log.debug("the session is lost", server=self.server, reason=str(error))
        self.lost = (
            f"the session with {self.name} is lost: {reason}. Its tensors are gone. "
            "Call djinn.init() to begin a new session, and create or load the tensors again"
        )
        raise SessionLost(self.lost) from error

    def close(self, *, finish: bool = False) -> None:
        """Send `Goodbye` and close the connection. `finish`: as in `Goodbye`."""
        if not self.lost:
            self.channel.expire()
            try:
                self.send_message(Goodbye(finish))
            except DjinnError as error:
                log.debug("the end of a session was not announced to its executor", reason=str(error))
            self.lost = f"the session with {self.name} was closed"
        self.channel.close()
