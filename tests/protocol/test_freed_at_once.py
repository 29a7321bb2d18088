"""A closed connection frees what it holds at once, by reference counts: the garbage collector is off in these tests."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits, Transport
from djinn_core.protocol.net.sockets import SocketConnection
from djinn_core.wire.frames import FrameDecoder
from djinn_http import HttpTransport
from djinn_server.malloc_trim import MemoryTrimmer
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.usage_metrics import UsageMetrics
from djinn_tcp import TcpTransport

SECONDS = 120.0


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def wait_until_freed(found: list[weakref.ref[object]], count: int) -> bool:
    """Return True if `count` objects were made and all are freed within the time limit."""
    deadline = time.monotonic() + SECONDS
    while (len(found) < count or any(one() is not None for one in found)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(found) == count and all(one() is None for one in found)


@pytest.mark.parametrize("rude", [False, True])
@pytest.mark.parametrize("transport", [TcpTransport(), HttpTransport()])
def test_connections_are_freed_at_close(transport: Transport, rude: bool) -> None:
    accepted: list[weakref.ref[object]] = []

    def accept(connection: Connection) -> None:
        accepted.append(weakref.ref(connection))
        with contextlib.suppress(DjinnError):
            while True:
                connection.send(connection.receive())

    listener = transport.listen(f"{transport.schemes[0]}://127.0.0.1:0", Limits(), accept)
    with contextlib.closing(listener):
        for _ in range(3):
            client = transport.connect(listener.url, Limits(head=8 << 20), SECONDS)
            client.send(Frame(b"hello", [bytes(100_000)]))
            if not rude:
                client.receive(SECONDS)
            client.send(Frame(bytes(2 << 20 if rude else 5)))
            client.close()
        assert wait_until_freed(accepted, 3)


def test_decoders_are_freed_after_error() -> None:
    decoder = FrameDecoder(Limits())
    with contextlib.suppress(ProtocolError):
        decoder.feed(b"no frame at all" * 9)
    with contextlib.suppress(ProtocolError):
        decoder.buffer()
    found = weakref.ref(decoder)
    del decoder
    assert found() is None


def test_sessions_are_freed_after_lease() -> None:
    ours, theirs = socket.socketpair()
    session = LeasedConnection(SocketConnection(theirs, Limits(), "a client"), 0.05, UsageMetrics())
    ours.close()
    with contextlib.suppress(TransportError):
        session.send(Frame(b"a reply"))
    session.close()
    found = weakref.ref(session)
    del session
    assert found() is None


def test_self_reference_is_freed_with_thread() -> None:
    thread = threading.local()
    thread.itself = thread
    found = weakref.ref(thread)
    del thread
    assert found() is not None
    MemoryTrimmer(0.0).soon()
    assert wait_until_freed([found], 1)
