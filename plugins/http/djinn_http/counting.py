"""Counts bytes where an asyncio protocol meets its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from djinn_http.pace import RequestTimeLimit

# What `get_extra_info` of a transport, or of one under TLS on top of it, gives the `CountingTransport` by.
COUNTING: Final = "djinn.counting"


class CountingTransport:
    """An asyncio transport that counts what is written to it; everything else is the wrapped one's.

    Attributes:
        sent, received: bytes that were not reported yet, see `take`.
        pace: how long the other end was waited for.
    """

    def __init__(self, transport: asyncio.Transport, pace: RequestTimeLimit) -> None:
        self.sent = 0
        self.received = 0
        self.pace = pace
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the wrapped transport's, and itself."""
        return self if name == COUNTING else self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """As the wrapped transport's."""
        self.sent += len(data)
        self._transport.write(data)

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """As the wrapped transport's."""
        listed = list(parts)
        self.sent += sum(map(len, listed))
        self._transport.writelines(listed)

    def take(self) -> tuple[int, int]:
        """Bytes sent and received since the last call."""
        counts = self.sent, self.received
        self.sent = self.received = 0
        return counts


Told = Callable[[CountingTransport], None]


class Counting(asyncio.BaseProtocol):
    """Passes everything on to `inner`, which gets a `CountingTransport`; `entered` and `left` are told of it."""

    def __init__(self, inner: Any, entered: Told, left: Told) -> None:
        self._inner = inner
        self._entered, self._left = entered, left
        self._transport: CountingTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        self._transport = CountingTransport(transport, RequestTimeLimit())  # type: ignore[arg-type]
        self._entered(self._transport)
        self._inner.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        if self._transport is not None:
            self._left(self._transport)
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """As `asyncio.Protocol`."""
        goes_on: bool | None = self._inner.eof_received()
        return goes_on

    def pause_writing(self) -> None:
        """As `asyncio.Protocol`."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """As `asyncio.Protocol`."""
        self._inner.resume_writing()

    def _count(self, count: int) -> None:
        if self._transport is not None:
            self._transport.received += count
            self._transport.pace.came(count)


class CountingProtocol(Counting, asyncio.Protocol):
    """In front of a protocol that is given bytes, such as HTTP."""

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        self._count(len(data))
        self._inner.data_received(data)


class CountingBufferedProtocol(Counting, asyncio.BufferedProtocol):
    """In front of a protocol that has a buffer of its own, such as TLS."""

    def get_buffer(self, sizehint: int) -> Any:
        """As `asyncio.BufferedProtocol`."""
        return self._inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """As `asyncio.BufferedProtocol`."""
        self._count(nbytes)
        self._inner.buffer_updated(nbytes)
