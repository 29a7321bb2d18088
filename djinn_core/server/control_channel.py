"""Control channel of a client beside its session: new addresses of other executors of its pool, also while the session is busy.

An executor that was recovered is another process, with other addresses, and the tickets in its journal are used up. The session
itself may be waiting for that very executor, and reads no messages meanwhile.
"""

from __future__ import annotations

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger
from djinn_core.server.greetings import complain, instance, receive_message, refuse, send_message
from djinn_core.server.peers.exchange import PeerExchange
from djinn_core.wire.peer_messages import ConnectPeer, PeerTicketRequest
from djinn_core.wire.resume_messages import Resumed

_SECONDS = 60.0  # of silence
_log = get_logger("djinn.server")


def serve_aside(connection: Connection, exchange: PeerExchange) -> None:
    """Answer what a client says beside its session, until it hangs up."""
    if not exchange.begun.wait(_SECONDS):  # it is just being made, with what an executor before it has left
        refuse(connection, "the session is not there yet", retry=True)
        return
    try:
        send_message(connection, Resumed(0, instance()))
        while True:
            message = receive_message(connection, _SECONDS)
            if isinstance(message, PeerTicketRequest):
                send_message(connection, exchange.invite(message.source))
            elif isinstance(message, ConnectPeer):
                send_message(connection, exchange.meet(message))
            else:
                raise ProtocolError(f"{type(message).__name__} cannot be said beside a session")
    except (TransportError, TimeoutError) as error:
        _log.debug("a client has told of other executors", end=str(error))
    except ProtocolError as error:
        _log.warning("a client does not follow the protocol beside its session", error=str(error))
        complain(connection, str(error))
