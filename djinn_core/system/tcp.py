"""Socket options and TCP statistics."""

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

PARTS: Final = 1024  # buffers per system call: IOV_MAX of Linux and macOS
MAX_PATH_BYTES: Final = 107 if sys.platform == "linux" else 103  # bytes of the path of a Unix socket
# Keep-alive: idle seconds before the first probe, seconds between probes, and number of probes. The first option has
# two names.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
_TCP_CLOSE: Final = 7  # state in Linux' `struct tcp_info`
# In Linux' `struct tcp_info`: unacknowledged segments, and milliseconds since the last acknowledgement.
_LINUX: Final = struct.Struct("=24xI28xI")
# In macOS' `struct tcp_connection_info`: send window, unacknowledged bytes, and received packets.
_MACOS: Final = struct.Struct("=28xII44xQ")
_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_TURN_SECONDS: Final = 0.1  # seconds of a wait that no signal can end
_JOIN_BYTES: Final = 1 << 16
_MACOS_OPTION: Final[int] = (
    0x106 if sys.platform == "darwin" else 0
)  # TCP_CONNECTION_INFO, which Python does not define


# In Linux' `struct tcp_info`: microseconds of the recent minimum round trip, and delivered bytes per second.
_LINUX_LINK: Final = struct.Struct("=148xI8xQ")


