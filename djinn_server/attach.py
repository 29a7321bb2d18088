"""Admit connections at an executor: the first message must have a valid ticket, or resume a session."""

from __future__ import annotations

import attrs
import torch

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Limits
from djinn_core.ir.operators import allowed_operators, operators_digest
from djinn_core.logs import get_logger
from djinn_core.wire.compression import supported_compressions
from djinn_core.wire.messages import Attach, Attached, CustomOperator, DeviceInfo
from djinn_core.wire.peer_messages import PeerAttach
from djinn_core.wire.resume_messages import ControlAttach, ParallelAttach, Resume
from djinn_server.context import ExecutorContext
from djinn_server.handshake import UNAUTHENTICATED_LIMITS, complain, instance, receive_message, refuse
from djinn_server.launch.tickets import Grant, TicketChecker
from djinn_server.peers.exchange import PeerListener
from djinn_server.peers.inbox import PeerConnection

ATTACH_SECONDS = 5.0  # for the first message; a client sends it right after connecting
_log = get_logger("djinn.server")


@attrs.frozen
class AdmittedClient:
    """A client with a valid ticket. `operators`: digest of the client's list of allowed ops."""

    grant: Grant
    operators: str


def admit(
    connection: Connection, tickets: TicketChecker, peer_listener: PeerListener, context: ExecutorContext
) -> AdmittedClient | PeerConnection | Resume | ControlAttach | ParallelAttach | None:
    """Read the first message of a connection: a client's `Attach`, or another executor's `PeerAttach`.

    Return None if the message was refused, malformed, or did not arrive. A `Resume`, `ControlAttach` or `ParallelAttach`
    is returned unchanged, because its session checks the secret. Before admission, only small messages are accepted.
    """
    connection.limits = UNAUTHENTICATED_LIMITS
    try:
        with context.unauthenticated.counted(connection):
            message = receive_message(connection, ATTACH_SECONDS)
    except TimeoutError:
        _log.warning("closed a connection: it sent no first message in time", seconds=ATTACH_SECONDS)
        return None
    except ProtocolError as error:
        _log.warning("closed a connection after a protocol error", error=str(error))
        complain(connection, str(error))
        return None
    except TransportError as error:
        _log.info("a connection ended before it attached", error=str(error))
        return None
    if isinstance(message, Resume | ControlAttach | ParallelAttach):
        return message
    if isinstance(message, PeerAttach) and (peer := peer_listener.redeem(message.ticket)) is not None:
        return peer
    grant = tickets.redeem(message.ticket) if isinstance(message, Attach) else None
    if grant is None or not isinstance(message, Attach):
        context.usage.count("tickets_refused")
        context.events.emit("session_refused", why="ticket")
        _log.warning("a connection without a valid ticket was refused", asked=type(message).__name__)
        refuse(connection, "the ticket is invalid, expired or used: connect to the gateway again for a new one")
        return None
    connection.limits = Limits()
    return AdmittedClient(grant, message.operators)


def attached(
    session: str,
    process: int,
    device: DeviceInfo,
    client_operators: str,
    *,
    caches_weights: bool,
    weight_sources: tuple[str, ...] = (),
    custom_operators: tuple[CustomOperator, ...] = (),
) -> Attached:
    """Return the reply to an admitted client, with the list of allowed ops if the client's list differs.

    `process`: id of the executor process. `caches_weights`: True if the executor has a weight store.
    `weight_sources`: URL schemes from which it reads weights. `custom_operators`: custom ops that the tenant may use.
    """
    differs = client_operators != operators_digest()
    return Attached(
        session=session,
        process=process,
        device=device,
        torch=str(torch.__version__),
        operators=tuple(sorted(allowed_operators())) if differs else None,
        caches_weights=caches_weights,
        compressions=supported_compressions(),
        instance=instance(),
        weight_sources=weight_sources,
        elastic=True,
        custom_operators=custom_operators,
    )
