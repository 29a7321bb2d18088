"""Relay frames between a client and an executor without decoding them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger
from djinn_core.wire.frames import weight
from djinn_server.system.memory import total_bytes

MAX_CONNECTIONS: Final = (
    512  # connections of a tenant: twice an executor's sessions, because other connections are short
)
EACH_BYTES: Final = 2 << 30  # unsent bytes of a tenant: one frame of up to 1 GiB in each direction
_REASON_SECONDS: Final = 5.0  # time for the opposite direction after a failed send: it may transmit the reason
_CHECK_SECONDS: Final = 0.25
_log = get_logger("djinn.server")


class RelayDirection:
    """One direction of a relayed connection: receive frames from `source`, and send them to `target`.

    `name`: name of the source, for messages.
    """

    def __init__(self, source: Connection, target: Connection, name: str) -> None:
        self._source = source
        self._target = target
        self._name = name
        self._sending = 0  # bytes of the frame being sent
        self._has_stopped = threading.Event()  # set once no further frame is sent

    def unsent_bytes(self) -> int:
        """Return the bytes that were received but not sent: parts of a frame, or a frame for a slow receiver."""
        return self._sending + self._source.buffered_bytes

    def close(self) -> None:
        """Close both connections."""
        self._source.close()
        self._target.close()

    def run(self, opposite: RelayDirection) -> None:
        """Forward frames until the source ends or the target fails. Then close both connections.

        If the target fails, first wait for the `opposite` direction, whose frames may contain the reason.
        """
        try:
            source_ended = self._forward()
            self._has_stopped.set()
            if not source_ended:
                opposite._has_stopped.wait(_REASON_SECONDS)
        finally:
            self._has_stopped.set()
            self.close()

    def _forward(self) -> bool:
        """Forward frames. Return True if the source has ended or failed, False if the target has failed."""
        try:
            while True:
                frame = self._source.receive()
                self._sending = weight(frame)
                try:
                    self._target.send(frame)
                except TransportError as error:
                    _log.debug("cannot deliver a relayed frame", source=self._name, error=str(error))
                    return False
                del frame  # frees its memory before the next receive
                self._sending = 0
        except ProtocolError as error:
            _log.warning("a relayed connection broke the protocol", source=self._name, error=str(error))
        except TransportError as error:
            _log.debug("a relayed connection ended", source=self._name, error=str(error))
        return True


def relay_directions(client: Connection, executor: Connection) -> tuple[RelayDirection, RelayDirection]:
    """Return both directions of a relayed connection: client to executor, and executor to client."""
    return RelayDirection(client, executor, "client"), RelayDirection(executor, client, "executor")


def relay(up: RelayDirection, down: RelayDirection) -> None:
    """Relay frames in both directions until one of the connections ends, then close both.

    `send` blocks, so a fast sender is slowed down to the speed of its receiver.
    """
    return_thread = threading.Thread(target=down.run, args=(up,), name="djinn-relay", daemon=True)
    return_thread.start()
    up.run(down)
    return_thread.join()


class Relays:
    """Limits for each tenant's relayed connections: their number, and their unsent bytes."""

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, max_tenant_bytes: int = EACH_BYTES, max_total_bytes: int = 0
    ) -> None:
        """Set the limits.

        Args:
            max_connections: maximum number of connections of a tenant.
            max_tenant_bytes: maximum unsent bytes of a tenant.
            max_total_bytes: maximum unsent bytes of all tenants; 0: half of the memory.
        """
        self._max_connections = max_connections
        self._max_tenant_bytes = max_tenant_bytes
        self._max_total_bytes = max_total_bytes or total_bytes() // 2
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._directions: dict[RelayDirection, str] = {}
        self._has_thread = False

    @contextmanager
    def reserve(self, tenant: str) -> Iterator[bool]:
        """Count a relayed connection of a tenant inside the block. Yield False if the tenant has too many."""
        with self._lock:
            is_reserved = self._counts[tenant] < self._max_connections
            self._counts[tenant] += is_reserved
        try:
            yield is_reserved
        finally:
            with self._lock:
                self._counts[tenant] -= is_reserved

    @contextmanager
    def limiting(self, tenant: str, *directions: RelayDirection) -> Iterator[None]:
        """Apply the byte limits to `directions` inside the block.

        Above a limit, the directions with the most unsent bytes are closed.
        """
        with self._lock:
            self._directions.update(dict.fromkeys(directions, tenant))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="djinn-relays", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                for direction in directions:
                    del self._directions[direction]

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_SECONDS)
            with self._lock:
                if not self._directions:
                    self._has_thread = False
                    return
            try:
                self._close_largest()
            except Exception as error:
                _log.exception("cannot close relayed connections above a limit: trying again", error=repr(error))

    def _close_largest(self) -> None:
        unsent_bytes: dict[str, dict[RelayDirection, int]] = {}
        with self._lock:
            for direction, tenant in self._directions.items():
                unsent_bytes.setdefault(tenant, {})[direction] = direction.unsent_bytes()
        for direction, tenant in over_limits(unsent_bytes, self._max_tenant_bytes, self._max_total_bytes).items():
            _log.warning("a relayed connection is closed: its tenant has too many unsent bytes", tenant=tenant)
            direction.close()


def over_limits(
    unsent: Mapping[str, Mapping[RelayDirection, int]], each: int, together: int
) -> dict[RelayDirection, str]:
    """Return the directions to close, with their tenants: the largest direction of the largest tenant first.

    `unsent`: unsent bytes by tenant and direction. `each`, `together`: maximum bytes of a tenant, and of all tenants.
    """
    remaining = {tenant: dict(directions) for tenant, directions in unsent.items()}
    closing: dict[RelayDirection, str] = {}
    while remaining:
        sums = {tenant: sum(directions.values()) for tenant, directions in remaining.items()}
        largest_tenant = max(sums, key=sums.__getitem__)
        if sums[largest_tenant] <= each and sum(sums.values()) <= together:
            break
        largest = max(remaining[largest_tenant], key=remaining[largest_tenant].__getitem__)
        del remaining[largest_tenant][largest]
        closing[largest] = largest_tenant
    return closing
