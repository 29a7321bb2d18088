"""Reconnection: after a connection breaks, the client reaches the executor again and resumes the session."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import attrs

from djinn_client.hookspecs.client_channel import ClientChannel, Reconnection
from djinn_client.runtime.connecting.handshake import (
    DIRECT_SECONDS,
    REASON_SECONDS,
    Server,
    ask,
    direct_addresses,
    reach_gateway,
    slowness,
)
from djinn_core.errors import AccessRefused, DjinnError, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.backoff import Backoff
from djinn_core.protocol.delivery.reconnect_limit import BREAKS_LIMIT, ReconnectLimit
from djinn_core.protocol.delivery.reliable_connection import FramesLost, NotReconnected, ReliableConnection
from djinn_core.protocol.net.striping import StripingConnection
from djinn_core.protocol.tls_transports import transports_trusting
from djinn_core.registry.embedded_executors import EmbeddedExecutor
from djinn_core.system.interrupts import LOOK_SECONDS, interrupt_mask
from djinn_core.wire.message_base import Message
from djinn_core.wire.resume_messages import ControlAttach, ParallelAttach, Resume, Resumed

_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 2.0
_PARALLEL_TRIES: Final = 3  # limit of breaks without parallel connections; more breaks may be caused by parallel ones
_log = get_logger("djinn.session")
Reached = tuple[Connection, Resumed]


class ResumingConnection(ReliableConnection, ClientChannel):
    """A client channel that replaces broken connections, as long as the executor's lease for the session lasts.

    Attributes:
        crashes_executors: as in `ClientChannel`.
        resumed: number of reconnections.
    """

    _probes = True
    crashes_executors: bool = False

    def __init__(
        self, inner: Connection, redial: Reconnection, patience: float, server: str, parallel: int = 0
    ) -> None:
        """Begin with the connection `inner`.

        Args:
            inner: the first connection.
            redial: connects to the executor again.
            patience: limit in seconds for a reconnection.
            server: name of the server, for messages.
            parallel: as the setting `parallel_connections`.
        """
        super().__init__(inner)
        self._parallel = parallel
        self._parallel_tries = _PARALLEL_TRIES
        self._watch(inner)
        self._redial = redial
        self._patience = patience
        self._server = server
        self._reconnect_lock = threading.Lock()
        self._reconnects = ReconnectLimit((0, 0))  # frames received at both ends
        self._counted_connection: Connection | None = (
            None  # its break was counted; after Ctrl-C, the same break is met again
        )
        self.resumed = 0
        self._when_resumed: list[Callable[[float], None]] = []

    @property
    def reconnection(self) -> Reconnection:
        """Return the reconnection to the executor."""
        return self._redial

    def limit_reconnect_seconds(self, patience: float) -> None:
        """Limit reconnection to `patience` seconds, unless the current limit is lower."""
        self._patience = min(self._patience, patience)

    def call_when_resumed(self, callback: Callable[[float], None]) -> None:
        """Call `callback` after each reconnection, with the number of seconds that the connection was down."""
        self._when_resumed.append(callback)

    def _follow(self, inner: Connection) -> None:
        super()._follow(inner)
        self._watch(inner)

    def _watch(self, inner: Connection) -> None:
        """Let `inner` open parallel connections when it has much data to send."""
        if isinstance(inner, StripingConnection) and self._parallel_tries:
            inner.stripe(self._parallel, self._dial_parallel, self._count_try)

    def _dial_parallel(self, group: bytes) -> Connection:
        return self._redial.parallel_connection(group)

    def _count_try(self) -> None:
        self._parallel_tries -= 1

    def _restore(self, broken: Connection, error: TransportError) -> None:
        while not self._reconnect_lock.acquire(timeout=LOOK_SECONDS):
            _raise_if_interrupted()
        try:
            if self._inner is not broken:
                return
            seconds = self._reconnect(error)
        finally:
            self._reconnect_lock.release()
        for observer in self._when_resumed:  # without the lock, because an observer may use the session and reconnect
            observer(seconds)

    def _reconnect(self, error: TransportError) -> float:
        """Connect until the session is resumed. Return the seconds that this took. The caller holds `_reconnect_lock`."""
        if self._closed:
            raise TransportError(self._closed)
        self._take_close_reason()
        if self._expired:
            raise error
        received = self._retire()
        if self._counted_connection is not self._inner:
            self._counted_connection = self._inner
            self._check_limit(received, error)
            _log.warning("the connection broke: reconnecting", server=self._server, reason=str(error))
        begin = time.monotonic()
        self._dial_until(begin + self._patience, received, error)
        seconds = time.monotonic() - begin
        _log.warning("connected again", server=self._server, seconds=round(seconds, 3))
        return seconds

    def _check_limit(self, received: int, error: TransportError) -> None:
        """Raise an error if `BREAKS_LIMIT` connections in a row broke before a frame was received.

        Then a frame that this end sends probably breaks them.
        """
        if self._reconnects.record_break((received, self._outbox.acknowledged)):
            self._give_up(f"{error}; {BREAKS_LIMIT} connections in a row broke before a frame was received")

    def _take_close_reason(self) -> None:
        """Receive the frames that arrived before the break, because the close reason may be among them."""
        if not self._read_lock.acquire(blocking=False):
            return
        deadline = time.monotonic() + REASON_SECONDS
        try:
            while (seconds_left := deadline - time.monotonic()) > 0:
                frame = self._receive_frame(self._inner, seconds_left)
                if frame is not None:
                    self._early.append(frame)
        except (TransportError, TimeoutError) as end:
            _log.debug("no close reason arrived before the connection ended", reason=str(end))
        finally:
            self._read_lock.release()

    def _dial_until(self, deadline: float, received: int, error: TransportError) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        while not self._expired:
            _raise_if_interrupted()
            try:
                inner, received_there = self._dial(received, max(0.1, deadline - time.monotonic()))
                self._adopt(inner, received_there)
            except AccessRefused as refused:
                self.crashes_executors = refused.crashes_executors
                self._give_up(f"{error}; the server refuses to resume the session: {refused}")
            except FramesLost as lost:
                inner.close()
                self._give_up(f"{error}; the server cannot resume the session: {lost}")
            except DjinnError as failure:
                pause = backoff.random_pause()
                if time.monotonic() + pause > deadline:
                    self._give_up(f"{error}; no server has answered for {self._patience:g} s since then: {failure}")
                _log.debug("cannot reconnect yet", server=self._server, reason=str(failure))
                _sleep(pause)
            else:
                self.resumed += 1
                return
        self._give_up(str(error))

    def _dial(self, received: int, seconds: float) -> tuple[Connection, int]:
        try:
            with interrupt_mask.unmasked():
                return self._redial(received, seconds)
        except KeyboardInterrupt:
            interrupt_mask.put_back()
            raise NotReconnected from None

    def _give_up(self, reason: str) -> None:
        self._closed = reason
        raise TransportError(reason)


def _sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (seconds_left := until - time.monotonic()) > 0:
        _raise_if_interrupted()
        time.sleep(min(seconds_left, LOOK_SECONDS))


def _raise_if_interrupted() -> None:
    if interrupt_mask.pending:
        raise NotReconnected


@attrs.define
class ExecutorReconnection(ABC):
    """Base class that reaches the session's executor again, and presents the session's secret.

    Attributes:
        session: name of the session.
        secret: secret of the session.
        instance: id of the process that had the session last.
    """

    session: str
    secret: str = attrs.field(repr=False)
    instance: str

    def __call__(self, received: int, seconds: float) -> tuple[Connection, int]:
        """Reconnect, as `Reconnection.__call__` defines.

        Raises:
            AccessRefused: the session is over.
            DjinnError: the executor does not answer at present.
        """
        connection, resumed = self._ask(Resume(self.session, self.secret, received), seconds)
        self.instance = resumed.instance
        return connection, resumed.received

    def parallel_connection(self, group: bytes) -> Connection:
        """Return a connection parallel to the session's connection. It raises the errors of `__call__`."""
        return self._ask(ParallelAttach(self.session, self.secret, group))[0]

    def control_channel(self) -> Connection:
        """Return a control channel of the session. It raises the errors of `__call__`."""
        return self._ask(ControlAttach(self.session, self.secret))[0]

    @abstractmethod
    def _ask(self, question: Message, seconds: float = math.inf) -> Reached:
        """Reach the executor within `seconds`, and send `question` to it. It raises the errors of `__call__`."""


