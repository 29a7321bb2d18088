"""Frames over connected stream sockets, for all socket transports."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from djinn_core.errors import DjinnError, TransportError
from djinn_core.hookspecs.transports import NO_LINK, Connection, LinkFacts, Listener
from djinn_core.logs import get_logger
from djinn_core.protocol.net.striping import StripingConnection
from djinn_core.protocol.net.tcp_keepalive import SILENT_SECONDS, peer_monitor
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_core.system.interrupts import LOOK_SECONDS, interrupt_mask
from djinn_core.system.tcp import (
    DONTWAIT,
    PARTS,
    READABLE,
    PeerSilence,
    Poll,
    address_is_gone,
    gathering_send,
    hung_up,
    link_figures,
    poller,
    send_now,
    unacknowledged_bytes,
    wait_in_kernel,
    wait_writable,
)
from djinn_core.wire.frames import Buffer, Limits

_LISTEN_BACKLOG: Final = 128
# Limits in seconds and bytes for a server's reads after its last frame.
_LINGER_SECONDS: Final = 1.0
_LINGER_BYTES: Final = 64 << 20
# Seconds that a close waits for the other machine to acknowledge sent bytes.
_DELIVER_SECONDS: Final = 1.0
_DISCARD_BYTES: Final = 64 << 10
# Seconds that a read waits inside the kernel for bytes that will probably arrive soon, which saves a call of `poll`.
# Less than the shortest wait for a reply, so that such a wait takes one system call.
_READ_SECONDS: Final = 0.04
# Seconds that a write waits inside the kernel at a time if the other end does not read.
_WRITE_SECONDS: Final = LOOK_SECONDS
# Seconds for the rest of a frame after a signal handler of the program has raised an exception.
_FINISH_SECONDS: Final = 5.0

log = get_logger("djinn.transport")


def send_buffers(
    sock: socket.socket,
    buffers: Sequence[Buffer],
    count_sent: Callable[[int], None],
    parts: list[int] | None = None,
    deadline: float | None = None,
) -> list[Buffer]:
    """Write all of `buffers` to a blocking socket without joining them.

    Return the unsent buffers. The list is empty unless an interrupt is pending while the other end does not read.

    `count_sent` is called with the bytes of each sent part. `parts` receives the size of each part in the interpreter
    step that sends the part. After an exception of a signal handler, a call with the same list sends the unsent bytes.
    `deadline` is a `time.monotonic()` value, for sockets whose writes time out.

    Raises:
        OSError: the error of the socket; `TimeoutError` after the deadline.
    """
    parts = [] if parts is None else parts
    pending, send = list(buffers), gathering_send(sock)
    first, skip = 0, sum(parts)
    while True:
        while first < len(pending) and skip >= len(pending[first]):
            skip -= len(pending[first])
            first += 1
        if first == len(pending):
            return []
        if skip:
            pending[first] = memoryview(pending[first])[skip:]
            skip = 0
        try:
            parts.extend(map(send, (pending[first : first + PARTS],)))
        except BlockingIOError:
            if interrupt_mask.pending:
                return pending[first:]
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("the peer has stopped reading from the connection") from None
            wait_writable(sock)
            continue
        skip = parts[-1]
        count_sent(skip)


def wait_readable(poll: Poll, deadline: float | None) -> bool:
    """Wait until the polled socket is readable or shut down. Return False if `deadline` passes first.

    `deadline` is a `time.monotonic()` value, or None for no limit.
    """
    if deadline is None:
        poll.poll()
        return True
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


class SocketConnection(StripingConnection):
    """A `Connection` over a connected stream socket, which it owns.

    Frames are written directly from their buffers, and read directly into new buffers.

    Attributes:
        bytes_sent: as in `Connection`.
        bytes_received: as in `Connection`.
    """

    _undated_seconds = _READ_SECONDS
    _counts = True  # True if the socket's bytes are the ones to count

    def __init__(self, sock: socket.socket, limits: Limits, peer: str) -> None:
        super().__init__(limits, peer)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wait_in_kernel(sock, _READ_SECONDS, _WRITE_SECONDS)
        self.bytes_sent = self._sent_before = 0
        self.bytes_received = 0
        self._socket = sock
        self._poll = poller()
        self._poll.register(sock.fileno(), READABLE)
        self._read: list[
            int
        ] = []  # bytes that were read into the decoder's buffer but not processed: at most one number
        self._has_unprocessed = False
        self._silence = PeerSilence()
        self._fastest = 0.0  # bytes a second
        self._deliver_until = (
            0.0  # end time on the monotonic clock, so that connections that end together wait together
        )
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            peer_monitor.watch(self)

    def notice_silence(self) -> None:
        """End the connection if the other machine or the connection's own address is gone; never blocks, never raises."""
        if self._end_reason or self._process != os.getpid():
            return
        try:
            seconds = self._silence.seconds(self._socket)
        except OSError:
            seconds = 0.0  # another thread has just closed it, or the system does not report this
        if seconds > SILENT_SECONDS:
            log.warning("the peer's machine does not answer", peer=self.peer, seconds=seconds)
            self._end(f"the peer's machine has acknowledged nothing for {seconds:.0f} s")
        elif address_is_gone(
            self._socket
        ):  # otherwise the kernel retransmits from the lost address for a quarter of an hour
            log.warning("the local network address of a connection was removed from this machine", peer=self.peer)
            self._end("this machine has lost the address of the connection, as after a change of networks")

    @property
    def link(self) -> LinkFacts:
        """Return measurements of the network so far. Never blocks, never raises."""
        if self._end_reason:
            return NO_LINK
        try:
            latency, rate = link_figures(self._socket)
        except OSError:
            return NO_LINK  # another thread has just closed it
        parallel = self._parallel.bandwidth if self._parallel is not None else 0.0
        self._fastest = max(self._fastest, rate, parallel)
        return LinkFacts(latency, self._fastest)

    @property
    def local(self) -> bool:
        """True if the other end is on this machine."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return True
        try:
            return bool(self._socket.getpeername()[0] == self._socket.getsockname()[0])
        except OSError:  # it has ended
            return True

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def descriptor(self) -> int | None:
        """Return a descriptor to wait for the next frame; None while parallel connections also deliver pieces of it."""
        return None if self._end_reason or self._decoder.waiting else self._socket.fileno()

    @property
    def hung_up(self) -> bool:
        """Return True if the connection has ended, or the other end has stopped sending.

        Earlier bytes may be unread. Thread-safe.
        """
        return bool(self._end_reason) or hung_up(self._socket)

    @property
    def _torn(self) -> bool:
        return self._has_unprocessed or super()._torn

    def _write(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        parts = self._sent
        if not parts:
            self._sent_before = self.bytes_sent
            if len(buffers) == 1:  # the usual kind of message
                try:
                    parts.extend(map(self._socket.send, buffers))
                except BlockingIOError:
                    pass
                else:
                    if self._counts:
                        self.bytes_sent += parts[0]
                    else:
                        self._count_sent(parts[0])
                    if parts[0] == len(buffers[0]):
                        return ()
        return send_buffers(self._socket, buffers, self._count_sent, self._sent)

    def _finish(self, buffers: Sequence[Buffer]) -> bool:
        self.bytes_sent = self._sent_before + sum(self._sent) if self._sent else self.bytes_sent
        try:
            deadline = time.monotonic() + _FINISH_SECONDS
            return not send_buffers(self._socket, buffers, self._count_sent, self._sent, deadline)
        except OSError as error:
            log.info("an interrupted frame could not be completed", peer=self.peer, error=str(error))
            return False

    def _count_sent(self, count: int) -> None:
        self.bytes_sent += count

    def _receive_undated(self) -> bool:
        if self._decoder.waiting:
            return self._receive_large(time.monotonic() + _READ_SECONDS)
        buffer, read = self._decoder.buffer(), self._read
        if not read:
            try:
                # One interpreter step: an interrupt comes before the bytes are read, or after their count is stored.
                read.extend(map(self._socket.recv_into, (buffer,)))
            except BlockingIOError:
                return False
        self._has_unprocessed = True
        count = read[0]
        del read[:]
        if count and self._counts:
            self.bytes_received += count
            self._decoder.received(count)
        else:
            self._process_received(count)
        self._has_unprocessed = False
        return True

    def _receive_some(self, deadline: float | None) -> bool:
        if self._decoder.waiting:
            return self._receive_large(deadline)
        buffer = self._decoder.buffer()
        if not self._read:
            seconds_left = _READ_SECONDS if deadline is None else deadline - time.monotonic()
            soon = seconds_left < _READ_SECONDS
            if seconds_left > 0 and soon and not self._wait_readable(self._poll, deadline):
                return False
            try:
                # One interpreter step: an interrupt comes before the bytes are read, or after their count is stored.
                self._read.extend(map(self._socket.recv_into, (buffer,), (0,), (DONTWAIT if soon else 0,)))
            except BlockingIOError:
                return seconds_left > 0 and wait_readable(self._poll, deadline)
        self._has_unprocessed = True
        self._process_received(self._read.pop())
        self._has_unprocessed = False
        return True

    def _wait_readable(self, poll: Poll, deadline: float | None) -> bool:
        return wait_readable(poll, deadline)

    def _count_received(self, count: int) -> None:
        self.bytes_received += count

    def _process_received(self, count: int) -> None:
        self._count_received(count)
        if count:
            self._decoder.received(count)
            return
        where = "in the middle of a frame" if self._decoder.mid_frame else "between frames"
        raise TransportError(f"the peer closed the connection {where}")

    def push(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send as much as the other end accepts now, without blocking. Return the unsent buffers."""
        with self._send_lock:
            if self._send_closed or self._end_reason:
                raise TransportError(self._end_reason or self._send_closed)
            try:
                count = send_now(self._socket, buffers)
            except BlockingIOError:
                return buffers
            self._count_sent(count)
        unsent = list(buffers)
        while unsent and count >= len(unsent[0]):
            count -= len(unsent.pop(0))
        if unsent and count:
            unsent[0] = memoryview(unsent[0])[count:]
        return unsent

    unsent = False

    def _count_parallel(self, bytes_sent: int, bytes_received: int) -> None:
        self.bytes_sent += bytes_sent
        self.bytes_received += bytes_received

    def _hang_up(self) -> None:
        super()._hang_up()
        self._shut(socket.SHUT_WR)

    def _shut_down(self) -> None:
        super()._shut_down()
        self._deliver_until = time.monotonic() + _DELIVER_SECONDS
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError as error:
            log.debug("the socket was shut down already", peer=self.peer, error=str(error))

    def _drop(self) -> None:
        super()._drop()
        with suppress(OSError):  # closed already
            self._deliver(self._deliver_until or time.monotonic() + _DELIVER_SECONDS)
        self._socket.close()

    def _deliver(self, deadline: float) -> None:
        """Wait until the other machine has acknowledged all sent bytes.

        Otherwise some could be lost: if a socket is closed with unread bytes, the kernel drops its unsent bytes.
        """
        pause = 0.0005
        while self._process == os.getpid() and unacknowledged_bytes(self._socket) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


