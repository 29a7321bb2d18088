"""Crash recovery of embedded executors: a new process reads the journal of the one that died and goes on."""

from __future__ import annotations

import attrs

from djinn_core.errors import AccessRefused
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.launch.addresses import transport_for
from djinn_core.launch.own_executor import LEASE_SECONDS, OwnExecutor
from djinn_core.runtime.connecting.client_channel import ClientChannel
from djinn_core.runtime.connecting.dialling import ask
from djinn_core.runtime.connecting.resuming import ResumingConnection
from djinn_core.wire.messages import Attached
from djinn_core.wire.resume_messages import ControlAttach, Resume, Resumed


@attrs.define
class Restarting:
    """Starts another executor where the one that there was has ended, and asks it to go on with a session.

    Attributes:
        timeout: seconds that any single step may take. start_timeout: seconds until an executor is ready.
        how: how the last one ended that has died. instance: of the process that had the session last.
    """

    executor: OwnExecutor
    transports: tuple[Transport, ...]
    timeout: float
    start_timeout: float
    session: str
    secret: str = attrs.field(repr=False)
    instance: str = ""
    how: str = ""

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """A connection that goes on with the session, and how many frames the executor has received.

        Raises:
            AccessRefused: the session is over.
            TransportError: the executor does not answer, for the time being.
            StartupError: another one did not start.
        """
        if not self.executor.alive:  # one that is just dying refuses connections, and is asked again
            self.how = self.executor.ending
            if not self.executor.recoverable:
                raise AccessRefused(f"its executor {self.how} and left no journal")
            self.executor.start_again()
        url, connection = self._dial(min(self.start_timeout, seconds))
        resume = Resume(self.session, self.secret, received)
        try:
            resumed = ask(connection, resume, Resumed, self.timeout, url)
        except AccessRefused as error:
            raise AccessRefused(
                f"{error} (the last executor that died {self.how})" if self.how else str(error)
            ) from error
        self.instance = resumed.instance
        return connection, resumed.received

    def aside(self) -> Connection:
        """A connection to say something beside the session.

        Raises:
            DjinnError: there is none, for the time being.
        """
        url, connection = self._dial(self.start_timeout)
        ask(connection, ControlAttach(self.session, self.secret), Resumed, self.timeout, url)
        return connection

    def _dial(self, seconds: float) -> tuple[str, Connection]:
        """The address of the executor, and a connection; `seconds`: until it is ready."""
        url = self.executor.wait_ready(seconds).urls[0]
        transports = self.executor.trusted(self.transports)
        return url, transport_for(url, transports).connect(url, Limits(), self.timeout)


def outliving(
    connection: Connection,
    attached: Attached,
    executor: OwnExecutor,
    transports: tuple[Transport, ...],
    seconds: tuple[float, float],
) -> ClientChannel:
    """The channel of a session that has begun with `executor`, which is started again when it dies.

    `seconds`: that any single step may take, and until an executor is ready.
    """
    redial = Restarting(executor, transports, *seconds, attached.session, attached.secret, attached.instance)
    return ResumingConnection(connection, redial, LEASE_SECONDS + seconds[1], "the executor of this program")
