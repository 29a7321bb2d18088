"""`capture()`: record the ops of a block as a program, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from djinn_client.interception.recording.entry import SentEntries
from djinn_client.interception.recording.meta_substitution import MetaSubstitution
from djinn_client.interception.recording.recorder import current, freeze
from djinn_client.interception.tensors.lazy_tensor import logical_device
from djinn_client.interception.tensors.storage import still_to_free
from djinn_core.ir.program import Program


class Capture:
    """A capture that is under way or done."""

    def __init__(self, skip: int) -> None:
        self._skip = skip  # instructions that were recorded, and not yet sent, before the capture began
        self.sent = SentEntries()
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """The program recorded so far; fixed when the capture ends."""
        if self._program is not None:
            return self._program
        return freeze([*self.sent.entries, *current().entries][self._skip :], still_to_free())

    def finish(self) -> None:
        """Fix the program."""
        self._program = self.program


@contextmanager
def capturing() -> Iterator[Capture]:
    """Record the ops of this thread inside the block.

    Factories without a device argument make remote tensors. Nothing is sent unless the code inside needs a result; what
    was recorded runs later, when something outside needs it. What is computed from tensors on the meta device is recorded
    only.
    """
    recorder = current()
    capture, stand_ins = Capture(len(recorder.entries)), MetaSubstitution()
    recorder.captures.append(capture.sent)
    before, recorder.fixed = recorder.fixed, recorder.entries[-1] if recorder.entries else None
    try:
        with torch.device(logical_device(0)), stand_ins:
            yield capture
    finally:
        capture.finish()
        stand_ins.let_go()
        recorder.fixed = before
        recorder.captures = [c for c in recorder.captures if c is not capture.sent]


def is_capturing() -> bool:
    """True if this thread is inside `capture()`."""
    return bool(current().captures)
