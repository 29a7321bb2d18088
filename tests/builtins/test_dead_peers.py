"""A machine that is gone is noticed where something was sent to it; one that only does not read is not."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from djinn_core.builtins import sockets
from djinn_core.builtins.sockets import SocketConnection
from djinn_core.builtins.tcp_keepalive import SILENT_SECONDS, peer_monitor, silence, tcp_info
from djinn_core.errors import TransportError
from djinn_core.wire.frames import Frame, Limits


@pytest.fixture
def connected():
    """Two ends of a TCP connection, of which one is the kernel's alone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    connection = SocketConnection(mine, Limits(), "the other machine")
    yield connection, theirs
    connection.close()
    theirs.close()


def info(unacknowledged, seconds):
    return struct.pack("=24xI28xI", unacknowledged, int(seconds * 1000))


def test_whoever_does_not_read_is_not_silent(connected):
    connection, _ = connected
    assert connection in peer_monitor
    connection._socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection._socket.send(bytes(1 << 20))
    assert len(tcp_info(connection._socket)) == 60
    assert silence(tcp_info(connection._socket)) < 5
    connection.notice_silence()
    assert not connection._ended


def test_what_the_kernel_says():
    assert silence(b"") == 0
    assert silence(info(0, 1000)) == 0
    assert silence(info(3, 1000)) == 1000


def test_a_machine_that_acknowledges_nothing_is_gone(connected, monkeypatch):
    connection, _ = connected
    monkeypatch.setattr(sockets, "tcp_info", lambda _: info(1, SILENT_SECONDS - 1))
    connection.notice_silence()
    connection.send(Frame(b"still there"))
    monkeypatch.setattr(sockets, "tcp_info", lambda _: info(1, SILENT_SECONDS + 1))
    connection.notice_silence()
    with pytest.raises(TransportError, match="acknowledged nothing for 61 s"):
        connection.send(Frame(b"gone"))


def test_a_closed_connection_is_left_alone(connected):
    connection, _ = connected
    connection.close()
    connection.notice_silence()
