"""Peer-to-peer transfer messages: the client's orders, and the transfers from executor to executor."""

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

CLIENT = 0  # in place of the number of an executor


class PeerTicketRequest(Message, frozen=True):
    """Ask an executor to let another one bring values to this session; `source` is the other's number in the pool."""

    source: Count


class PeerTicket(Message, frozen=True):
    """Reply to `PeerTicketRequest`: a one-time `ticket`, and where the executor listens.

    `fingerprint`: the certificate that it shows, where it speaks TLS.
    """

    ticket: Ticket
    urls: Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]
    fingerprint: Name = ""


class ConnectPeer(Message, frozen=True):
    """Connect to the executor number `peer` at the first of `urls` that answers, with its `ticket`, and measure the link.

    `me` is this executor's own number, `fingerprint` the certificate that the other one shows.
    """

    peer: Count
    me: Count
    ticket: Ticket
    urls: Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]
    fingerprint: Name = ""


class ConnectPeerReply(PrintableFields, Message, frozen=True):
    """Reply to `ConnectPeer`: latency in seconds one way, bandwidth in bytes a second; or why there is no connection."""

    texts = ("error",)

    peer: Count
    url: Address = ""
    latency: float = 0.0
    bandwidth: float = 0.0
    error: str = ""


class DropPeer(Message, frozen=True):
    """Executor `peer` has left the pool: it is sent nothing more, sends nothing more and does not come back."""

    peer: Count


class PeerAttach(Message, frozen=True):
    """First message of an executor to another one: the ticket of `PeerTicket`, or, where it came before, the secret of `PeerAttached`."""

    ticket: Ticket


class PeerAttached(Message, frozen=True):
    """The other executor's reply: values may come. It has received `received` transfers of this sender for its session.

    `secret`: valid for reconnecting after the connection broke; empty if the executor does not wait for that.
    `opens`: it may open device memory that this sender exports.
    """

    received: Count = 0
    secret: Ticket = ""
    opens: bool = False


class TransferAck(Message, frozen=True):
    """Acknowledgement of transfers: received, and journaled if sessions are; the sender may drop them.

    `wants_bytes`: the exported memory of the next transfer could not be opened. The sender sends its bytes.
    """

    transfers: Count
    wants_bytes: bool = False


class LinkProbe(Message, frozen=True):
    """Bytes that serve to measure a link between executors; the other end answers without them."""


class MeasureLink(Message, frozen=True):
    """Measure the link to executor `peer` when it is idle; the result is reported in a `LinkMeasurement`."""

    peer: Count


class LinkMeasurement(Message, frozen=True):
    """Link measurement by an executor: `nbytes` bytes from (`incoming`) or to executor `peer` took `seconds`.

    `latency` (seconds, one way) only for active measurements, not for observed transfers. Comes with a `Completed`.
    """

    peer: Count
    incoming: bool
    nbytes: Count
    seconds: float
    latency: float | None = None


class SendValues(Message, frozen=True):
    """Send values to executor `peer`, as they are when the submissions before this have run.

    `transfer` is a number that no other transfer of the pool has. With peer `CLIENT` the transfer is relayed
    through the client to the executor that expects it. Where they `move`, everything that shares memory with them
    goes along and is forgotten here.
    """

    transfer: Count
    peer: Count
    handles: Handles
    move: bool = False


class AwaitTransfer(Message, frozen=True):
    """Wait for a transfer of executor `source`, which brings `handles`, before anything that follows. `trace`: as in `Submit`."""

    transfer: Count
    source: Count
    handles: Handles
    trace: Traceparent = ""


class View(msgspec.Struct, frozen=True, array_like=True):
    """A value that looks into a piece of memory; stride and offset in elements of its dtype."""

    handle: Count
    dtype: Identifier = ""
    shape: Dimensions = ()
    stride: Dimensions = ()
    offset: Count = 0


class Item(msgspec.Struct, frozen=True, array_like=True):
    """Memory of `size` bytes and the values that look into it; or why there is none.

    `dense`: the bytes are the elements of its only view in row-major order, and memory is to be laid out for its strides.
    `generator`: the state of the random generator that its only view is, which has no memory.
    `exported`: device memory that the receiver opens (`DeviceRuntime.open`). All memory of a transfer is exported or none, and no bytes
    follow exported memory.
    """

    size: Count
    views: tuple[View, ...]
    dense: bool = False
    failure: Failure | None = None
    generator: bytes = b""
    exported: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""


class TransferHeader(Message, frozen=True):
    """A transfer, on the way from executor to executor: the bytes follow in `TransferChunk`s, in the order of the items.

    `number`: which one it is, from 1, of those that go directly between these executors; 0 if it passes through the client.
    """

    transfer: Count
    items: tuple[Item, ...]
    number: Count = 0


class TransferChunk(Message, frozen=True):
    """The next bytes of the transfer that is under way, in the frame's buffers."""
