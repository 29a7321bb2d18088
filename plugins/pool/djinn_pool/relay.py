"""Transfers between executors through the client, and executors' reports about links and memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from djinn_client.runtime.executor_client import ExecutorClient
from djinn_client.runtime.receiving.replies import Replies
from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Room, encode
from djinn_core.wire.peer_messages import LinkMeasurement, SendValues, TransferChunk, TransferHeader


class Relay:
    """Receives transfers, link reports and memory reports from one executor.

    Attributes:
        has_news: True if a report has arrived that `take_seen` or `take_room` has not returned.
    """

    def __init__(self, session: ExecutorClient) -> None:
        self._session = session
        self.has_news = False
        self._measurements: list[LinkMeasurement] = []
        self._room: Room | None = None
        self._frames: list[Frame] = []
        self._missing = 0
        session.replies.on_link_measurements = self._add_measurements
        session.replies.on_headroom = self._set_room
        for kind in (TransferHeader, TransferChunk):
            session.replies.handle(kind, self._add_frame)

    def send(self, message: Message) -> None:
        """Send the executor a message between submissions. The caller holds the sink's lock."""
        self._session.replies.send(message)

    def take_over(self, ship: SendValues) -> list[Frame]:
        """Request a transfer to this process, and return its frames for another executor. The caller holds the sink's lock.

        `ship`: the request, with this process as the peer.

        Raises:
            SessionLost: the executor was lost.
        """
        self._session.replies.send_and_await(ship, self._is_complete)
        frames, self._frames = self._frames, []
        return frames

    def take_seen(self) -> list[LinkMeasurement]:
        """Return the link measurements since the last call."""
        links, self._measurements = self._measurements, []
        self.has_news = self._room is not None
        return links

    def take_room(self) -> Room | None:
        """Return the executor's latest report of its memory, or None if no report has arrived since the last call."""
        room, self._room = self._room, None
        self.has_news = bool(self._measurements)
        return room

    def _set_room(self, room: Room) -> None:
        self._room = room
        self.has_news = True

    def _add_measurements(self, seen: Sequence[LinkMeasurement]) -> None:
        self._measurements.extend(seen)
        self.has_news = True

    def _is_complete(self) -> bool:
        return bool(self._frames) and not self._missing

    def _add_frame(self, message: TransferHeader | TransferChunk, body: Sequence[Buffer]) -> None:
        if isinstance(message, TransferHeader):
            self._missing = sum(item.size for item in message.items)
        else:
            self._missing -= sum(memoryview(buffer).nbytes for buffer in body)
        self._frames.append(Frame(encode(message), list(body)))


def look_after_each_other(sessions: Sequence[ExecutorClient]) -> None:
    """Make a thread that waits for one executor also check the connections of the other executors.

    An executor that waits for a value from a dead executor sends nothing. Only the dead executor's connection shows its end.
    """
    every = [session.replies for session in sessions]

    def poll_others(replies: Replies) -> None:
        for session in every:
            if session is not replies:
                session.poll()

    for replies in every:
        replies.while_waiting = partial(poll_others, replies)
