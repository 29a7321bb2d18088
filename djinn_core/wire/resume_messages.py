"""Messages of session resumption: a client returns to its session over a new connection."""

from djinn_core.wire.message_base import Count, GroupName, Message, Name, Ticket


class Resume(Message, frozen=True):
    """First message to an executor in place of `Attach`: go on with a session that lost its connection.

    `secret` was told in `Attached`; `received` is how many frames of the executor's this end has received (see `frame_order`).
    """

    session: Name
    secret: Ticket
    received: Count


class Resumed(Message, frozen=True):
    """The executor's reply: how many frames of the client's it has received. What follows is numbered again.

    `instance`: of the process, as in `Attached`. Where it is another one, the session was recovered, and other executors have
    to be told.
    """

    received: Count
    instance: Name = ""


class ParallelAttach(Message, frozen=True):
    """First message on a connection parallel to that of a session: large buffers are to travel over it, too.

    `secret` as in `Resume`; `group`: under which a striped frame on the session's connection will name it, together with others.
    Answered with a `Resumed` that resumes nothing; then come pieces alone (see `striping`).
    """

    session: Name
    secret: Ticket
    group: GroupName


class ControlAttach(Message, frozen=True):
    """First message on a connection beside that of a session: tell the session about other executors, whatever it is just doing.

    `secret` as in `Resume`. Answered with a `Resumed` that resumes nothing; then come `PeerTicketRequest` and `ConnectPeer` messages.
    """

    session: Name
    secret: Ticket
