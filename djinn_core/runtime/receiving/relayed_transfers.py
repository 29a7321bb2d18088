"""Transfers between executors that are relayed through the client, and the executors' link measurements."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.wire.messages import encode
from djinn_core.wire.peer_messages import LinkSeen, TransferChunk, TransferHeader


class Passing:
    """The frames of one shipment, as they come from an executor, and what it has seen of links."""

    def __init__(self) -> None:
        self.seen: list[LinkSeen] = []
        self._frames: list[Frame] = []
        self._missing = 0

    @property
    def complete(self) -> bool:
        """True if a shipment is complete."""
        return bool(self._frames) and not self._missing

    def take(self, message: TransferHeader | TransferChunk, body: Sequence[Buffer]) -> None:
        """The next frame."""
        if isinstance(message, TransferHeader):
            self._missing = sum(item.size for item in message.items)
        else:
            self._missing -= sum(memoryview(buffer).nbytes for buffer in body)
        self._frames.append(Frame(encode(message), list(body)))

    def take_seen(self) -> list[LinkSeen]:
        """Take the link measurements since the last call."""
        seen, self.seen = self.seen, []
        return seen

    def hand_over(self) -> list[Frame]:
        """All frames, once."""
        frames, self._frames = self._frames, []
        return frames
