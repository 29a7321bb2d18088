"""Reconnect the executors of a pool to a recovered executor, which is a new process with new addresses.

The client sends the requests over control channels, because sessions may be waiting for the recovered executor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import attrs

from djinn_client.hookspecs.client_channel import ClientChannel, Reconnection
from djinn_client.runtime.connecting.handshake import ask
from djinn_core.errors import DjinnError, TransportError
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import at_host, is_loopback, is_wildcard, parse_url
from djinn_core.protocol.backoff import Backoff
from djinn_core.wire.peer_messages import ConnectPeer, ConnectPeerReply, PeerTicket, PeerTicketRequest

_PAUSE_SECONDS: Final = 0.1
_MAX_PAUSE_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 120.0  # the peer may have to be restarted as well
_ANSWER_SECONDS: Final = 30.0
_log = get_logger("djinn.pool")


def connect_request(source: int, target: int, ticket: PeerTicket, server: str) -> ConnectPeer:
    """Return the message that makes executor `source` connect to executor `target`.

    Args:
        source: number of the executor that connects.
        target: number of the executor that accepts.
        ticket: ticket and addresses of `target`.
        server: address by which this client reaches `target`.
    """
    host = parse_url(server).hostname or "" if "://" in server else ""
    urls = tuple(_reachable_url(url, host) for url in ticket.urls)
    return ConnectPeer(target + 1, source + 1, ticket.ticket, urls, ticket.fingerprint)


def _reachable_url(url: str, host: str) -> str:
    """Return an executor's address `url` with `host`, by which this client reaches it.

    A loopback `host` may be a tunnel's end, so it replaces only wildcards. Without `host` or for `unix:`, keep `url`.
    """
    if not host or url.startswith("unix:"):
        return url
    if is_loopback(host) and not is_wildcard(urlsplit(url).hostname or ""):
        return url
    return at_host(url, host)


@attrs.frozen
class _Member:
    """A watched executor of the pool.

    Attributes:
        reach: opens control channels to the executor.
        server: address of its server.
    """

    reach: Reconnection
    server: str


class PeerReconnection:
    """Connects a recovered executor with the other executors of the pool again, in both directions."""

    def __init__(
        self,
        pairs: Callable[[int], Sequence[tuple[int, int]]],
    ) -> None:
        """`pairs`: function that returns the (sender, receiver) pairs of connections to and from an executor."""
        self._pairs = pairs
        self._instances: dict[int, str] = {}
        self._members: dict[int, _Member] = {}
        self._closed = threading.Event()

    def join(self, number: int, connection: ClientChannel, server: str, instance: str) -> None:
        """Watch an executor.

        Args:
            number: number of the executor.
            connection: the client's channel to it.
            server: address of its server.
            instance: id of its present process.
        """
        self._instances[number] = instance
        if connection.reconnection is not None:
            self._members[number] = _Member(connection.reconnection, server)
            connection.call_when_resumed(partial(self._resumed, number))

    def leave(self, number: int) -> None:
        """Stop watching an executor."""
        self._members.pop(number, None)
        self._instances[number] = ""

    def _resumed(self, number: int, _seconds: float) -> None:
        """Reconnect an executor whose connection has resumed, if its process is new."""
        peer = self._members.get(number)
        instance = peer.reach.instance if peer is not None else ""
        if instance != self._instances[number]:
            self._instances[number] = instance
            threading.Thread(
                target=self._reconnect, args=(number, instance), name="djinn-peer-reconnection", daemon=True
            ).start()

    def _reconnect(self, number: int, instance: str) -> None:
        deadline, backoff = time.monotonic() + _PATIENCE_SECONDS, Backoff(_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        # An executor whose connection does not outlive a break is not recovered.
        waiting = [pair for pair in self._pairs(number) if self._members.keys() >= {*pair}]
        while waiting and not self._closed.is_set() and self._instances[number] == instance:
            if waiting[0] not in self._pairs(number):
                waiting.pop(0)  # one of them has left
                continue
            try:
                self._connect(*waiting[0])
            except DjinnError as error:
                if time.monotonic() > deadline:
                    _log.error(
                        "a recovered executor could not be connected to another executor, programs that use both will wait",
                        pair=waiting[0],
                        error=str(error),
                    )
                    return
                _log.debug("executors cannot be reconnected yet, retrying", pair=waiting[0], reason=str(error))
                self._closed.wait(backoff.pause())
                waiting.append(waiting.pop(0))  # another pair may be reachable already
            else:
                waiting.pop(0)
                backoff.reset()

    def _connect(self, source: int, target: int) -> None:
        """Make executor `source` connect to executor `target` again.

        Raises:
            DjinnError: the client cannot reach one of the executors, or `source` cannot reach `target`.
        """
        receiver = self._members[target]
        connection = receiver.reach.control_channel()
        try:
            ticket = ask(connection, PeerTicketRequest(source + 1), PeerTicket, _ANSWER_SECONDS, receiver.server)
        finally:
            connection.close()
        sender = self._members[source]
        connection = sender.reach.control_channel()
        try:
            request = connect_request(source, target, ticket, receiver.server)
            reply = ask(connection, request, ConnectPeerReply, _ANSWER_SECONDS, sender.server)
        finally:
            connection.close()
        if reply.error:
            raise TransportError(reply.error)
        _log.info("executors are reconnected", source=source, target=target, url=reply.url)

    def close(self) -> None:
        """Stop reconnecting executors."""
        self._closed.set()