class AcceptedConnection(SocketConnection):
    """A server's connection. Frames sent before `close` are not lost."""

    def close(self) -> None:
        """Discard incoming bytes for at most a second, then close the connection.

        If a socket is closed while bytes arrive, the kernel resets the connection. The other end would lose bytes in
        flight, above all the reason for the close.
        """
        if not self._end_reason and self._process == os.getpid():
            self.stop_sending("the connection was closed at this end")
            self._discard(time.monotonic() + _LINGER_SECONDS)
        super().close()

    def _discard(self, deadline: float) -> None:
        """Discard bytes until the other end closes as well, within limits. Do nothing while another thread receives."""
        room = _LINGER_BYTES
        scratch = bytearray(_DISCARD_BYTES)
        if not self._receive_lock.acquire(timeout=_LINGER_SECONDS):
            return
        try:
            while room > 0 and not self._end_reason and self._wait_readable(self._poll, deadline):
                try:
                    count = self._socket.recv_into(scratch, 0, DONTWAIT)
                except BlockingIOError:  # half a TLS record
                    if wait_readable(self._poll, deadline):
                        continue
                    return
                if not count:
                    return
                room -= count
                self._count_received(count)
        except OSError as error:
            log.debug("the peer broke the connection", peer=self.peer, error=str(error))
        finally:
            self._receive_lock.release()


