"""Counts bytes where an asyncio protocol meets its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class CountingTransport:
    """An asyncio transport that counts what is written to it; everything else is the wrapped one's.

    Attributes:
        sent, received: bytes that nobody has asked for yet, see `take`.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.sent = 0
        self.received = 0
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

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


class CountingProtocol(asyncio.Protocol):
    """Passes everything on to `inner`, which gets a `CountingTransport`."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._transport: CountingTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        self._transport = CountingTransport(transport)  # type: ignore[arg-type]
        self._inner.connection_made(self._transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        if self._transport is not None:
            self._transport.received += len(data)
        self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """As `asyncio.Protocol`."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """As `asyncio.Protocol`."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """As `asyncio.Protocol`."""
        self._inner.resume_writing()
