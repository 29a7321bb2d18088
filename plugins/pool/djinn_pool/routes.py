"""Routes between the executors of a pool, which are opened and measured at first use."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from djinn_client.hookspecs.routers import Executors
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_client.runtime.observing import Observers
from djinn_core.ir.costs import EVERYWHERE, Link
from djinn_core.logs import get_logger
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.peer_messages import (
    CLIENT,
    AwaitTransfer,
    ConnectPeerReply,
    PeerTicket,
    PeerTicketRequest,
    SendValues,
)
from djinn_pool.parts import TransferStep
from djinn_pool.peer_reconnection import connect_request
from djinn_pool.relay import Relay
from djinn_pool.topology import HANDLING

EVERY_LINK: Final = 16  # up to this number of executors, all links are measured; their number grows quadratically
ROUNDABOUT = (5e7, 0.01)  # guessed bytes per second and seconds of a transfer through the client
log = get_logger("djinn.pool")


class Routes:
    """Opens routes between executors, and sends values over them."""

    def __init__(self, executors: Executors[ExecutorClient], relays: Sequence[Relay], observers: Observers) -> None:
        """`relays`: relay of each executor, by number. The caller adds relays of joining executors."""
        self._executors = executors
        self._members = executors.members
        self._observers = observers
        self._relays = relays
        self._connections: dict[tuple[int, int], ConnectPeerReply] = {}
        self._transfers = itertools.count(1)
        self._under_way: dict[TransferStep, list[int]] = {}

    def connect_peers(self, source: int, target: int) -> ConnectPeerReply:
        """Make executor `source` connect to executor `target` if it is not connected yet.

        Return the reply of `source`, with the measured link. If the two cannot connect, the reply has an error, and
        values pass through this process.
        """
        reply = self._connections.get((source, target))
        if reply is None and any(self._members[number].link.channel.logged for number in (source, target)):
            reply = self._connections[source, target] = ConnectPeerReply(
                target + 1, error="the session is logged for a standby server, so values pass through the client"
            )
        if reply is None:
            receiver = self._members[target]
            ticket = receiver.replies.ask(PeerTicketRequest(source + 1), PeerTicket)
            reply = self._members[source].replies.ask(
                connect_request(source, target, ticket, receiver.server), ConnectPeerReply
            )
            self._connections[source, target] = reply
            if reply.error:
                log.warning(
                    "an executor cannot connect to another executor, values between them pass through this process",
                    source=self._members[source].server,
                    target=receiver.server,
                    error=reply.error,
                )
            else:
                log.info(
                    "executors are connected", source=source, target=target, url=reply.url, bandwidth=reply.bandwidth
                )
        return reply

    def pairs_of(self, executor: int) -> list[tuple[int, int]]:
        """Return the pairs (sender, receiver) with a direct route to or from an executor."""
        present = set(self._executors.present)
        return [
            pair
            for pair, reply in list(self._connections.items())
            if executor in pair and present >= {*pair} and not reply.error
        ]

    def links(self, devices: Sequence[str]) -> tuple[Link, ...]:
        """Measure and return the links between all present executors.

        With more than `EVERY_LINK` executors, measure only links between executors with successive numbers. One more link
        stands for all others and has the median bandwidth and latency.

        `devices`: device id of each executor, by number.
        """
        present = self._executors.present
        if len(present) <= EVERY_LINK:
            return self._measure_links(devices, itertools.permutations(present, 2))
        ring = [(a, b) for first, second in itertools.pairwise(present) for a, b in ((first, second), (second, first))]
        links = self._measure_links(devices, ring)
        middle = (statistics.median([link.bandwidth for link in links]), statistics.median([x.latency for x in links]))
        return (*links, Link(EVERYWHERE, EVERYWHERE, *middle))

    def _measure_links(self, devices: Sequence[str], pairs: Iterable[tuple[int, int]]) -> tuple[Link, ...]:
        connected = [(a, b, self.connect_peers(a, b)) for a, b in pairs]
        return tuple(
            Link(devices[a], devices[b], *(ROUNDABOUT if reply.error else (reply.bandwidth, reply.latency + HANDLING)))
            for a, b, reply in connected
        )

    def ship(self, carry: TransferStep, value: int) -> None:
        """Make the source of a transfer send `value` to its target."""
        transfer = self._send(carry.source, carry.target, [value], move=carry.move)
        self._under_way.setdefault(carry, []).append(transfer)

    def expect(self, carry: TransferStep, value: int) -> None:
        """Make the target of the transfer `carry` wait for `value`, which `ship` has made the source send."""
        waiting = self._under_way[carry]
        transfer = waiting.pop(0)
        if not waiting:
            del self._under_way[carry]
        self._await(transfer, carry.source, carry.target, [value])

    def move(self, source: int, target: int, values: Sequence[int]) -> None:
        """Move the storages of `values`, with all views, from executor `source` to executor `target`."""
        transfer = self._send(source, target, values, move=True)
        self._await(transfer, source, target, values)

    def _send(self, source: int, target: int, values: Sequence[int], *, move: bool) -> int:
        transfer = next(self._transfers)
        ship = SendValues(transfer, target + 1, pack_handles(values), move)
        if not self.connect_peers(source, target).error:
            self._relays[source].send(ship)
            return transfer
        for frame in self._relays[source].take_over(msgspec.structs.replace(ship, peer=CLIENT)):
            self._members[target].link.send(frame)
        return transfer

    def _await(self, transfer: int, source: int, target: int, values: Sequence[int]) -> None:
        trace = self._observers.trace_context("transfer", target + 1, transfer)
        self._relays[target].send(AwaitTransfer(transfer, source + 1, pack_handles(values), trace))