@attrs.define
class ServerReconnection(ExecutorReconnection):
    """Reconnect to an executor of a server: directly, or relayed by the gateway.

    Attributes:
        server: the server.
        device: number of the executor at the server.
        direct: address of the executor; empty if the gateway relays.
        fingerprint: as in `Welcome`.
        recoverable: True if a replacement of a dead executor recovers its sessions.
    """

    server: Server
    device: str
    direct: str
    fingerprint: str
    recoverable: bool

    def parallel_connection(self, group: bytes) -> Connection:
        """Return a connection parallel to the session's connection.

        It raises the errors of `__call__`, and TransportError if the gateway relays.
        """
        if not self.direct:
            raise TransportError("parallel connections are not possible: the gateway relays frames")
        return self._ask_at(self.direct, self.server.timeout, ParallelAttach(self.session, self.secret, group))[0]

    def _ask(self, question: Message, seconds: float = math.inf) -> Reached:
        timeout = min(self.server.timeout, seconds)
        if self.direct:
            try:
                return self._ask_at(self.direct, min(timeout, DIRECT_SECONDS), question)
            except AccessRefused as refused:
                # After a server restart, another executor may listen at this address.
                if not self.recoverable or refused.crashes_executors:
                    raise
            except TransportError as error:
                if not isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    raise
                # An executor listens for its whole life.
                if not self.recoverable:
                    raise AccessRefused(f"no executor listens at {self.direct} any more") from error
        return self._ask_gateway(question, timeout)

    def _ask_gateway(self, question: Message, timeout: float) -> Reached:
        """Ask through the gateway, which knows whether another executor has replaced this executor."""
        gateway = reach_gateway(attrs.evolve(self.server, timeout=timeout), self.device, secondary=True)
        self.fingerprint = gateway.welcome.fingerprint
        with contextlib.ExitStack() as stack:
            stack.callback(gateway.connection.close)
            for url, _ in direct_addresses(gateway, self.server.transports) if self.direct else ():
                try:
                    answer = self._ask_at(url, min(timeout, DIRECT_SECONDS), question)
                except TransportError as error:
                    _log.debug("an address of the server does not work", url=url, reason=str(error))
                else:
                    self.direct = url
                    return answer
            stack.pop_all()
        return gateway.connection, ask(gateway.connection, question, Resumed, timeout, gateway.url)

    def _ask_at(self, url: str, timeout: float, question: Message) -> Reached:
        transport = transport_for(url, transports_trusting(self.server.transports, self.fingerprint))
        connection = transport.connect(url, Limits(), timeout)
        return connection, ask(connection, question, Resumed, self.server.timeout, url)


