"""Close reason: the last message of the other end before it closed the connection."""

from __future__ import annotations

import time

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger
from djinn_core.wire.messages import ProtocolClose, decode

LAST_WORDS_SECONDS = 1.0
_log = get_logger("djinn.session")


def last_words(connection: Connection) -> str:
    """The reason that lies among what the other end of a connection that cannot send any more has sent; empty if none.

    Whatever else was sent is dropped.
    """
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    try:
        while True:
            message = decode(connection.receive(max(0.0, deadline - time.monotonic())).head)
            if isinstance(message, ProtocolClose):
                return message.reason
    except (TimeoutError, TransportError, ProtocolError) as error:
        _log.debug("the other end hung up without a reason", detail=str(error))
        return ""
