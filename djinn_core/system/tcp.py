"""Options and statistics of sockets."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_TURN_SECONDS: Final = 0.1  # of a wait that no signal ends
_JOIN_BYTES: Final = 1 << 16
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
    if option is None or sock.family not in _INTERNET:
        return 0.0, 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, option, _LINUX_LINK.size)
    if len(info) < _LINUX_LINK.size:
        return 0.0, 0.0
    microseconds, rate = _LINUX_LINK.unpack_from(info)
    return microseconds / 1e6, float(rate)


def address_is_gone(sock: socket.socket) -> bool:
    """Return True if no interface of this machine has the socket's own address any more, as after a change of networks."""
    if sock.family not in _INTERNET:
        return False
    try:
        host, _, *scope = sock.getsockname()
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0, *scope))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that were sent and that the machine at the other end of a TCP connection, shut down for sending, has not acknowledged.

    0 where the connection is broken, and where the system does not tell: there is nothing to wait for.

    Raises:
        OSError: the socket is closed.
    """
    if sys.platform == "linux":
        if sock.family in _INTERNET and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE:
            (left,) = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
            return max(0, int(left) - 1)  # the end of the stream is counted, too
    return 0


class Poll(Protocol):
    """Waits until one of its sockets can be read or has been closed at the other end, as `select.poll`."""

    def register(self, sock: Any, events: int, /) -> object:
        """Wait for a socket or descriptor, too."""

    def unregister(self, sock: Any, /) -> object:
        """Wait for it no more."""

    def poll(self, timeout: float | None = None, /) -> Sequence[object]:
        """The sockets that can be read, at once or after a wait of at most `timeout` milliseconds; None: without end."""


class _Select:
    """`Poll` by `select`, for Windows, where no signal ends a wait: it is divided."""

    def __init__(self) -> None:
        self._sockets: set[int] = set()

    def register(self, sock: Any, events: int, /) -> None:
        del events
        self._sockets.add(_descriptor(sock))

    def unregister(self, sock: Any, /) -> None:
        self._sockets.remove(_descriptor(sock))

    def poll(self, timeout: float | None = None, /) -> Sequence[object]:
        end = None if timeout is None else time.monotonic() + timeout / 1000
        while True:
            left = _TURN_SECONDS if end is None else max(0.0, min(_TURN_SECONDS, end - time.monotonic()))
            if (found := select.select(self._sockets, (), (), left)[0]) or (
                end is not None and time.monotonic() >= end
            ):
                return found


def _descriptor(sock: Any) -> int:
    return sock if isinstance(sock, int) else sock.fileno()


if sys.platform == "win32":
    READABLE: Final = 1  # no more than a mark
    DONTWAIT: Final = 0  # sockets never wait there

    def poller() -> Poll:
        """A `Poll` without sockets."""
        return _Select()

    def wait_in_kernel(sock: Any, reading: float, writing: float) -> None:
        """As below. A socket of Windows whose read was given up may not be used any more: reads return at once there."""
        del reading, writing
        sock.setblocking(False)

    def wait_writable(sock: Any) -> None:
        """After a write that raised `BlockingIOError`: wait a moment until one may succeed, where it did not wait itself."""
        select.select((), (sock,), (), _TURN_SECONDS)

    def gathering(sock: Any) -> Callable[[Sequence[Buffer]], int]:
        """As below: Windows has no such call, and small buffers are joined."""
        return getattr(sock, "sendmsg", None) or partial(_send_joined, sock)

    def send_now(sock: Any, buffers: Sequence[Buffer]) -> int:
        """As below."""
        return gathering(sock)(buffers)

    def hung_up(sock: socket.socket) -> bool:
        """As below: what Windows tells without a read is if the socket is closed at this end."""
        return sock.fileno() < 0

    def unix_socket() -> socket.socket:
        """Raises `OSError`: Python has none on Windows."""
        raise OSError("Python has no Unix sockets on this system")

else:
    READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR
    DONTWAIT: Final = socket.MSG_DONTWAIT

    poller: Callable[[], Poll] = select.poll

    def wait_in_kernel(sock: Any, reading: float, writing: float) -> None:
        """Have reads and writes raise `BlockingIOError` where nothing came, or could be sent, in so many seconds."""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(reading))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(writing))

    def wait_writable(sock: Any) -> None:
        """After a write that raised `BlockingIOError`: it has waited itself."""

    def gathering(sock: Any) -> Callable[[Sequence[Buffer]], int]:
        """A function that sends the first bytes of several buffers, and gives their number."""
        return sock.sendmsg  # type: ignore[no-any-return]

    def send_now(sock: Any, buffers: Sequence[Buffer]) -> int:
        """Send the first bytes of several buffers without a wait; their number. Raises `BlockingIOError` where none can be sent."""
        return sock.sendmsg(buffers, (), DONTWAIT)  # type: ignore[no-any-return]

    def hung_up(sock: socket.socket) -> bool:
        """True if the other end of a connected socket sends nothing more, or the socket is closed. Reads nothing, waits for nothing."""
        number = sock.fileno()
        if number < 0:
            return True
        poll = select.poll()
        # macOS, which has no name for it, says POLLHUP for half a connection, too.
        poll.register(number, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def unix_socket() -> socket.socket:
        """A Unix socket for a stream of bytes."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _send_joined(sock: socket.socket, buffers: Sequence[Buffer]) -> int:
    """Send the first buffers in one call: a large one as it is, small ones as one."""
    first = memoryview(buffers[0])
    if len(first) >= _JOIN_BYTES:
        return sock.send(first)
    joined = bytearray()
    for buffer in buffers:
        joined += memoryview(buffer)[: _JOIN_BYTES - len(joined)]
        if len(joined) >= _JOIN_BYTES:
            break
    return sock.send(joined)


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


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
