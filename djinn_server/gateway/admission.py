"""Admit connections at the gateway: a client with a valid token gets a ticket, a relay or the server's status."""

from __future__ import annotations

import random
import time
from typing import Final

import attrs

from djinn_core.errors import DjinnError, ProtocolError, StartupError, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.tls_transports import transports_trusting
from djinn_core.registry.version import djinn_version
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Hello,
    Kill,
    StatusRequest,
    Welcome,
)
from djinn_core.wire.resume_messages import ControlAttach, Resume
from djinn_server.admission_limits import ConnectionRate
from djinn_server.gateway.assignment import Assigner
from djinn_server.gateway.authentication import FAILED
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.operations import kill_session, status_of
from djinn_server.gateway.relay import Relays, relay, relay_directions
from djinn_server.handshake import UNAUTHENTICATED_LIMITS, complain, receive_message, refuse, send_message
from djinn_server.hookspecs.assignment_policies import AssignmentRequest
from djinn_server.hookspecs.authenticators import Credentials, Denial, Identity
from djinn_server.launch.engines import StartedExecutor
from djinn_server.launch.tickets import TICKET_SECONDS, Badge
from djinn_server.malloc_trim import MemoryTrimmer
from djinn_server.rate_limit import Bucket

HELLO_SECONDS = 5.0  # for a client's first message; a client sends it right after connecting
# Random pause before a refusal. It slows down guessing, and hides the duration of a check.
REFUSAL_SECONDS = (0.05, 0.25)
WRONG_A_SECOND = 20.0  # replies to wrong tokens
_FIRST: Final = "the first message must contain a token"
_log = get_logger("djinn.server")


