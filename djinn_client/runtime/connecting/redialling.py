"""Reconnecting to a session whose connection broke: directly to its executor, or by way of the gateway."""

from __future__ import annotations

import attrs

from djinn_client.runtime.connecting.client_channel import ClientChannel, PlainClientChannel
from djinn_client.runtime.connecting.dialling import (
    DIRECT_SECONDS,
    DialledExecutor,
    GatewayConnection,
    ask,
    direct_ways,
    reach_gateway,
)
from djinn_client.runtime.connecting.resuming import ResumingConnection
from djinn_core.errors import AccessRefused, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import server_name, transport_for
from djinn_core.protocol.delivery.reconnect_limit import STARTING_SECONDS
from djinn_core.protocol.tls_transports import trusting
from djinn_core.wire.message_base import Message
from djinn_core.wire.resume_messages import ControlAttach, ParallelAttach, Resume, Resumed

Reached = tuple[Connection, Resumed]
_log = get_logger("djinn.session")


@attrs.define
class ServerReconnection:
    """Dials an executor again and asks it to go on with a session.

    Attributes:
        urls, token: of the gateway. device: number of the executor there.
        direct: address of the executor; empty if the gateway relays. fingerprint: as in `Welcome`.
        recoverable: True if an executor that is started in the place of one that died recovers its sessions.
        timeout: seconds that any single step may take.
        instance: of the process that had the session last.
    """

    urls: tuple[str, ...]
    token: str = attrs.field(repr=False)
    device: str
    direct: str
    recoverable: bool
    transports: tuple[Transport, ...]
    timeout: float
    session: str
    secret: str = attrs.field(repr=False)
    instance: str = ""
    fingerprint: str = ""

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """A connection that goes on with the session, and how many frames the executor has received.

        Raises:
            AccessRefused: the session is over.
            TransportError: no server answers, for the time being.
        """
        connection, resumed = self._reach(Resume(self.session, self.secret, received), min(self.timeout, seconds))
        self.instance = resumed.instance
        return connection, resumed.received

    def parallel_connection(self, group: bytes) -> Connection:
        """As `Reconnection.parallel_connection`: there is none where the gateway relays.

        Raises:
            TransportError: the executor does not answer, or refuses.
        """
        if not self.direct:
            raise TransportError("the gateway passes frames on")
        return self._ask_at(self.direct, self.timeout, ParallelAttach(self.session, self.secret, group))[0]

    def control_channel(self) -> Connection:
        """A control channel of the session.

        Raises:
            AccessRefused: there is no such session there.
            TransportError: no server answers, for the time being.
        """
        return self._reach(ControlAttach(self.session, self.secret), self.timeout)[0]

    def _reach(self, question: Message, timeout: float) -> Reached:
        if self.direct:
            try:
                return self._ask_at(self.direct, min(timeout, DIRECT_SECONDS), question)
            except TransportError as error:
                if not isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    raise
                # An executor listens until it ends.
                if not self.recoverable:
                    raise AccessRefused(f"no executor listens at {self.direct} any more") from error
        return self._ask_gateway(question, timeout)

    def _ask_gateway(self, question: Message, timeout: float) -> Reached:
        """Ask by way of the gateway, which knows if another executor has taken its place."""
        try:
            gateway = reach_gateway(self.urls, self.token, self.device, self.transports, timeout, secondary=True)
        except AccessRefused as error:
            raise TransportError(f"{error}") from error  # while an executor is started again, there is none
        found = None
        try:
            found = self._ask_by(gateway, timeout, question)
        finally:
            if found is None or found[0] is not gateway.connection:
                gateway.connection.close()
        return found

    def _ask_by(self, gateway: GatewayConnection, timeout: float, question: Message) -> Reached:
        """Ask the executor that the gateway names, directly or over the gateway's connection."""
        self.fingerprint = gateway.welcome.fingerprint
        for url, _ in direct_ways(gateway, self.transports) if self.direct else ():
            try:
                found = self._ask_at(url, min(timeout, DIRECT_SECONDS), question)
            except TransportError as error:
                _log.debug("an address does not work", url=url, reason=str(error))
            else:
                self.direct = url
                return found
        return gateway.connection, ask(gateway.connection, question, Resumed, timeout, gateway.url)

    def _ask_at(self, url: str, timeout: float, question: Message) -> Reached:
        connection = transport_for(url, trusting(self.transports, self.fingerprint)).connect(url, Limits(), timeout)
        return connection, ask(connection, question, Resumed, self.timeout, url)


def resumable_channel(
    reached: DialledExecutor,
    urls: tuple[str, ...],
    token: str,
    device: str,
    transports: tuple[Transport, ...],
    timeout: float,
    parallel: int,
) -> ClientChannel:
    """The channel of a session that has begun, with so many parallel connections at most; where the executor has a lease for it, one that outlives a break."""
    attached = reached.attached
    if not attached.lease:
        return PlainClientChannel(reached.connection)
    direct = "" if reached.relayed else reached.url
    where = (urls, token, device, direct, attached.recoverable, transports, timeout)
    redial = ServerReconnection(*where, attached.session, attached.secret, attached.instance, reached.fingerprint)
    patience = attached.lease + (STARTING_SECONDS if attached.recoverable else 0.0)
    return ResumingConnection(reached.connection, redial, patience, server_name(urls), parallel)