@attrs.define
class EmbeddedReconnection(ExecutorReconnection):
    """Reconnect to this program's own executor. If it has ended, start a replacement.

    Attributes:
        executor: the executor.
        transports: transports that the client may use.
        timeout: limit in seconds for each connection attempt and each reply.
        start_timeout: limit in seconds for the start of an executor.
        ending: how the previous executor ended, as the end of a sentence. Empty if none has ended.
    """

    executor: EmbeddedExecutor
    transports: tuple[Transport, ...]
    timeout: float
    start_timeout: float
    ending: str = ""

    def _ask(self, question: Message, seconds: float = math.inf) -> Reached:
        if not self.executor.alive:  # an executor that is about to exit refuses connections, so retry
            self.ending = self.executor.ending
            if not self.executor.recoverable:
                raise AccessRefused(f"the session's executor {self.ending} and left no journal")
            self.executor.start_again()
        start = min(self.start_timeout, seconds)
        url, connection = connect_executor(self.executor, self.transports, start, self.timeout)
        try:
            return connection, ask(connection, question, Resumed, self.timeout, url)
        except AccessRefused as error:
            cause = f" (the previous executor {self.ending})" if self.ending else ""
            raise AccessRefused(f"{error}{cause}") from error


def connect_executor(
    executor: EmbeddedExecutor, transports: tuple[Transport, ...], seconds: float, timeout: float
) -> tuple[str, Connection]:
    """Return the executor's address that the fastest transport reaches, and a connection to this address.

    `seconds`: limit of the wait until the executor is ready. `timeout`: limit in seconds of the connection attempt.
    """
    urls = executor.wait_ready(seconds).urls
    trusted = executor.trusted(transports)
    url = min(urls, key=lambda url: slowness(url, trusted))
    return url, transport_for(url, trusted).connect(url, Limits(), timeout)
