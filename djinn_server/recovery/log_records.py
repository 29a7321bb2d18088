"""Records of a session's journal: their kinds, contents and encoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from djinn_core.errors import SessionLost
from djinn_core.protocol.delivery.record_log import Buffers
from djinn_core.wire.frames import Frame
from djinn_core.wire.peer_messages import TransferHeader
from djinn_server.launch.tickets import NO_TENANT, Badge
from djinn_server.recovery.journal_versions import JournalVersions, check_versions, present_versions

if TYPE_CHECKING:  # a process that only removes journals does not load torch
    from djinn_server.peers.packed_values import Packed

HEADER: Final = b"H"  # JournalHeader
FRAME: Final = b"F"  # a frame of the client
PART: Final = b"U"  # a frame of the client, whose body is in a blob file: BlobFrame
DECISION: Final = b"N"  # result of a decision, which does not follow from the frames, such as a reply's checksum
STOP: Final = b"X"  # StoppedAt: a submission was stopped before an op
SHORTAGE: Final = b"M"  # StoppedAt: an op ran out of memory
ATTEMPT: Final = b"T"  # a recovery began, or is complete
SNAPSHOT: Final = b"S"  # SnapshotHeader, and the memory of values
REPLY: Final = b"K"  # a reply that the client had not received at the snapshot
ARRIVAL: Final = b"A"  # LoggedTransfer: values that came from another executor
UNDER_WAY: Final = b"O"  # LoggedTransfer: values that another executor had not acknowledged at the snapshot
ACKNOWLEDGED: Final = b"P"  # TransfersAcknowledged

Record = tuple[bytes, bytes, Buffers]  # kind, head and body


class SessionIdentity(msgspec.Struct, frozen=True):
    """Identity of a session: its name, the client's name, the secret for reconnecting, and the client's badge."""

    session: str
    client: str
    secret: str
    badge: Badge

    def __repr__(self) -> str:
        """Describe the identity without the secret."""
        return f"SessionIdentity(session={self.session!r}, client={self.client!r})"


class JournalHeader(msgspec.Struct, frozen=True):
    """First record of a journal. `owner`: encoded `SessionIdentity`, whose encoding depends on the version."""

    versions: JournalVersions
    owner: bytes


NO_SESSION: Final = SessionIdentity("", "", "", NO_TENANT)


class SnapshotHeader(msgspec.Struct, frozen=True):
    """Position and state of a session at a snapshot.

    `taken`, `sent`: numbers of received and sent frames, modulo 2^32. `state`: encoded `Snapshot`. `elsewhere`: positions
    and digests of the buffers of memory that are in blob files.
    """

    taken: int
    sent: int
    state: bytes
    elsewhere: tuple[tuple[int, bytes], ...] = ()


class BlobFrame(msgspec.Struct, frozen=True):
    """Frame of an upload whose body is in a blob file: its head, and the location and checksum of the body."""

    head: bytes
    digest: bytes
    start: int
    length: int
    checksum: bytes


class StoppedAt(msgspec.Struct, frozen=True):
    """Op before which a submission stopped, or that ran out of memory. `reason`: the error, or "" if cancelled."""

    submission: int
    op: int
    reason: str = ""


class LoggedTransfer(msgspec.Struct, frozen=True):
    """A transfer from or to executor `peer`; 0: the client relayed the values."""

    peer: int
    header: TransferHeader

    def record(self, kind: bytes, items: Iterable[Packed]) -> Record:
        """Encode the transfer as a record of `kind` ARRIVAL or UNDER_WAY."""
        return kind, encode(self), [data for _, data in items if isinstance(data, memoryview) and len(data)]

    def items(self, frame: Frame) -> list[Packed]:
        """Decode the values of the transfer from its record.

        Raises:
            SessionLost: the buffers in the record do not have the sizes of the values.
        """
        sizes = [item.size for item in self.header.items if item.size]
        if sizes != [memoryview(buffer).nbytes for buffer in frame.body]:
            raise SessionLost("the buffers of a transfer in a journal do not have the sizes of its items")
        buffers = iter(frame.body)
        return [(item, memoryview(next(buffers)) if item.size else memoryview(b"")) for item in self.header.items]


class TransfersAcknowledged(msgspec.Struct, frozen=True):
    """Number of transfers that executor `peer` has acknowledged, so that a replay need not send them."""

    peer: int
    transfers: int


class PoolCounts(msgspec.Struct, frozen=True):
    """Numbers of transfers of a session in a pool at a snapshot.

    Attributes:
        number: number of this executor in the pool.
        sent: transfers sent, by executor.
        taken: transfers that the executor has acknowledged, by executor.
        arrived: transfers received, by executor.
    """

    number: int = 0
    sent: dict[int, int] = {}
    taken: dict[int, int] = {}
    arrived: dict[int, int] = {}


# Created at import: msgspec crashes if two threads let it inspect a class for the first time at the same time.
encode: Final = msgspec.msgpack.Encoder().encode
headers: Final = msgspec.msgpack.Decoder(JournalHeader)
identities: Final = msgspec.msgpack.Decoder(SessionIdentity)
snapshot_headers: Final = msgspec.msgpack.Decoder(SnapshotHeader)
blob_frames: Final = msgspec.msgpack.Decoder(BlobFrame)
stops: Final = msgspec.msgpack.Decoder(StoppedAt)
transfers: Final = msgspec.msgpack.Decoder(LoggedTransfer)
acknowledgements: Final = msgspec.msgpack.Decoder(TransfersAcknowledged)


def encode_header(owner: SessionIdentity) -> bytes:
    """Encode the first record of a new journal."""
    return encode(JournalHeader(present_versions(), encode(owner)))


def read_header(data: bytes) -> SessionIdentity:
    """Decode the first record of a journal, and return the identity of its session.

    Raises:
        SessionLost: the journal has other versions than this process.
        MsgspecError: the record is malformed.
    """
    header = headers.decode(data)
    check_versions(header.versions)
    return identities.decode(header.owner)
