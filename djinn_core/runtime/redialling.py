"""How to get back to a session whose connection broke: straight to its executor, or by way of the gateway."""

from __future__ import annotations

import attrs

from djinn_core.errors import AccessRefused, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.launch.addresses import transport_for
from djinn_core.logs import get_logger
from djinn_core.runtime.dialling import DIRECT_SECONDS, Dialled, Gateway, ask, direct_ways, reach_gateway
from djinn_core.runtime.resuming import ResumingConnection
from djinn_core.wire.resume_messages import Resume, Resumed

STARTING_SECONDS = 60.0  # that another executor may take until it is ready
_log = get_logger("djinn.session")


@attrs.define
class Redialling:
    """Dials an executor again and asks it to go on with a session.

    Attributes:
        urls: of the gateway. token: what it is shown. device: the executor's number there.
        direct: the executor's own address, empty where the gateway passes frames on.
        recovers: whether the executor that takes the place of one that died goes on with its sessions.
        timeout: seconds that any single step may take.
    """

    urls: tuple[str, ...]
    token: str = attrs.field(repr=False)
    device: str
    direct: str
    recovers: bool
    transports: tuple[Transport, ...]
    timeout: float
    session: str
    secret: str = attrs.field(repr=False)

    def __call__(self, taken: int, seconds: float) -> tuple[Connection, int]:
        """A connection that goes on with the session, and how many frames the executor has taken.

        Raises:
            AccessRefused: the session is over.
            TransportError: nobody answers, for the time being.
        """
        timeout = min(self.timeout, seconds)
        if self.direct:
            try:
                return self._resume_at(self.direct, min(timeout, DIRECT_SECONDS), taken)
            except TransportError as error:
                if not isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    raise
                # Executors listen as long as they live.
                if not self.recovers:
                    raise AccessRefused(f"nobody listens at {self.direct} any more") from error
        return self._ask_gateway(taken, timeout)

    def _ask_gateway(self, taken: int, timeout: float) -> tuple[Connection, int]:
        """By way of the gateway, which knows whether there is another executor in its place."""
        try:
            gateway = reach_gateway(self.urls, self.token, self.device, self.transports, timeout)
        except AccessRefused as error:
            raise TransportError(f"{error}") from error  # while an executor is started again, there is none
        found = None
        try:
            found = self._resume_by(gateway, timeout, taken)
        finally:
            if found is None or found[0] is not gateway.connection:
                gateway.connection.close()
        return found

    def _resume_by(self, gateway: Gateway, timeout: float, taken: int) -> tuple[Connection, int]:
        """At the executor that the gateway names, or over the gateway's own connection."""
        for url, _ in direct_ways(gateway, self.transports) if self.direct else ():
            try:
                found = self._resume_at(url, min(timeout, DIRECT_SECONDS), taken)
            except TransportError as error:
                _log.debug("an address does not work", url=url, reason=str(error))
            else:
                self.direct = url
                return found
        return gateway.connection, self._resume(gateway.connection, gateway.url, taken, timeout)

    def _resume_at(self, url: str, timeout: float, taken: int) -> tuple[Connection, int]:
        connection = transport_for(url, self.transports).connect(url, Limits(), timeout)
        return connection, self._resume(connection, url, taken, self.timeout)

    def _resume(self, connection: Connection, url: str, taken: int, timeout: float) -> int:
        return ask(connection, Resume(self.session, self.secret, taken), Resumed, timeout, url).taken


def lasting(
    reached: Dialled, urls: tuple[str, ...], token: str, device: str, transports: tuple[Transport, ...], timeout: float
) -> Connection:
    """The connection of a session that has begun; one that is dialled again where the executor waits for that."""
    attached = reached.attached
    if not attached.lease:
        return reached.connection
    direct = "" if reached.relayed else reached.url
    where = (urls, token, device, direct, attached.recovers, transports, timeout)
    redial = Redialling(*where, attached.session, attached.secret)
    patience = attached.lease + (STARTING_SECONDS if attached.recovers else 0.0)
    return ResumingConnection(reached.connection, redial, patience, reached.url)
