"""Close reason: what the other end says in its last message before it closes a connection."""

from __future__ import annotations

import time

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger
from djinn_core.wire.messages import ProtocolClose, decode

REASON_SECONDS = 1.0  # for which such a message is waited for
_log = get_logger("djinn.session")


def close_reason(connection: Connection) -> str:
    """The reason among the frames that were received before a send failed; empty if there is none. Other frames are dropped."""
    deadline = time.monotonic() + REASON_SECONDS
    try:
        while True:
            message = decode(connection.receive(max(0.0, deadline - time.monotonic())).head)
            if isinstance(message, ProtocolClose):
                return message.reason
    except (TimeoutError, TransportError, ProtocolError) as error:
        _log.debug("the other end closed the connection without a reason", detail=str(error))
        return ""
