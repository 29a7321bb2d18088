"""Options and statistics of sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import time
from typing import Final

if sys.platform == "linux":
    import fcntl
    import termios

PARTS: Final = 1024  # of a message in one call of the kernel: IOV_MAX of Linux and macOS
LONGEST_PATH: Final = 107 if sys.platform == "linux" else 103  # bytes of the path of a Unix socket
# After how many seconds without a word the kernel asks a peer, how often, and how many times. The first has two names.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
_TCP_CLOSE: Final = 7  # of the states of Linux' `struct tcp_info`
# Of Linux' `struct tcp_info`: segments that were not acknowledged, and milliseconds since the last acknowledgement.
_LINUX: Final = struct.Struct("=24xI28xI")
# Of macOS' `struct tcp_connection_info`: the window for sending, bytes that were not acknowledged, and packets that were received.
_MACOS: Final = struct.Struct("=28xII44xQ")
_MACOS_OPTION: Final[int] = (
    0x106 if sys.platform == "darwin" else 0
)  # TCP_CONNECTION_INFO, which Python has no name for


# Of Linux' `struct tcp_info`: microseconds of the shortest round trip of late, and bytes a second that were delivered.
_LINUX_LINK: Final = struct.Struct("=148xI8xQ")


def link_figures(sock: socket.socket) -> tuple[float, float]:
    """Seconds of the shortest round trip of late, and bytes a second that were delivered lately, of a TCP connection; 0: the system does not tell.

    Raises:
        OSError: the socket is closed, or is no TCP socket.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family == socket.AF_UNIX:
        return 0.0, 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, option, _LINUX_LINK.size)
    if len(info) < _LINUX_LINK.size:
        return 0.0, 0.0
    microseconds, rate = _LINUX_LINK.unpack_from(info)
    return microseconds / 1e6, float(rate)


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that were sent and that the machine at the other end of a TCP connection, shut down for sending, has not acknowledged.

    0 where the connection is broken, and where the system does not tell: there is nothing to wait for.

    Raises:
        OSError: the socket is closed.
    """
    if sys.platform == "linux":
        if sock.family != socket.AF_UNIX and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE:
            (left,) = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
            return max(0, int(left) - 1)  # the end of the stream is counted, too
    return 0


def hung_up(sock: socket.socket) -> bool:
    """True if the other end of a connected socket sends nothing more, or the socket is closed. Reads nothing, waits for nothing."""
    number = sock.fileno()
    if number < 0:
        return True
    poll = select.poll()
    # macOS, which has no name for it, says POLLHUP for half a connection, too.
    poll.register(number, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask whether the peer is there where nothing is under way; it is given up after a minute without an answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def widen(sock: socket.socket, size: int) -> None:
    """Ask for buffers of `size` bytes. Linux gives what it may, macOS refuses what is more than it may: then half of it."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        wanted = size
        while wanted >= 1 << 16:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, wanted)
                break
            wanted //= 2


class PeerSilence:
    """Time since the machine at the other end of one connection has acknowledged anything of what was sent to it.

    Linux tells it. macOS tells how many packets came, and this remembers since when no more did. A peer that does not read closes its
    window, and is asked less often the longer it does: it is never silent there. Elsewhere there is only keep-alive.
    """

    def __init__(self) -> None:
        self._packets = -1
        self._since = 0.0

    def seconds(self, sock: socket.socket) -> float:
        """Seconds of silence; 0: nothing is under way, or the system does not tell.

        Raises:
            OSError: the socket is closed.
        """
        if (option := getattr(socket, "TCP_INFO", None)) is not None:
            return self.on_linux(sock.getsockopt(socket.IPPROTO_TCP, option, _LINUX.size))
        if _MACOS_OPTION:
            return self.on_macos(sock.getsockopt(socket.IPPROTO_TCP, _MACOS_OPTION, _MACOS.size), time.monotonic())
        return 0.0

    @staticmethod
    def on_linux(info: bytes) -> float:
        """By a `struct tcp_info`."""
        if len(info) < _LINUX.size:
            return 0.0
        unacknowledged, milliseconds = _LINUX.unpack_from(info)
        return float(milliseconds / 1e3) if unacknowledged else 0.0

    def on_macos(self, info: bytes, now: float) -> float:
        """By a `struct tcp_connection_info` that was read `now`."""
        if len(info) < _MACOS.size:
            return 0.0
        window, unacknowledged, packets = _MACOS.unpack_from(info)
        if packets != self._packets or not unacknowledged or not window:
            self._packets, self._since = packets, now
        return now - self._since
