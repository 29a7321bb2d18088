"""A session's state that was asked for, while it comes."""

from __future__ import annotations

from djinn_core.runtime.standby.frame_log import SentFrames
from djinn_core.wire.frames import Frame
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Completed
from djinn_core.wire.state_messages import StateChunk, StateHeader, count_pieces


class SnapshotReceiver:
    """Takes the pieces of a state in, as frames that another executor can be sent.

    Attributes:
        frames: those that have come; None once the snapshot was dropped.
        reason: why there is none.
        disturbed: whether a frame came that answers no submission: the executor waits for something and must have it first.
    """

    def __init__(self, frames: SentFrames) -> None:
        self.frames: SentFrames | None = frames
        self.reason = ""
        self.disturbed = False
        self._left: int | None = None

    def take(self, frame: Frame, message: Message) -> bool:
        """Take a frame in, if it belongs to the state; whether it does.

        Raises:
            OSError: there is no room for it.
        """
        if isinstance(message, StateHeader):
            self._left, self.reason = count_pieces(message.lengths), message.reason
        elif isinstance(message, StateChunk) and self._left:
            self._left -= 1
        else:
            self.disturbed |= not isinstance(message, Completed)
            return False
        if self.frames is not None:
            self.frames.append(frame, 0)
        return True

    @property
    def over(self) -> bool:
        """True if the snapshot is complete."""
        return self._left == 0

    def drop(self) -> None:
        """Drop the snapshot: what still comes of it is thrown away."""
        if self.frames is not None:
            self.frames.close()
            self.frames = None
