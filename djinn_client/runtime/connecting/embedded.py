"""Embedded executors: processes that an engine starts, on this machine by default, or a thread of this process.

Where one dies, a process that is started in its place recovers the session from its journal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import attrs

from djinn_client.runtime.connecting.client_channel import ClientChannel, PlainClientChannel
from djinn_client.runtime.connecting.dialling import ask, attach, client_name
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.connecting.resuming import ResumingConnection
from djinn_core.errors import AccessRefused, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.backoff import Backoff
from djinn_core.registry.embedded_executors import EmbeddedExecutor, find_starter
from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings
from djinn_core.wire.messages import Attached
from djinn_core.wire.resume_messages import ControlAttach, ParallelAttach, Resume, Resumed

_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0
_log = get_logger("djinn.launch")


def open_embedded(
    settings: Settings, registry: Registry, executors: Sequence[EmbeddedExecutor]
) -> tuple[OpenSession, ...]:
    """A session with each executor that was started; they are closed if this raises."""
    try:
        return tuple(_open_own(settings, registry, executor) for executor in executors)
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise


def _open_own(settings: Settings, registry: Registry, executor: EmbeddedExecutor) -> OpenSession:
    url = executor.wait_ready(settings.start_timeout).urls[0]
    transports = executor.trusted(registry.transports)
    connection = transport_for(url, transports).connect(url, Limits(), settings.connect_timeout)
    attached = attach(connection, executor.issue_ticket(client_name()), settings.connect_timeout)
    channel: ClientChannel = PlainClientChannel(connection)
    if attached.recoverable:
        seconds = settings.connect_timeout, settings.start_timeout
        parallel = settings.parallel_connections
        channel = recoverable_channel(connection, attached, executor, registry.transports, seconds, parallel)
    return OpenSession(channel, attached, url, executor=executor)


def open_again(settings: Settings, registry: Registry, executor: EmbeddedExecutor) -> tuple[ClientChannel, Attached]:
    """A new session with an executor in the place of one that has died, or with that one where it lives.

    Raises:
        DjinnError: there is none.
    """
    deadline, backoff = (
        time.monotonic() + settings.connect_timeout,
        Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS),
    )
    while True:
        executor.start_again()
        try:
            opened = _open_own(settings, registry, executor)
        except TransportError:  # one that is just dying refuses connections, and is asked again
            if time.monotonic() > deadline:
                raise
            time.sleep(backoff.pause())
        else:
            return opened.connection, opened.attached


def open_inline(settings: Settings) -> OpenSession:
    """A session with an executor that is a thread of this process."""
    connection, ticket = find_starter().begin_inline(settings, client_name())
    return OpenSession(PlainClientChannel(connection), attach(connection, ticket, settings.connect_timeout), "inline")


@attrs.define
class ExecutorReconnection:
    """Resumes a session: with its executor, or with another one that is started where that has ended.

    Attributes:
        timeout: seconds that any single step may take. start_timeout: seconds until an executor is ready.
        how: how the last executor that died has ended. instance: of the process that had the session last.
    """

    executor: EmbeddedExecutor
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
        if not self.executor.alive:  # one that is about to end refuses connections, and is asked again
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

    def parallel_connection(self, group: bytes) -> Connection:
        """As `Reconnection.parallel_connection`.

        Raises:
            DjinnError: there is none.
        """
        url, connection = self._dial(self.start_timeout)
        ask(connection, ParallelAttach(self.session, self.secret, group), Resumed, self.timeout, url)
        return connection

    def control_channel(self) -> Connection:
        """A control channel of the session.

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


def recoverable_channel(
    connection: Connection,
    attached: Attached,
    executor: EmbeddedExecutor,
    transports: tuple[Transport, ...],
    seconds: tuple[float, float],
    parallel: int,
) -> ClientChannel:
    """The channel of a session that has begun with `executor`, which is started again when it dies.

    `seconds`: that any single step may take, and until an executor is ready. `parallel`: connections at most.
    """
    redial = ExecutorReconnection(executor, transports, *seconds, attached.session, attached.secret, attached.instance)
    return ResumingConnection(
        connection, redial, executor.lease_seconds + seconds[1], "the executor of this program", parallel
    )
