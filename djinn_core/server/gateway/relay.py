"""Relay of frames between two connections, without decoding them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Holding
from djinn_core.logs import get_logger
from djinn_core.system.memory import total_bytes
from djinn_core.wire.frames import weight

MOST: Final = 512  # twice the sessions that an executor serves: those beside sessions are short
EACH_BYTES: Final = 2 << 30  # a frame may have 1 GiB, and one goes each way
# How long the other direction may go on where one cannot send any more: it may be bringing the reason.
_LAST_WORDS_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_log = get_logger("djinn.server")


class Way:
    """One direction of a relayed connection."""

    def __init__(self, source: Connection, target: Connection, name: str) -> None:
        self._source = source
        self._target = target
        self._name = name
        self._sending = 0  # bytes of the frame that is being sent
        self._over = threading.Event()  # nothing more is sent

    def held(self) -> int:
        """Bytes that came and were not passed on: of a frame that is not whole, or whose receiver is slow."""
        return self._sending + (self._source.held if isinstance(self._source, Holding) else 0)

    def close(self) -> None:
        """End both connections."""
        self._source.close()
        self._target.close()

    def run(self, other: Way) -> None:
        """From the first frame until both connections are closed.

        Where the target takes no more, what it has said before can still come by the `other` direction, which is waited for.
        """
        try:
            takes_more = self._pass_on()
            self._over.set()
            if not takes_more:
                other._over.wait(_LAST_WORDS_SECONDS)
        finally:
            self._over.set()
            self.close()

    def _pass_on(self) -> bool:
        """Pass frames on until the source has no more (True) or the target takes no more (False)."""
        try:
            while True:
                frame = self._source.receive()
                self._sending = weight(frame)
                try:
                    self._target.send(frame)
                except TransportError as error:
                    _log.debug("a relayed frame was not delivered", source=self._name, error=str(error))
                    return False
                del frame  # its memory is not kept while the next one is waited for
                self._sending = 0
        except ProtocolError as error:
            _log.warning("a relayed connection broke the protocol", source=self._name, error=str(error))
        except TransportError as error:
            _log.debug("a relayed connection ended", source=self._name, error=str(error))
        return True


def both_ways(client: Connection, executor: Connection) -> tuple[Way, Way]:
    """Up and down."""
    return Way(client, executor, "client"), Way(executor, client, "executor")


def relay(up: Way, down: Way) -> None:
    """Pass frames on both ways until either side ends, then close both.

    A sender that is faster than its receiver is slowed down, because `send` waits.
    """
    back = threading.Thread(target=down.run, args=(up,), name="djinn-relay", daemon=True)
    back.start()
    up.run(down)
    back.join()


class Relays:
    """Limits of relaying by tenant: number of connections, and bytes that were received and are not sent on yet."""

    def __init__(self, most: int = MOST, each: int = EACH_BYTES, together: int = 0) -> None:
        """`each`: bytes for a tenant. `together`: for all; 0: half of the machine's memory."""
        self._most = most
        self._each = each
        self._together = together or total_bytes() // 2
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._ways: dict[Way, str] = {}
        self._looking = False

    @contextmanager
    def one_more(self, tenant: str) -> Iterator[bool]:
        """Reserve one more relayed connection while the block lasts; False if the tenant has too many."""
        with self._lock:
            there_is_room = self._running[tenant] < self._most
            self._running[tenant] += there_is_room
        try:
            yield there_is_room
        finally:
            with self._lock:
                self._running[tenant] -= there_is_room

    @contextmanager
    def watching(self, tenant: str, *ways: Way) -> Iterator[None]:
        """See to it, while the block lasts, that they do not hold too much."""
        with self._lock:
            self._ways.update(dict.fromkeys(ways, tenant))
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="djinn-relays", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                for way in ways:
                    del self._ways[way]

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if not self._ways:
                    self._looking = False
                    return
            try:
                self._end_most()
            except Exception as error:
                _log.exception("connections that hold most could not be ended; trying again", error=repr(error))

    def _end_most(self) -> None:
        held: dict[str, dict[Way, int]] = {}
        with self._lock:
            for way, tenant in self._ways.items():
                held.setdefault(tenant, {})[way] = way.held()
        for way, tenant in too_much(held, self._each, self._together).items():
            _log.warning("a relayed connection is ended: too much is under way for its tenant", tenant=tenant)
            way.close()


def too_much(held: Mapping[str, Mapping[Way, int]], each: int, together: int) -> dict[Way, str]:
    """Those to end, with their tenants: where most is held, of the tenant that has most, until the rest is within the limits."""
    left = {tenant: dict(ways) for tenant, ways in held.items()}
    found: dict[Way, str] = {}
    while left:
        sums = {tenant: sum(ways.values()) for tenant, ways in left.items()}
        most = max(sums, key=sums.__getitem__)
        if sums[most] <= each and sum(sums.values()) <= together:
            break
        way = max(left[most], key=left[most].__getitem__)
        del left[most][way]
        found[way] = most
    return found
