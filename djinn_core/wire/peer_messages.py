"""Peer-to-peer transfer messages: orders of the client, and transfers between executors."""

from typing import Annotated

import msgspec

from djinn_core.wire.binding_delta import Handles
from djinn_core.wire.message_base import (
    Address,
    Count,
    Dimensions,
    Failure,
    Identifier,
    Message,
    Name,
    PrintableFields,
    Ticket,
    Traceparent,
)

CLIENT = 0  # replaces the number of an executor


class PeerTicketRequest(Message, frozen=True):
    """Ask an executor to admit another one, which brings values to this session. `source`: the other's number in the pool."""

    source: Count


class PeerTicket(Message, frozen=True):
    """Reply to `PeerTicketRequest`: a one-time `ticket`, and where the executor listens.

    `fingerprint`: fingerprint of its TLS certificate; empty without TLS.
    """

    ticket: Ticket
    urls: Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]
    fingerprint: Name = ""


class ConnectPeer(Message, frozen=True):
    """Connect to the executor number `peer` at the first of `urls` that answers, with its `ticket`, and measure the link.

    `me`: this executor's number. `fingerprint`: fingerprint of the peer's certificate.
    """

    peer: Count
    me: Count
    ticket: Ticket
    urls: Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]
    fingerprint: Name = ""


class ConnectPeerReply(PrintableFields, Message, frozen=True):
    """Reply to `ConnectPeer`: one-way latency in seconds and bandwidth in bytes per second, or the reason of the failure."""

    texts = ("error",)

    peer: Count
    url: Address = ""
    latency: float = 0.0
    bandwidth: float = 0.0
    error: str = ""


class DropPeer(Message, frozen=True):
    """Executor `peer` has left the pool: send it nothing, and accept nothing from it. It does not return."""

    peer: Count


class PeerAttach(Message, frozen=True):
    """First message to another executor: the ticket of `PeerTicket`. On a reconnection: the secret of `PeerAttached`."""

    ticket: Ticket


class PeerAttached(Message, frozen=True):
    """The other executor's reply: transfers may begin. It has received `received` transfers of this sender for its session.

    `secret`: secret for a reconnection; empty if the executor does not support that. `opens`: it can open device memory
    that this sender exports.
    """

    received: Count = 0
    secret: Ticket = ""
    opens: bool = False


class TransferAck(Message, frozen=True):
    """Acknowledgement of transfers, which are journaled if sessions are. The sender may drop them.

    `wants_bytes`: the exported memory of the next transfer could not be opened. The sender sends its bytes.
    """

    transfers: Count
    wants_bytes: bool = False


class LinkProbe(Message, frozen=True):
    """Bytes to measure a link between executors. The other end replies without the bytes."""


class MeasureLink(Message, frozen=True):
    """Measure the link to executor `peer` when it is idle; the result is reported in a `LinkMeasurement`."""

    peer: Count


class LinkMeasurement(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """Link measurement by an executor: `nbytes` bytes from (`incoming`) or to executor `peer` took `seconds`.

    `latency` (seconds, one way) only for active measurements, not for observed transfers. Comes with a `Completed`.
    """

    peer: Count
    incoming: bool
    nbytes: Count
    seconds: float
    latency: float | None = None


class SendValues(Message, frozen=True):
    """Send values to executor `peer`, as they are after all earlier submissions.

    `transfer`: a unique number in the pool. With peer `CLIENT` the transfer is relayed through the client to the
    executor that expects it. `move`: also send all values that share memory with them, and free them here.
    """

    transfer: Count
    peer: Count
    handles: Handles
    move: bool = False


class AwaitTransfer(Message, frozen=True):
    """Wait for a transfer of `handles` from executor `source` before later messages. `trace`: as in `Submit`."""

    transfer: Count
    source: Count
    handles: Handles
    trace: Traceparent = ""


class View(msgspec.Struct, frozen=True, array_like=True):
    """A value in a piece of memory. Stride and offset are in elements of its dtype."""

    handle: Count
    dtype: Identifier = ""
    shape: Dimensions = ()
    stride: Dimensions = ()
    offset: Count = 0


class Item(msgspec.Struct, frozen=True, array_like=True):
    """Memory of `size` bytes and the values in it, or the reason why it is missing.

    `dense`: the bytes are the elements of its only view in row-major order; the receiver applies the view's strides.
    `generator`: the state of a random generator, which is the only view and has no memory. `exported`: device memory
    that the receiver opens (`DeviceRuntime.open`). All memory of a transfer is exported or none, and no bytes follow
    exported memory.
    """

    size: Count
    views: tuple[View, ...]
    dense: bool = False
    failure: Failure | None = None
    generator: bytes = b""
    exported: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""


class TransferHeader(Message, frozen=True):
    """Start of a transfer between executors. The bytes follow in `TransferChunk`s, in the order of the items.

    `number`: number among the direct transfers between these executors, from 1; 0 if the client relays it.
    """

    transfer: Count
    items: tuple[Item, ...]
    number: Count = 0


class TransferChunk(Message, frozen=True):
    """The next bytes of the current transfer, in the frame's buffers."""
