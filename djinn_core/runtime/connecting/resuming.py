"""Client side of session resumption: after a break the client dials again and resumes the session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from djinn_core.backoff import Backoff
from djinn_core.delivery.reconnect_limit import BREAKS_LIMIT, ReconnectLimit
from djinn_core.delivery.reliable_connection import NotReconnected, ReliableConnection
from djinn_core.errors import AccessRefused, DjinnError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.interrupts import LOOK_SECONDS, interrupt_mask
from djinn_core.logs import get_logger
from djinn_core.runtime.connecting.client_channel import Reconnection
from djinn_core.runtime.connecting.close_reason import REASON_SECONDS
from djinn_core.wire.messages import Attached

_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.session")


class ResumingConnection(ReliableConnection):
    """Implements `ClientChannel` over one connection after the other, for as long as the executor has a lease for the session."""

    _probes = True

    def __init__(self, inner: Connection, redial: Reconnection, patience: float, server: str) -> None:
        """`patience`: seconds after which it gives up."""
        super().__init__(inner)
        self._redial = redial
        self._patience = patience
        self._server = server
        self._reconnecting = threading.Lock()
        self._reconnects = ReconnectLimit((0, 0))  # frames received at both ends
        self.resumed = 0
        self.crashes_executors = False
        self.logged = False
        self.successor: Attached | None = None
        self._when_resumed: list[Callable[[float], None]] = []

    @property
    def reconnection(self) -> Reconnection:
        """As `ClientChannel.reconnection`."""
        return self._redial

    def hasten(self, patience: float) -> None:
        """As `ClientChannel.hasten`."""
        self._patience = min(self._patience, patience)

    def call_when_resumed(self, resumed: Callable[[float], None]) -> None:
        """As `ClientChannel.call_when_resumed`."""
        self._when_resumed.append(resumed)

    def _restore(self, broken: Connection, error: TransportError) -> None:
        while not self._reconnecting.acquire(timeout=LOOK_SECONDS):
            _raise_if_interrupted()
        try:
            if self._inner is not broken:
                return
            if self._closed:
                raise TransportError(self._closed)
            self._take_close_reason()
            if self._expired:
                raise error
            received = self._retire()
            self._check_limit(received, error)
            _log.warning("the connection broke; connecting again", server=self._server, reason=str(error))
            started = time.monotonic()
            self._dial_until(started + self._patience, received, error)
            seconds = time.monotonic() - started
            for resumed in self._when_resumed:
                resumed(seconds)
            _log.warning("connected again", server=self._server, seconds=round(seconds, 3))
        finally:
            self._reconnecting.release()

    def _check_limit(self, received: int, error: TransportError) -> None:
        """Give up where connections break again and again before a frame is received: the frames that are sent cause it."""
        if self._reconnects.record_break((received, self._outbox.acknowledged)):
            self._give_up(f"{error}; {BREAKS_LIMIT} connections broke before anything was received over them")

    def _take_close_reason(self) -> None:
        """Receive the frames that came before the connection broke: the reason may be among them."""
        if not self._reading.acquire(blocking=False):
            return
        deadline = time.monotonic() + REASON_SECONDS
        try:
            while (left := deadline - time.monotonic()) > 0:
                frame = self._read(self._inner, left)
                if frame is not None:
                    self._early.append(frame)
        except (TransportError, TimeoutError) as end:
            _log.debug("nothing more came", reason=str(end))
        finally:
            self._reading.release()

    def _dial_until(self, deadline: float, received: int, error: TransportError) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while not self._expired:
            _raise_if_interrupted()
            try:
                inner, theirs = self._dial(received, max(0.1, deadline - time.monotonic()))
                self._adopt(inner, theirs)
            except AccessRefused as refused:
                self.crashes_executors = refused.crashes_executors
                self._give_up(f"{error}; the server does not go on with it: {refused}")
            except DjinnError as again:
                pause = backoff.jittered()
                if time.monotonic() + pause > deadline:
                    self._give_up(f"{error}; no server has answered for {self._patience:g} s since then: {again}")
                _log.debug("cannot connect again yet", server=self._server, reason=str(again))
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
    while (left := until - time.monotonic()) > 0:
        _raise_if_interrupted()
        time.sleep(min(left, LOOK_SECONDS))


def _raise_if_interrupted() -> None:
    if interrupt_mask.pending:
        raise NotReconnected