@attrs.frozen
class Admission:
    """Give clients with valid credentials a ticket and, if needed, a relay; or send the status, or end a session.

    Attributes:
        transports: transports that connect to executors.
        rate: limit of the rate of each tenant's connections.
        assigner: chooses the executors of new sessions.
        relays: limits on the relayed connections of each tenant.
        trimmer: returns memory to the system after connections have ended.
        wrong: rate limit of replies to wrong tokens. Clients with valid tokens never wait.
    """

    context: GatewayContext
    transports: tuple[Transport, ...]
    rate: ConnectionRate = attrs.field(factory=ConnectionRate)
    assigner: Assigner = attrs.field(factory=Assigner)
    relays: Relays = attrs.field(factory=Relays)
    trimmer: MemoryTrimmer = attrs.field(factory=MemoryTrimmer)
    wrong: Bucket = attrs.field(factory=lambda: Bucket(WRONG_A_SECOND, 5 * WRONG_A_SECOND))

    def serve(self, connection: Connection) -> None:
        """Serve one connection until it ends, in a thread of its own."""
        connection.limits = UNAUTHENTICATED_LIMITS
        self.context.events.emit("connected", peer=_peer(connection))
        self.trimmer.soon()
        with self.context.unauthenticated.counted(connection):
            message = self._first_message(connection)
            if message is None:
                return
            identity = self._identify(connection, message)
        if identity is None or not isinstance(message, Hello | StatusRequest | Kill):
            return
        try:
            if isinstance(message, Kill):
                self._kill(connection, message, identity)
            elif isinstance(message, StatusRequest):
                self.context.events.emit("status", tenant=identity.tenant, key=identity.key, peer=_peer(connection))
                connection.limits = Limits()  # a status exceeds the frame limit for clients without a token
                send_message(connection, status_of(self.context, self.assigner.policy.name, _scope(identity)))
            else:
                self._welcome(connection, message, identity)
        except TransportError as error:
            _log.info("a connection ended", error=str(error))
        except ProtocolError as error:
            _log.warning("closed a connection after a protocol error", error=str(error))
            complain(connection, str(error))

    def _identify(self, connection: Connection, message: Message) -> Identity | None:
        """Return the identity of a client by its first message, or None if the client was refused."""
        if not isinstance(message, Hello | StatusRequest | Kill):
            self._refuse(connection, Denial(_FIRST, "no_token"), type(message).__name__)
            return None
        credentials = Credentials(message.token, connection.certificate, _peer(connection))
        identity = self.context.authentication.identify(credentials)
        if isinstance(identity, Denial):
            if identity is FAILED and isinstance(message, Hello) and message.secondary:
                identity = attrs.evolve(identity, retry=True)  # clients of leased sessions retry until the lease ends
            self._refuse(connection, identity, type(message).__name__)
            return None
        if message.protocol != PROTOCOL_VERSION:
            self._refuse(connection, Denial(_versions(message), "version"), type(message).__name__, identity)
            return None
        if identity.monitor and not isinstance(message, StatusRequest):
            monitor_denial = Denial("this token is valid for watching the server only", "monitor")
            self._refuse(connection, monitor_denial, type(message).__name__, identity)
            return None
        denial = self.rate.denial(identity)
        if denial is not None:
            self._refuse(connection, denial, type(message).__name__, identity)
            return None
        return identity

    def _refuse(
        self, connection: Connection, denial: Denial, asked: str, identity: Identity | None = None, client: str = ""
    ) -> None:
        if identity is None and self.wrong.take():
            self.context.events.emit("refused", why="flood", asked=asked, peer=_peer(connection), of=denial.kind)
            return  # no reply: a legitimate client does not send hundreds of wrong tokens
        facts = {} if identity is None else {"tenant": identity.tenant, "key": identity.key}
        facts |= {"client": client} if client else {}
        self.context.events.emit("refused", why=denial.kind, asked=asked, peer=_peer(connection), **facts)
        if identity is None:
            time.sleep(random.uniform(*REFUSAL_SECONDS))  # noqa: S311 - not for secrecy
        refuse(connection, denial.reason, retry=denial.retry, retry_after=denial.retry_after)

    def _first_message(self, connection: Connection) -> Message | None:
        try:
            return receive_message(connection, HELLO_SECONDS)
        except TimeoutError:
            self.context.events.emit("refused", why="slow", seconds=HELLO_SECONDS, peer=_peer(connection))
        except ProtocolError as error:
            self.context.events.emit("refused", why="protocol", peer=_peer(connection))
            _log.warning("closed a connection after a protocol error", error=str(error))
            complain(connection, str(error))
        except TransportError as error:
            _log.info("a connection ended before its first message", error=str(error))
        return None

    def _kill(self, connection: Connection, kill: Kill, identity: Identity) -> None:
        """End a session at the request of a client that may see it, and reply."""
        answer = kill_session(self.context, kill.session, identity, _peer(connection), "with `djinn kill`")
        if isinstance(answer, Denial):
            self._refuse(connection, answer, "Kill", identity)
        else:
            send_message(connection, answer)

    def _welcome(self, connection: Connection, hello: Hello, identity: Identity) -> None:
        pool = self.context.tenants.start_pool(identity.tenant, identity.quota.memory)
        if isinstance(pool, Denial):
            self._refuse(connection, pool, "Hello", identity, hello.client)
            return
        request = AssignmentRequest(identity.tenant, (), hello.client, hello.device, hello.hint, identity.quota)
        other_pools = self.context.tenants.others(identity.tenant)
        assignment = pool.assign(request, self.assigner, other_pools, counts=not hello.secondary)
        if isinstance(assignment, Denial):
            self._refuse(connection, assignment, "Hello", identity, hello.client)
            return
        number, executor = assignment
        ready = executor.ready
        if hello.torch != ready.torch:
            _log.warning("client and server run different torch", client=hello.torch, server=ready.torch)
        if identity.key:
            self.context.keys.add(identity.key)
        facts = {"tenant": identity.tenant, "key": identity.key, "client": hello.client}
        endpoints = {"peer": _peer(connection), "device": ready.device.id, "executor": executor.process_id}
        self.context.events.emit("admitted", **facts, **endpoints)
        badge = Badge(identity.tenant, identity.key, identity.quota)
        try:
            ticket = executor.issue_ticket(hello.client, badge=badge)
        except StartupError as error:  # the executor's machine does not answer, or the executor has just died
            _log.error("an executor cannot issue a ticket for a client", executor=executor.process_id, error=str(error))
            refuse(connection, "the executor cannot be reached: connect again", retry=True)
            return
        choices = (ready.device, self.context.urls, pool.devices, number)
        welcome = Welcome(ticket, ready.urls, djinn_version(), ready.torch, *choices, executor.fingerprint)
        send_message(connection, welcome)
        attach = _receive_attach(connection)
        if attach is None:
            return
        with self.relays.reserve(identity.tenant) as is_reserved:
            if is_reserved:
                self._relay(connection, attach, executor, identity.tenant)
            else:
                reason = (
                    f"too many connections of {identity.tenant} go through this gateway: end some, or try again later"
                )
                self._refuse(connection, Denial(reason, "relays", retry=True), type(attach).__name__, identity)

    def _relay(
        self, connection: Connection, attach: Attach | Resume | ControlAttach, executor: StartedExecutor, tenant: str
    ) -> None:
        try:
            transports = transports_trusting(self.transports, executor.fingerprint)
            with executor.relay_address() as url:
                executor_connection = transport_for(url, transports).connect(url, Limits(), HELLO_SECONDS)
        except (DjinnError, OSError) as error:
            _log.error("cannot reach an executor", executor=executor.process_id, error=str(error))
            refuse(connection, "the executor cannot be reached: connect again", retry=True)
            return
        connection.limits = Limits()
        self.context.events.emit("relayed", tenant=tenant, peer=_peer(connection), executor=executor.process_id)
        try:
            send_message(executor_connection, attach)
            pair = relay_directions(connection, executor_connection)
            with self.relays.limiting(tenant, *pair):
                relay(*pair)
        finally:
            executor_connection.close()
            self.trimmer.soon()


def _scope(identity: Identity) -> str | None:
    """Return the tenant whose sessions a client may see, or None if it may see all sessions."""
    return None if identity.sees_all else identity.tenant


def _peer(connection: Connection) -> str:
    """Return the address of the peer, or "" if the transport does not know it."""
    return connection.peer.removeprefix("client ")


def _receive_attach(connection: Connection) -> Attach | Resume | ControlAttach | None:
    """Return a client's request for a relayed connection.

    Return None if no request arrives, because the client has reached the executor directly or is gone.
    """
    try:
        message = receive_message(connection, TICKET_SECONDS)
    except (TransportError, TimeoutError):
        return None
    if not isinstance(message, Attach | Resume | ControlAttach):
        raise ProtocolError(f"expected Attach, got {type(message).__name__}")
    return message


def _versions(message: Hello | StatusRequest | Kill) -> str:
    client = f" (Djinn {message.version})" if isinstance(message, Hello) else ""
    newer = f"Djinn {message.version}" if isinstance(message, Hello) else "the client's version of Djinn"
    is_older = message.protocol < PROTOCOL_VERSION
    remedy = f"install Djinn {djinn_version()} at the client" if is_older else f"install {newer} on the server"
    return (
        f"the client speaks protocol version {message.protocol}{client} and this server version {PROTOCOL_VERSION} "
        f"(Djinn {djinn_version()}): {remedy}, with all of its packages"
    )
