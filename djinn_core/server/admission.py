"""A gateway's side of a connection: the right token, or nothing happens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import attrs

from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.launch.addresses import transport_for
from djinn_core.launch.process import ExecutorProcess
from djinn_core.launch.tickets import LIFETIME
from djinn_core.launch.version import djinn_version
from djinn_core.logs import get_logger
from djinn_core.server.greetings import STRANGER_LIMITS, complain, receive_message, refuse, send_message
from djinn_core.server.pool import Pool
from djinn_core.server.relay import relay
from djinn_core.server.tokens import Token
from djinn_core.wire.messages import PROTOCOL_VERSION, AnyMessage, Attach, Hello, Status, StatusRequest, Welcome
from djinn_core.wire.resume_messages import Resume

HELLO_SECONDS = 10.0
_REFUSAL_SECONDS = (0.05, 0.25)  # slows guessing down and blurs what little the timing tells
_log = get_logger("djinn.server")


@attrs.frozen
class Admission:
    """Lets clients with the token in: a ticket for an executor, a relay to it where they need one, or the status.

    Attributes:
        transports: ways to the executors.
        gateway: where the gateway listens. status: what it is doing.
    """

    token: Token
    pool: Pool
    transports: tuple[Transport, ...]
    gateway: Callable[[], tuple[str, ...]]
    status: Callable[[], Status]

    def serve(self, connection: Connection) -> None:
        """One connection from its first message to its last, in a thread of its own."""
        connection.limits = STRANGER_LIMITS
        message = _first_message(connection)
        if message is None:
            return
        if not isinstance(message, Hello | StatusRequest) or not self.token.matches(message.token):
            _log.warning("a connection without the right token was refused", asked=type(message).__name__)
            time.sleep(random.uniform(*_REFUSAL_SECONDS))  # noqa: S311 - not for secrecy
            refuse(connection, "the token is not the one that this server asks for: see its connection file")
            return
        if message.protocol != PROTOCOL_VERSION:
            refuse(connection, _versions(message))
            return
        try:
            if isinstance(message, StatusRequest):
                send_message(connection, self.status())
            else:
                self._welcome(connection, message)
        except TransportError as error:
            _log.info("a connection ended", error=str(error))
        except ProtocolError as error:
            _log.warning("a connection was closed that does not follow the protocol", error=str(error))
            complain(connection, str(error))

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        found = self.pool.find(hello.device)
        if isinstance(found, str):
            refuse(connection, found)
            return
        number, executor = found
        ready = executor.ready
        if hello.torch != ready.torch:
            _log.warning("client and server run different torch", client=hello.torch, server=ready.torch)
        _log.info("a client was let in", client=hello.client, device=ready.device.id, executor=executor.process_id)
        ticket = executor.issue_ticket(hello.client)
        offered = (ready.device, self.gateway(), self.pool.devices, number)
        welcome = Welcome(ticket, ready.urls, djinn_version(), ready.torch, *offered)
        send_message(connection, welcome)
        attach = _wish_for_relay(connection)
        if attach is not None:
            self._relay(connection, attach, executor)

    def _relay(self, connection: Connection, attach: Attach | Resume, executor: ExecutorProcess) -> None:
        url = executor.urls[0]
        try:
            inner = transport_for(url, self.transports).connect(url, Limits(), HELLO_SECONDS)
        except DjinnError as error:
            _log.error("cannot reach an executor", executor=executor.process_id, error=str(error))
            refuse(connection, "the executor cannot be reached: connect again")
            return
        connection.limits = Limits()
        try:
            send_message(inner, attach)
            relay(connection, inner)
        finally:
            inner.close()


def _first_message(connection: Connection) -> AnyMessage | None:
    try:
        return receive_message(connection, HELLO_SECONDS)
    except TimeoutError:
        _log.warning("a connection was closed that asked for nothing", seconds=HELLO_SECONDS)
    except ProtocolError as error:
        _log.warning("a connection was closed that does not follow the protocol", error=str(error))
        complain(connection, str(error))
    except TransportError as error:
        _log.info("a connection ended before it asked for anything", error=str(error))
    return None


def _wish_for_relay(connection: Connection) -> Attach | Resume | None:
    """The client's `Attach` or `Resume`, or None where it reached the executor by itself and hung up."""
    try:
        message = receive_message(connection, LIFETIME)
    except (TransportError, TimeoutError):
        return None
    if not isinstance(message, Attach | Resume):
        raise ProtocolError(f"expected Attach, got {type(message).__name__}")
    return message


def _versions(message: Hello | StatusRequest) -> str:
    client = f" (Djinn {message.version})" if isinstance(message, Hello) else ""
    older = "the client" if message.protocol < PROTOCOL_VERSION else "the server"
    return (
        f"the client speaks protocol version {message.protocol}{client} and this server version {PROTOCOL_VERSION} "
        f"(Djinn {djinn_version()}): update {older}"
    )
