"""Read and write lines over a pipe, with timeouts."""

from __future__ import annotations

import os
import selectors
import time

import attrs

from djinn_core.errors import StartupError

_CHUNK = 65536
MAX_LINE_BYTES = 64 << 20  # bytes, the limit of a frame's message


@attrs.define
class LineReader:
    """Reads lines from a file descriptor with timeouts. Not thread-safe."""

    descriptor: int
    _buffer: bytearray = attrs.field(factory=bytearray, init=False)
    _searched: int = attrs.field(default=0, init=False)  # searched bytes of the buffer
    _is_at_end: bool = attrs.field(default=False, init=False)

    def read_line(self, timeout: float | None = None) -> bytes | None:
        """Return the next line without its end, or None at the end of the stream. An incomplete last line is dropped.

        Raises:
            TimeoutError: no whole line arrived within `timeout` seconds. The next call continues with the received part.
            StartupError: the other process sent a line longer than `MAX_LINE_BYTES`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (line := self.next_line()) is None and not self._is_at_end:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not _readable(self.descriptor, remaining):
                raise TimeoutError
            self.fill()
        return line

    def next_line(self) -> bytes | None:
        """Return the next line in the buffer, or None if the buffer has no complete line."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        self._searched = 0
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def fill(self) -> bool:
        """Read the available bytes, at least one byte, into the buffer. Return False at the end of the stream.

        Raises:
            StartupError: the other process sent a line longer than `MAX_LINE_BYTES`.
        """
        if len(self._buffer) > MAX_LINE_BYTES:
            raise StartupError(
                f"the other process sent {len(self._buffer):,} bytes without a newline; the limit is {MAX_LINE_BYTES:,} bytes"
            )
        data = os.read(self.descriptor, _CHUNK)
        self._buffer += data
        self._is_at_end = not data
        return not self._is_at_end


def write_line(descriptor: int, line: bytes) -> None:
    """Write a whole line to a file descriptor.

    Raises:
        OSError: the other end of the pipe is closed.
    """
    view = memoryview(line)
    while view:
        view = view[os.write(descriptor, view) :]


def _readable(descriptor: int, timeout: float | None) -> bool:
    with selectors.DefaultSelector() as selector:  # unlike select(), without a limit on descriptor numbers
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(timeout))