Welcoming = Callable[[socket.socket, Limits, str], SocketConnection]


class SocketListener(Listener):
    """A `Listener` on a bound stream socket, which it owns. One thread accepts, and each connection has its own thread.

    Attributes:
        url: what a client passes to `connect`.
    """

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        limits: Limits,
        accept: Callable[[Connection], bool | None],
        release: Callable[[], None] = lambda: None,
        welcome: Welcoming = AcceptedConnection,
    ) -> None:
        """Listen on `sock`.

        `release` is called once, when the address is free again.

        `welcome` returns a connection for an accepted socket, on the thread that serves it. It closes the socket if it
        raises.
        """
        self.url = url
        self._socket = sock
        self._limits = limits
        self._accept = accept
        self._release = release
        self._welcome = welcome
        self._unauthenticated = UnauthenticatedLimit()
        self._wake, self._woken = socket.socketpair()
        self._close_lock = threading.Lock()
        self._closed = False
        sock.setblocking(False)
        sock.listen(_LISTEN_BACKLOG)
        self._thread = threading.Thread(target=self._run, name=f"djinn-listen {url}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and release the address. A second call has no effect."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._wake.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()
        self._release()

    def _run(self) -> None:
        poll = poller()
        poll.register(self._socket.fileno(), READABLE)
        poll.register(self._woken.fileno(), READABLE)
        with self._woken:
            while not self._closed:
                poll.poll()
                if not self._closed:
                    self._accept_one()

    def _accept_one(self) -> None:
        try:
            sock, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            # For example out of file descriptors: the waiting client keeps the socket readable, so pause instead of
            # spinning.
            log.warning("cannot accept a connection", url=self.url, error=str(error))
            time.sleep(0.1)
            return
        peer = _describe(address) or self.url
        try:
            threading.Thread(target=self._serve, args=(sock, peer), name=f"djinn-serve {peer}", daemon=True).start()
        except (OSError, RuntimeError) as error:
            log.warning("cannot serve a connection", url=self.url, peer=peer, error=str(error))
            sock.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with self._unauthenticated.counted(SocketShutdown(sock)):
                connection = self._welcome(sock, self._limits, f"client {peer}")
        except OSError as error:
            log.info("a connection could not be established", url=self.url, peer=peer, error=str(error))
            return
        serve_connection(connection, connection.peer, self._accept)


class SocketShutdown(msgspec.Struct, frozen=True):
    """A connection that a thread can end although another thread uses it.

    The thread that uses the connection sees the end, and closes it.
    """

    sock: socket.socket

    def close(self) -> None:
        """Shut down both directions."""
        try:
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a connection has ended already", error=str(error))


def serve_connection(connection: Connection, peer: str, accept: Callable[[Connection], bool | None]) -> None:
    """Call `accept`, then close the connection unless `accept` returned True.

    Log exceptions, so that a client's failure affects no other.
    """
    is_kept = None
    try:
        is_kept = accept(connection)
    except TransportError as error:
        log.info("connection ended", peer=peer, reason=str(error))
    except DjinnError as error:
        log.warning("connection ended", peer=peer, error=str(error), kind=type(error).__name__)
    except Exception:
        log.exception("connection ended by an unexpected error", peer=peer)
    finally:
        if not is_kept:
            connection.close()


def _describe(address: object) -> str:
    match address:
        case (str(host), int(port), *_):
            return f"{host}:{port}"
        case _:
            return ""
