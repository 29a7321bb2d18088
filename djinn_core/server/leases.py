"""The executor's end of a session that outlives its connection: for the time of a lease it waits for its client."""

from __future__ import annotations

import hmac
import secrets
import threading
import time

from djinn_core.delivery.lasting import LastingConnection
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Limits
from djinn_core.logs import get_logger
from djinn_core.server.greetings import refuse, send_message
from djinn_core.wire.messages import Resume, Resumed

_log = get_logger("djinn.server")


class LeasedConnection(LastingConnection):
    """A connection to a client that may come back over another one, with a secret that it was told at the beginning."""

    def __init__(self, inner: Connection, seconds: float) -> None:
        """`seconds`: how long the client may stay away."""
        super().__init__(inner)
        self.secret = secrets.token_urlsafe(32)
        self._seconds = seconds
        self._changed = threading.Condition()

    @property
    def _probes(self) -> bool:
        return False

    def _restore(self, broken: Connection, error: TransportError) -> None:
        self._copy_borrowed()  # it may take long, and memory is written meanwhile
        deadline = time.monotonic() + self._seconds
        with self._changed:
            if self._inner is broken and not self._expired:
                _log.info("a client's connection broke; its session waits", seconds=self._seconds, reason=str(error))
            while self._inner is broken:
                left = deadline - time.monotonic()
                if self._expired:
                    raise error
                if left <= 0:
                    self._closed = f"the client did not come back within {self._seconds:g} s: {error}"
                    raise TransportError(self._closed)
                self._changed.wait(left)

    def resume(self, inner: Connection, taken: int) -> None:
        """Go on over another connection, of which the client has taken so many frames; returns when it is done with.

        Raises:
            ProtocolError: the client cannot have taken that many.
            TransportError: the connection broke at once.
        """
        self._adopt(inner, taken, lambda mine: send_message(inner, Resumed(mine)))
        with self._changed:
            self._changed.notify_all()
            while self._inner is inner and not self._closed:
                self._changed.wait()

    def expire(self) -> None:
        """As `LastingConnection.expire`; a session that waits for its client ends."""
        super().expire()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """As `LastingConnection.close`."""
        super().close()
        with self._changed:
            self._changed.notify_all()


class Leases:
    """The sessions that their clients may come back to, by name."""

    def __init__(self) -> None:
        self._leased: dict[str, LeasedConnection] = {}
        self._lock = threading.Lock()

    def lease(self, session: str, connection: Connection, seconds: float) -> LeasedConnection:
        """From now on the client of a session may come back within `seconds`; what the session talks over."""
        leased = LeasedConnection(connection, seconds)
        with self._lock:
            self._leased[session] = leased
        return leased

    def end(self, session: str) -> None:
        """A session has ended; its connection is closed."""
        with self._lock:
            leased = self._leased.pop(session, None)
        if leased is not None:
            leased.close()

    def serve(self, connection: Connection, asked: Resume) -> None:
        """Let a client go on over `connection`, until it is done with; a wrong secret is answered like no such session."""
        with self._lock:
            leased = self._leased.get(asked.session)
        expected = leased.secret if leased is not None else secrets.token_urlsafe(32)
        if not hmac.compare_digest(expected, asked.secret) or leased is None:
            _log.warning("a client came back to a session that is not there", session=asked.session)
            refuse(connection, "there is no such session (any more)")
            return
        connection.limits = Limits()
        try:
            leased.resume(connection, asked.taken)
        except ProtocolError as error:
            _log.warning("a client came back that does not follow the protocol", error=str(error))
            refuse(connection, str(error))
        except TransportError as error:
            _log.info("a client that came back was gone again", session=asked.session, error=str(error))

    def expire(self) -> None:
        """Nobody may come back any more."""
        with self._lock:
            leased = list(self._leased.values())
        for connection in leased:
            connection.expire()