def link_figures(sock: socket.socket) -> tuple[float, float]:
    """Return the recent minimum round trip in seconds, and the delivery rate in bytes per second, of a TCP connection.

    A number is 0 if the system does not report it.

    Raises:
        OSError: the socket is closed, or not a TCP socket.
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
    """Return True if no interface of this machine has the socket's own address any more, as after a network change."""
    if sock.family not in _INTERNET:
        return False
    try:
        host, _, *scope = sock.getsockname()
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0, *scope))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the number of unacknowledged bytes of a TCP connection that is shut down for sending.

    Return 0 if the connection is broken or the system does not report it: there is nothing to wait for.

    Raises:
        OSError: the socket is closed.
    """
    if sys.platform == "linux":
        if sock.family in _INTERNET and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE:
            (unsent_bytes,) = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
            return max(0, int(unsent_bytes) - 1)  # the FIN is counted, too
    return 0


class Poll(Protocol):
    """Wait until a registered socket is readable or closed by the other end, like `select.poll`."""

    def register(self, sock: Any, events: int, /) -> object:
        """Add a socket or descriptor."""

    def unregister(self, sock: Any, /) -> object:
        """Remove a socket or descriptor."""

    def poll(self, timeout: float | None = None, /) -> Sequence[object]:
        """Return the readable sockets. Wait at most `timeout` milliseconds, or forever if it is None."""


class _Select:
    """`Poll` implemented by `select`, for Windows. No signal ends a wait on Windows, so waits are split."""

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
            seconds_left = _TURN_SECONDS if end is None else max(0.0, min(_TURN_SECONDS, end - time.monotonic()))
            if (ready := select.select(self._sockets, (), (), seconds_left)[0]) or (
                end is not None and time.monotonic() >= end
            ):
                return ready


def _descriptor(sock: Any) -> int:
    return sock if isinstance(sock, int) else sock.fileno()


if sys.platform == "win32":
    READABLE: Final = 1  # a flag for `register`
    DONTWAIT: Final = 0  # sockets never wait in the kernel on Windows

    def poller() -> Poll:
        """Return a `Poll` without sockets."""
        return _Select()

    def wait_in_kernel(sock: Any, reading: float, writing: float) -> None:
        """Do nothing.

        After an aborted read, a Windows socket cannot be used any more, so reads return at once on Windows.
        """
        del reading, writing
        sock.setblocking(False)

    def wait_writable(sock: Any) -> None:
        """Wait briefly after a write raised `BlockingIOError`, because the write itself did not wait."""
        select.select((), (sock,), (), _TURN_SECONDS)

    def gathering_send(sock: Any) -> Callable[[Sequence[Buffer]], int]:
        """Return a function that joins small buffers, because Windows has no gathering write."""
        return getattr(sock, "sendmsg", None) or partial(_send_joined, sock)

    def send_now(sock: Any, buffers: Sequence[Buffer]) -> int:
        """Send the first bytes of several buffers without a wait. Return their number."""
        return gathering_send(sock)(buffers)

    def hung_up(sock: socket.socket) -> bool:
        """Return True if the socket is closed at this end. Windows reports nothing else without a read."""
        return sock.fileno() < 0

    def unix_socket() -> socket.socket:
        """Raise `OSError`: Python has no Unix sockets on Windows."""
        raise OSError("Python has no Unix sockets on this system")

else:
    READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR
    DONTWAIT: Final = socket.MSG_DONTWAIT

    poller: Callable[[], Poll] = select.poll

    def wait_in_kernel(sock: Any, reading: float, writing: float) -> None:
        """Have reads and writes wait this many seconds in the kernel before they raise `BlockingIOError`."""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(reading))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(writing))

    def wait_writable(sock: Any) -> None:
        """Do nothing: the write that raised `BlockingIOError` has waited itself."""

    def gathering_send(sock: Any) -> Callable[[Sequence[Buffer]], int]:
        """Return a function that sends the first bytes of several buffers, and returns their number."""
        return sock.sendmsg  # type: ignore[no-any-return]

    def send_now(sock: Any, buffers: Sequence[Buffer]) -> int:
        """Send the first bytes of several buffers without a wait.

        Return their number. Raise `BlockingIOError` if none can be sent.
        """
        return sock.sendmsg(buffers, (), DONTWAIT)  # type: ignore[no-any-return]

    def hung_up(sock: socket.socket) -> bool:
        """Return True if the other end has stopped sending, or the socket is closed. Does not read or wait."""
        number = sock.fileno()
        if number < 0:
            return True
        poll = select.poll()
        # macOS reports POLLHUP for a half-closed connection, too, and has no name for the exact flag.
        poll.register(number, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def unix_socket() -> socket.socket:
        """Return a Unix stream socket."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _send_joined(sock: socket.socket, buffers: Sequence[Buffer]) -> int:
    """Send the first buffers in a single call: a large buffer unchanged, small buffers joined."""
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
    """Enable keep-alive probes on an idle connection. The kernel gives up after a minute without an answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def set_buffer_sizes(sock: socket.socket, size: int) -> None:
    """Request socket buffers of `size` bytes.

    Linux caps the size. macOS refuses sizes above its limit, so halve the size until it accepts.
    """
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        new_size = size
        while new_size >= 1 << 16:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, new_size)
                break
            new_size //= 2


class PeerSilence:
    """Time since the other machine last acknowledged sent data.

    Linux reports it. macOS reports the number of received packets, so this class remembers when the number last
    changed. A peer that does not read closes its window, and macOS then probes it ever less often. So such a peer does
    not count as silent on macOS. Other systems have only keep-alive.
    """

    def __init__(self) -> None:
        self._packets = -1
        self._since = 0.0

    def seconds(self, sock: socket.socket) -> float:
        """Return the seconds of silence, or 0 if all data is acknowledged or the system does not report it.

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
        """Return the silence in seconds from a `struct tcp_info`."""
        if len(info) < _LINUX.size:
            return 0.0
        unacknowledged, milliseconds = _LINUX.unpack_from(info)
        return float(milliseconds / 1e3) if unacknowledged else 0.0

    def on_macos(self, info: bytes, now: float) -> float:
        """Return the silence in seconds from a `struct tcp_connection_info` that was read at `now`."""
        if len(info) < _MACOS.size:
            return 0.0
        window, unacknowledged, packets = _MACOS.unpack_from(info)
        if packets != self._packets or not unacknowledged or not window:
            self._packets, self._since = packets, now
        return now - self._since
