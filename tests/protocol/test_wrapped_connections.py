"""Connections over connections pass on what the inner one tells of itself: a default would hide it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from djinn_client.hookspecs.client_channel import PlainClientChannel
from djinn_client.runtime.connecting.reconnect import ResumingConnection
from djinn_core.hookspecs.session_channel import PlainChannel
from djinn_core.hookspecs.transports import NO_LINK, Connection, Frame, Limits, LinkFacts
from djinn_core.protocol.net.sockets import SocketConnection
from djinn_core.wire.frame_order import pack_prefix
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.usage_metrics import UsageMetrics

FACTS = [name for name, member in vars(Connection).items() if isinstance(member, property)]


class MinimalConnection(Connection):
    """A connection with abstract members only."""

    limits = Limits()

    def send(self, frame: Frame) -> None: ...

    def receive(self, timeout: float | None = None) -> Frame:
        raise TimeoutError

    def close(self) -> None: ...


class FullConnection(MinimalConnection):
    """A connection that sets each property."""

    bytes_sent, bytes_received, buffered_bytes = 1, 2, 3
    peer, certificate, link = "client x", b"der", LinkFacts(0.1, 2.0)


WRAPPERS: dict[str, Callable[[Connection], Connection]] = {
    "session": PlainChannel,
    "client": PlainClientChannel,
    "executor": PlainExecutorChannel,
    "leased": lambda inner: LeasedConnection(inner, 1.0, UsageMetrics()),
    "resuming": lambda inner: ResumingConnection(inner, None, 1.0, "server"),  # type: ignore[arg-type]
}


def test_connection_properties_have_defaults() -> None:
    silent = MinimalConnection()
    assert {name: getattr(silent, name) for name in FACTS} == {
        "bytes_sent": 0,
        "bytes_received": 0,
        "buffered_bytes": 0,
        "peer": "",
        "certificate": b"",
        "link": NO_LINK,
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapper_forwards_properties_of_inner_connection(wrapper: str) -> None:
    inner = FullConnection()
    outer = WRAPPERS[wrapper](inner)
    assert {name: getattr(outer, name) for name in FACTS} == {name: getattr(inner, name) for name in FACTS}


def test_sockets_override_default_properties() -> None:
    here, there = socket.socketpair()
    with there:
        connection = SocketConnection(here, Limits(), "server x")
        connection.send(Frame(b"head"))
        assert connection.peer == "server x"
        assert connection.bytes_sent > 0
        connection.close()


def test_leased_connection_places_bodies_on_each_connection() -> None:
    class PlacingConnection(MinimalConnection):
        def place_bodies(self, place: Callable[[bytes, int], memoryview | None]) -> None:
            self.place = place

    first, second, resumed, memory = (
        PlacingConnection(),
        PlacingConnection(),
        threading.Event(),
        memoryview(bytearray(3)),
    )
    leased = LeasedConnection(first, 1.0, UsageMetrics())
    leased.place_bodies(lambda head, nbytes: memory if (head, nbytes) == (b"head", 3) else None)
    thread = threading.Thread(target=leased.resume, args=(second, 0, resumed.set))
    thread.start()
    assert resumed.wait(30)
    for connection in (first, second):
        assert connection.place(pack_prefix(1, 0, 0) + b"head", 3) is memory
    leased.close()
    thread.join()
