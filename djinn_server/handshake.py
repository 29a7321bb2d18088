"""Send and receive single messages on a connection, before or after its session."""

from __future__ import annotations

import contextlib
import functools
import secrets

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import ProtocolClose, Refused, decode, encode

# Frame limit for peers without a token or a ticket.
UNAUTHENTICATED_LIMITS = Limits(head=16 << 10, body=0, buffers=0)


@functools.cache
def instance() -> str:
    """Return the name of this process. Clients detect by its name that another process has replaced it."""
    return secrets.token_urlsafe(8)


def send_message(connection: Connection, message: Message) -> None:
    """Send a message without a body.

    Raises:
        TransportError: the connection is broken or closed.
    """
    connection.send(Frame(encode(message)))


def receive_message(connection: Connection, timeout: float | None) -> Message:
    """Receive the next message.

    Raises:
        TimeoutError: no message arrived within `timeout` seconds.
        ProtocolError: the frame is not a message.
        TransportError: the connection is broken or closed.
    """
    return decode(connection.receive(timeout).head)


def refuse(
    connection: Connection,
    reason: str,
    *,
    retry: bool = False,
    crashes_executors: bool = False,
    retry_after: float = 0.0,
) -> None:
    """Send a refusal with its reason. Do nothing if the other end is gone.

    `retry`, `crashes_executors`, `retry_after`: as in `Refused`.
    """
    with contextlib.suppress(TransportError):
        send_message(connection, Refused(reason, retry, crashes_executors, retry_after))


def complain(connection: Connection, reason: str, *, stopped: bool = False) -> None:
    """Tell the other end that its message is unacceptable.

    If the frame itself was malformed, the transport has already closed the connection. `stopped`: as in `ProtocolClose`.
    """
    with contextlib.suppress(TransportError, ProtocolError):
        send_message(connection, ProtocolClose(reason, stopped))
