"""How to get back to a session whose connection broke: straight to its executor, or by way of the gateway."""

from __future__ import annotations

import attrs

from djinn_core.errors import AccessRefused, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.launch.addresses import transport_for
from djinn_core.runtime.dialling import DIRECT_SECONDS, Dialled, ask, reach_gateway
from djinn_core.runtime.resuming import ResumingConnection
from djinn_core.wire.resume_messages import Resume, Resumed


@attrs.frozen
class Redialling:
    """Dials an executor again and asks it to go on with a session.

    Attributes:
        urls: of the gateway. token: what it is shown. device: the executor's number there.
        direct: the executor's own address, empty where the gateway passes frames on.
        timeout: seconds that any single step may take.
    """

    urls: tuple[str, ...]
    token: str = attrs.field(repr=False)
    device: str
    direct: str
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
        if not self.direct:
            gateway = reach_gateway(self.urls, self.token, self.device, self.transports, timeout)
            return gateway.connection, self._resume(gateway.connection, gateway.url, taken, timeout)
        try:
            transport = transport_for(self.direct, self.transports)
            connection = transport.connect(self.direct, Limits(), min(timeout, DIRECT_SECONDS))
        except TransportError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                # Executors listen as long as they live, and their sessions live no longer.
                raise AccessRefused(f"nobody listens at {self.direct} any more") from error
            raise
        return connection, self._resume(connection, self.direct, taken, timeout)

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
    redial = Redialling(urls, token, device, direct, transports, timeout, attached.session, attached.secret)
    return ResumingConnection(reached.connection, redial, attached.lease, reached.url)
