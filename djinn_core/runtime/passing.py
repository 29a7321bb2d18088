"""Shipments that pass through the client, between executors that do not reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_core.hookspecs.transports import Buffer, Frame
from djinn_core.wire.messages import encode
from djinn_core.wire.peer_messages import Cargo, Parcel


class Passing:
    """The frames of one shipment, as they come from an executor."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._missing = 0

    @property
    def complete(self) -> bool:
        """Whether a shipment is here whole."""
        return bool(self._frames) and not self._missing

    def take(self, message: Cargo | Parcel, body: Sequence[Buffer]) -> None:
        """The next frame."""
        if isinstance(message, Cargo):
            self._missing = sum(item.size for item in message.items)
        else:
            self._missing -= sum(memoryview(buffer).nbytes for buffer in body)
        self._frames.append(Frame(encode(message), list(body)))

    def hand_over(self) -> list[Frame]:
        """All frames, once."""
        frames, self._frames = self._frames, []
        return frames
