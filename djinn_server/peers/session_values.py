"""Handle a client's messages about transfers of values between executors, or to and from the client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Frame
from djinn_core.ir.handles import storage_of
from djinn_core.wire.binding_delta import unpack_handles
from djinn_core.wire.message_base import Failure, Message
from djinn_core.wire.messages import encode, expect
from djinn_core.wire.peer_messages import (
    CLIENT,
    AwaitTransfer,
    ConnectPeer,
    ConnectPeerReply,
    DropPeer,
    MeasureLink,
    PeerTicketRequest,
    SendValues,
    TransferHeader,
)
from djinn_server.context import ExecutorContext
from djinn_server.peers.device_memory import export_items
from djinn_server.peers.exchange import PeerExchange
from djinn_server.peers.packed_values import Packed, pack_copies, pack_storages, unpack_item
from djinn_server.peers.route import frames_of
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.running.fair_share import Share
from djinn_server.running.timings import Timings
from djinn_server.running.values import Poison, ValueTable
from djinn_server.session_machine import Wait
from djinn_server.weights.shared_weights import SessionShares


@attrs.frozen(eq=False)
class PeerValues:
    """Handlers of a client's messages about transfers.

    Attributes:
        next_frame: waits for the client's next frame, and returns it.
        await_values: waits for all offered uploads and pending weight reads.
    """

    context: ExecutorContext
    values: ValueTable
    exchange: PeerExchange
    shares: SessionShares
    turn: Share
    next_frame: Callable[[], Generator[Wait, None, Frame]]
    await_values: Callable[[], Iterator[Wait]]

    def answer(
        self, message: Message, connection: ExecutorChannel, timings: Timings | None, submissions: int
    ) -> Iterator[Wait] | None:
        """Handle a message. Return the handler's waits, or None if it never waits.

        `submissions`: number of the session's submissions before the message.

        Raises:
            ProtocolError: the message is not about transfers, or there is no route to the other executor.
        """
        if isinstance(message, SendValues):
            return self._send(message, connection, timings)
        if isinstance(message, AwaitTransfer):
            return self._receive(message, timings, submissions)
        if isinstance(message, TransferHeader):
            return self._receive_relayed(message)
        if isinstance(message, MeasureLink):
            self.exchange.measure_link(message.peer)
        elif isinstance(message, DropPeer):
            self.exchange.drop(message.peer)
        elif isinstance(message, PeerTicketRequest):
            connection.send(Frame(encode(self.exchange.issue_ticket(message.source))))
        elif isinstance(message, ConnectPeer):
            connection.send(Frame(connection.journal.decide(lambda before: self._connect_peer(message, before))))
        else:
            raise ProtocolError(f"unexpected message {type(message).__name__} in a session")
        return None

    def _receive_relayed(self, header: TransferHeader) -> Iterator[Wait]:
        with closing(self.exchange.inbox.receiving(header)) as steps, suppress(StopIteration):
            next(steps)
            while True:
                steps.send((yield from self.next_frame()))

    def _connect_peer(self, request: ConnectPeer, before: bytes | None) -> bytes:
        """Connect to another executor, and return the encoded reply.

        `before`: in a replay, the logged reply, which is returned again; else None.
        """
        if before is None:
            return encode(self.exchange.connect(request))
        self.exchange.note_connected(request, expect(before, ConnectPeerReply))
        return before

    def _send(self, request: SendValues, connection: ExecutorChannel, timings: Timings | None) -> Iterator[Wait]:
        yield from self.await_values()
        handles, begun = unpack_handles(request.handles), time.perf_counter()
        if request.peer == CLIENT:
            packed = self._pack(request, handles)
            header = TransferHeader(request.transfer, tuple(item for item, _ in packed))
            yield from connection.send_each(map(connection.journal.checked, frames_of(header, packed)))
        else:
            yield from self.exchange.send(request.transfer, request.peer, partial(self._pack, request, handles))
        if timings is not None:
            sizes = [self.values.bytes_of(storage) for storage in {storage_of(handle) for handle in handles}]
            timings.add_transfer(request.transfer, request.peer, begun, sizes, incoming=False)
        if request.move:
            self.values.free((*handles, *self.values.handles_of_storages({storage_of(handle) for handle in handles})))
            self.shares.forget(handles)

    def _pack(self, request: SendValues, handles: Sequence[int]) -> list[Packed]:
        pack = pack_storages if request.move else pack_copies
        runtime, on_device = self.context.device.runtime, self.exchange.may_export(request.peer)
        with self.turn:
            packed = pack(handles, self.values, runtime, self.exchange.number, on_device=on_device)
            return export_items(packed, runtime) if on_device else packed

    def _receive(self, expected: AwaitTransfer, timings: Timings | None, submissions: int) -> Iterator[Wait]:
        begun = time.perf_counter()
        result = yield from self.exchange.expect(expected.transfer, expected.source)
        if self.context.events.wants("transferred"):
            self.context.events.emit(
                "transferred",
                transfer=expected.transfer,
                source=expected.source,
                bytes=sum(len(data) for _, data in result) if not isinstance(result, str) else 0,
                duration=time.perf_counter() - begun,
                error=result if isinstance(result, str) else "",
                trace=expected.trace,
            )
        handles = unpack_handles(expected.handles)
        if isinstance(result, str):
            reason = f"a value did not arrive from executor {expected.source}: {result}"
            poison = Poison(Failure(submissions, -1, "transfer", "SessionLost", reason))
            for handle in handles:
                self.values[handle] = poison
            return
        with self.turn:
            for item, data in result:
                for handle, value in unpack_item(item, data, self.context.device.runtime):
                    self.values[handle] = value
        if timings is not None:
            sizes = [len(data) for _, data in result]
            timings.add_transfer(expected.transfer, expected.source, begun, sizes, incoming=True)
        self.context.usage.check_values()
