"""A machine that is gone is noticed where something was sent to it; one that only does not read is not."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from djinn_core.errors import TransportError
from djinn_core.protocol.net import sockets
from djinn_core.protocol.net.sockets import SocketConnection
from djinn_core.protocol.net.tcp_keepalive import SILENT_SECONDS, peer_monitor
from djinn_core.system import tcp
from djinn_core.system.tcp import PeerSilence
from djinn_core.wire.frames import Frame, Limits


@pytest.fixture
def tcp_pair():
    """Yield a socket connection and the raw socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    connection = SocketConnection(mine, Limits(), "the other machine")
    yield connection, theirs
    connection.close()
    theirs.close()


def info(unacknowledged, seconds):
    return struct.pack("=24xI28xI", unacknowledged, int(seconds * 1000))


def macos_info(window, unacknowledged, packets):
    """Return the bytes of macOS's `tcp_connection_info`, which has 112 bytes."""
    states, numbers = (0, 0, 0, 0), (0,) * 6
    after = (0,) * 5  # the window for receiving, times, and what was said about fast opening
    return struct.pack("=4B6I2I5I7Q", *states, *numbers, window, unacknowledged, *after, 0, 0, 0, packets, 0, 0, 0)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="of Linux")
def test_peer_that_does_not_read_is_not_silent(tcp_pair):
    connection, _ = tcp_pair
    assert connection in peer_monitor
    connection._socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection._socket.send(bytes(1 << 20))
    assert PeerSilence().seconds(connection._socket) < 5
    connection.notice_silence()
    assert not connection._end_reason


def test_silence_from_linux_tcp_info():
    assert PeerSilence.on_linux(b"") == 0
    assert PeerSilence.on_linux(info(0, 1000)) == 0
    assert PeerSilence.on_linux(info(3, 1000)) == 1000


def test_silence_from_macos_tcp_info():
    """macOS counts received packets. Djinn measures for how long the count stays equal while data is under way."""
    silence = PeerSilence()
    assert silence.on_macos(b"", 1.0) == 0
    assert len(macos_info(1, 1, 1)) == 112
    assert silence.on_macos(macos_info(500, 100, packets=7), 10.0) == 0
    assert silence.on_macos(macos_info(500, 100, packets=7), 50.0) == 40
    assert silence.on_macos(macos_info(500, 300, packets=7), 80.0) == 70
    assert silence.on_macos(macos_info(500, 300, packets=8), 90.0) == 0, "an acknowledgement came"
    assert silence.on_macos(macos_info(500, 0, packets=8), 180.0) == 0, "nothing is under way"
    assert silence.on_macos(macos_info(500, 1, packets=8), 190.0) == 10
    assert silence.on_macos(macos_info(0, 1, packets=8), 300.0) == 0, "it does not read, and is asked seldom"


def test_silence_without_tcp_info(tcp_pair, monkeypatch):
    connection, _ = tcp_pair
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    monkeypatch.setattr(tcp, "_MACOS_OPTION", 0)
    assert PeerSilence().seconds(connection._socket) == 0
    connection.notice_silence()
    assert not connection._end_reason


def test_unacknowledged_data_ends_connection(tcp_pair, monkeypatch):
    connection, _ = tcp_pair
    monkeypatch.setattr(PeerSilence, "seconds", lambda *_: SILENT_SECONDS - 1)
    connection.notice_silence()
    connection.send(Frame(b"still there"))
    monkeypatch.setattr(PeerSilence, "seconds", lambda *_: SILENT_SECONDS + 1)
    connection.notice_silence()
    with pytest.raises(TransportError, match="acknowledged nothing for 61 s"):
        connection.send(Frame(b"gone"))


@pytest.mark.parametrize(("address", "gone"), [("127.0.0.1", False), ("192.0.2.1", True)])
def test_address_without_interface_is_gone(address, gone):
    class MovedSocket:
        family = socket.AF_INET

        def getsockname(self):
            return address, 5555

    assert tcp.address_is_gone(MovedSocket()) is gone


def test_connection_ends_when_this_machine_loses_its_address(tcp_pair, monkeypatch):
    connection, _ = tcp_pair
    connection.notice_silence()
    connection.send(Frame(b"still there"))
    monkeypatch.setattr(sockets, "address_is_gone", lambda _: True)
    connection.notice_silence()
    with pytest.raises(TransportError, match="lost the address of the connection"):
        connection.send(Frame(b"gone"))


def test_refused_buffer_size_is_reduced():
    """macOS refuses a buffer size that is too large, and Linux reduces it."""

    class SmallBufferSocket:
        def __init__(self):
            self.given = {}

        def setsockopt(self, level, option, value):
            if value > 1 << 18:
                raise OSError("no buffer space available")
            self.given[option] = value

    sock = SmallBufferSocket()
    tcp.set_buffer_sizes(sock, 1 << 22)
    assert sock.given == {socket.SO_SNDBUF: 1 << 18, socket.SO_RCVBUF: 1 << 18}


def test_closed_connection_is_not_monitored(tcp_pair):
    connection, _ = tcp_pair
    connection.close()
    connection.notice_silence()
