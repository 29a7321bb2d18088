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
    """Ask an executor to admit another executor, which brings values to this session.

    Attributes:
        source: number of the other executor in the pool.
    """

    source: Count


class PeerTicket(Message, frozen=True):
    """Reply to `PeerTicketRequest`: a one-time `ticket`, and the addresses at which the executor listens.

    Attributes:
        fingerprint: fingerprint of its TLS certificate; empty without TLS.
    """

    ticket: Ticket
    urls: Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]
    fingerprint: Name = ""


class ConnectPeer(Message, frozen=True):
    """Connect to the executor number `peer` at the first of `urls` that answers, with its `ticket`, and measure the link.

    Attributes:
        me: number of the executor that receives this message.
        fingerprint: fingerprint of the peer's certificate.
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
    """The other executor's reply to `PeerAttach`: transfers may begin.

    Attributes:
        received: number of transfers that it has received from this sender for its session.
        secret: secret for a reconnection; empty if the executor does not support reconnection.
        opens: True if it can open device memory that this sender exports.
    """

    received: Count = 0
    secret: Ticket = ""
    opens: bool = False


class TransferAck(Message, frozen=True):
    """Acknowledge the transfers up to number `transfers`: the sender may drop them. A journal, if any, has them.

    Attributes:
        wants_bytes: True if the exported memory of the next transfer could not be opened. The sender then sends the bytes.
    """

    transfers: Count
    wants_bytes: bool = False


class LinkProbe(Message, frozen=True):
    """Bytes to measure a link between executors. The other end replies without the bytes."""


class MeasureLink(Message, frozen=True):
    """Measure the link to executor `peer` when it is idle; the result is reported in a `LinkMeasurement`."""

    peer: Count


class LinkMeasurement(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """An executor's measurement of a link: `nbytes` bytes from or to executor `peer` took `seconds`.

    Comes with a `Completed`.

    Attributes:
        incoming: True if the bytes came from the peer.
        latency: one way, in seconds. Only for active measurements, not for observed transfers.
    """

    peer: Count
    incoming: bool
    nbytes: Count
    seconds: float
    latency: float | None = None


class SendValues(Message, frozen=True):
    """Order to send values to executor `peer`, as they are after all earlier submissions.

    With peer `CLIENT`, the client relays the transfer to the executor that expects it.

    Attributes:
        transfer: a unique number in the pool.
        move: True to also send all values that share memory with these values, and to free them here.
    """

    transfer: Count
    peer: Count
    handles: Handles
    move: bool = False


class AwaitTransfer(Message, frozen=True):
    """Order to wait for a transfer of `handles` from executor `source` before later messages are handled.

    Attributes:
        trace: as in `Submit`.
    """

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

    All memory of a transfer is exported or none. No bytes follow exported memory.

    Attributes:
        dense: True if the bytes are the elements of its only view in row-major order. The receiver applies the view's
            strides.
        generator: the state of a random generator, which is the only view and has no memory.
        exported: device memory that the receiver opens (`DeviceRuntime.open`).
    """

    size: Count
    views: tuple[View, ...]
    dense: bool = False
    failure: Failure | None = None
    generator: bytes = b""
    exported: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""


class TransferHeader(Message, frozen=True):
    """Start of a transfer between executors. The bytes follow in `TransferChunk`s, in the order of the items.

    Attributes:
        number: number among the direct transfers between these executors, from 1; 0 if the client relays it.
    """

    transfer: Count
    items: tuple[Item, ...]
    number: Count = 0


class TransferChunk(Message, frozen=True):
    """The next bytes of the current transfer, in the frame's buffers."""
