"""What a client says that comes back to its session over another connection."""

from __future__ import annotations

from djinn_core.wire.message import Count, Message, Name, Secret


class Resume(Message, frozen=True):
    """First message to an executor in place of `Attach`: go on with a session that lost its connection.

    `secret` was told in `Attached`; `taken` is how many frames of the executor's this end has taken (see `numbering`).
    """

    session: Name
    secret: Secret
    taken: Count


class Resumed(Message, frozen=True):
    """The executor's answer: how many frames of the client's it has taken. What follows is numbered again."""

    taken: Count
