"""Passing frames on between two connections, without looking at them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger

MOST: Final = 512  # twice the sessions that an executor serves: those beside sessions are short
# How long the other direction may go on where one cannot send any more: it may be bringing the reason.
_LAST_WORDS_SECONDS = 5.0
_log = get_logger("djinn.server")


class Relays:
    """For how many connections of each tenant frames are passed on: each takes threads, and memory for a frame each way."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()

    @contextmanager
    def one_more(self, tenant: str) -> Iterator[bool]:
        """Whether there may be one more while the block lasts."""
        with self._lock:
            there_is_room = self._running[tenant] < self._most
            self._running[tenant] += there_is_room
        try:
            yield there_is_room
        finally:
            with self._lock:
                self._running[tenant] -= there_is_room


def relay(client: Connection, executor: Connection) -> None:
    """Pass frames on both ways until either side ends, then close both.

    A sender that is faster than its receiver is slowed down, because `send` waits.
    """
    up, down = threading.Event(), threading.Event()
    back = threading.Thread(
        target=_direct, args=(executor, client, "executor", down, up), name="djinn-relay", daemon=True
    )
    back.start()
    _direct(client, executor, "client", up, down)
    back.join()


def _direct(source: Connection, target: Connection, name: str, over: threading.Event, other: threading.Event) -> None:
    """One direction, from its first frame until both connections are closed; `over` is set when nothing more is sent.

    Where `target` takes no more, what it has said before can still come by the `other` direction, which is waited for.
    """
    try:
        takes_more = _pass_on(source, target, name)
        over.set()
        if not takes_more:
            other.wait(_LAST_WORDS_SECONDS)
    finally:
        over.set()
        source.close()
        target.close()


def _pass_on(source: Connection, target: Connection, name: str) -> bool:
    """Pass frames on until `source` has no more (True) or `target` takes no more (False)."""
    try:
        while True:
            frame = source.receive()
            try:
                target.send(frame)
            except TransportError as error:
                _log.debug("a relayed frame finds nobody", source=name, error=str(error))
                return False
    except ProtocolError as error:
        _log.warning("a relayed connection broke the protocol", source=name, error=str(error))
    except TransportError as error:
        _log.debug("a relayed connection ended", source=name, error=str(error))
    return True
