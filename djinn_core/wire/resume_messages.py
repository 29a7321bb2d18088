"""Messages of session resumption: a client returns to its session over a new connection."""

from djinn_core.wire.message_base import Count, GroupName, Message, Name, Ticket


class Resume(Message, frozen=True):
    """First message to an executor instead of `Attach`: resume a session after a broken connection.

    Attributes:
        secret: from `Attached`.
        received: number of frames that this end has received from the executor (see `frame_order`).
    """

    session: Name
    secret: Ticket
    received: Count


class Resumed(Message, frozen=True):
    """The executor's reply to `Resume`: the number of frames that it has received. Later frames are numbered.

    Attributes:
        instance: id of the process, as in `Attached`. If it has changed, the session was recovered, and other executors
            must be notified.
    """

    received: Count
    instance: Name = ""


class ParallelAttach(Message, frozen=True):
    """First message on a connection that is parallel to a session's connection. It will carry large buffers.

    The reply is a `Resumed` without effect; then only pieces follow (see `striping`).

    Attributes:
        secret: as in `Resume`.
        group: id of the group of parallel connections, which a striped frame on the session's connection names.
    """

    session: Name
    secret: Ticket
    group: GroupName


class ControlAttach(Message, frozen=True):
    """First message on a session's control connection, for messages about other executors while the session is busy.

    `secret` as in `Resume`. The reply is a `Resumed` without effect; then follow `PeerTicketRequest` and `ConnectPeer`
    messages.
    """

    session: Name
    secret: Ticket
