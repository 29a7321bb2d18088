"""Frames over connected stream sockets, for every transport that has one."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection
from djinn_core.logs import get_logger
from djinn_core.wire.frames import Buffer, Frame, FrameDecoder, Limits, encode_frame

_IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)
_LISTEN_BACKLOG: Final = 128
_LEAVE_SECONDS: Final = 1.0
_READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR

log = get_logger("djinn.transport")


def send_buffers(sock: socket.socket, buffers: Sequence[Buffer], count_sent: Callable[[int], None]) -> None:
    """Write all of `buffers` to a blocking socket without joining them; `count_sent` is told of each part sent.

    Raises:
        OSError: the socket's.
    """
    pending = list(buffers)
    first = 0
    while first < len(pending):
        sent = sock.sendmsg(pending[first : first + _IOV_MAX])
        count_sent(sent)
        while first < len(pending) and sent >= len(pending[first]):
            sent -= len(pending[first])
            first += 1
        if sent:
            pending[first] = memoryview(pending[first])[sent:]


def wait_readable(poll: select.poll, deadline: float | None) -> bool:
    """Wait until the polled socket has something to read or was shut down; False when `deadline` passed first.

    `deadline` is a `time.monotonic()` value; None waits for ever.
    """
    if deadline is None:
        poll.poll()
        return True
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


class SocketConnection:
    """A `Connection` over any connected stream socket, which it owns from now on.

    Frames are written straight from their buffers and read straight into new ones. Several threads may send, frames do
    not mix; one may receive meanwhile. In a forked child, `close` only drops the child's copy of the socket.

    Attributes:
        limits, bytes_sent, bytes_received: as in `Connection`.
        peer: who is at the other end, for messages.
    """

    def __init__(self, sock: socket.socket, limits: Limits, peer: str) -> None:
        sock.setblocking(True)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._socket = sock
        self._process = os.getpid()
        self._decoder = FrameDecoder(limits)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), _READABLE)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._taking = False
        self._ended = ""

    @property
    def limits(self) -> Limits:
        """What a frame may weigh, in both directions."""
        return self._decoder.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._decoder.limits = limits

    def send(self, frame: Frame) -> None:
        """As `Connection.send`. A frame beyond `limits` raises `ProtocolError` and leaves the connection as it was."""
        buffers = encode_frame(frame, self.limits)
        try:
            with self._sending:
                self._check_open()
                self._send(buffers)
        finally:
            if self._ended:
                self._release()

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._receiving.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"{self.peer}: another thread is receiving, for {timeout} s and longer")
        try:
            return self._next_frame(deadline)
        except BaseException:
            # An interrupt between reading bytes and taking them in would leave the stream torn.
            if self._taking:
                self._end("the connection was interrupted while it took in bytes")
            raise
        finally:
            self._receiving.release()
            if self._ended:
                self._release()

    def close(self) -> None:
        """As `Connection.close`."""
        self._end("the connection was closed at this end")
        self._release()

    def _next_frame(self, deadline: float | None) -> Frame:
        self._check_open()
        frames = self._decoder.frames
        while not frames:
            self._receive_some(deadline)
        return frames.popleft()

    def _send(self, buffers: Sequence[Buffer]) -> None:
        try:
            send_buffers(self._socket, buffers, self._count_sent)
        except OSError as error:
            raise TransportError(self._end(f"cannot send: {error}")) from error
        except BaseException:
            self._end("the connection was interrupted while it sent a frame")
            raise

    def _count_sent(self, count: int) -> None:
        self.bytes_sent += count

    def _receive_some(self, deadline: float | None) -> None:
        buffer = self._decoder.buffer()
        # Within a frame the next bytes are probably there; before one they are probably not.
        if not self._decoder.mid_frame:
            self._wait(deadline)
        self._taking = True
        try:
            count = self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            self._take(count)
        except BlockingIOError:
            self._taking = False
            self._wait(deadline)
        except TransportError:
            raise
        except OSError as error:
            raise TransportError(self._end(f"cannot receive: {error}")) from error
        except ProtocolError as error:
            raise ProtocolError(self._end(str(error))) from error
        self._taking = False

    def _take(self, count: int) -> None:
        self.bytes_received += count
        if count:
            self._decoder.received(count)
            return
        where = "in the middle of a frame" if self._decoder.mid_frame else "between frames"
        raise TransportError(self._end(f"the other end closed the connection {where}"))

    def _wait(self, deadline: float | None) -> None:
        if not wait_readable(self._poll, deadline):
            raise TimeoutError(f"{self.peer}: nothing came in time")

    def _check_open(self) -> None:
        if self._ended:
            raise TransportError(self._ended)

    def _end(self, reason: str) -> str:
        """Break the connection, waking whoever waits on it, and return why it ended."""
        if not self._ended:
            self._ended = f"{self.peer}: {reason}"
            # Shutting down would end the connection for the parent of a forked child too.
            if self._process == os.getpid():
                self._shut_down()
        return self._ended

    def _release(self) -> None:
        """Close the ended socket once no thread is inside a call on it, for its number may be given out again at once.

        Whoever was inside wakes and leaves, unless it is the interrupted caller itself, who releases it afterwards.
        """
        if not self._sending.acquire(timeout=_LEAVE_SECONDS):
            return
        if self._receiving.acquire(timeout=_LEAVE_SECONDS):
            self._socket.close()
            self._receiving.release()
        self._sending.release()

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the socket was shut down already", peer=self.peer, error=str(error))


class SocketListener:
    """A `Listener` on a bound stream socket, which it owns from now on: a thread that accepts, and one a connection.

    Attributes:
        url: what a client passes to `connect`.
    """

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        limits: Limits,
        accept: Callable[[Connection], None],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` is called once, when the address is free again."""
        self.url = url
        self._socket = sock
        self._limits = limits
        self._accept = accept
        self._release = release
        self._wake, self._woken = socket.socketpair()
        self._closing = threading.Lock()
        self._closed = False
        sock.setblocking(False)
        sock.listen(_LISTEN_BACKLOG)
        self._thread = threading.Thread(target=self._run, name=f"djinn-listen {url}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As `Listener.close`. Closing twice is fine."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._wake.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()
        self._release()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), _READABLE)
        poll.register(self._woken.fileno(), _READABLE)
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
            # Out of file descriptors, say: the one that waits stays readable, so do not spin.
            log.warning("cannot accept a connection", url=self.url, error=str(error))
            time.sleep(0.1)
            return
        peer = _describe(address) or self.url
        try:
            connection = SocketConnection(sock, self._limits, f"client {peer}")
            threading.Thread(target=self._serve, args=(connection,), name=f"djinn-serve {peer}", daemon=True).start()
        except (OSError, RuntimeError) as error:
            log.warning("cannot serve a connection", url=self.url, peer=peer, error=str(error))
            sock.close()

    def _serve(self, connection: SocketConnection) -> None:
        serve_connection(connection, connection.peer, self._accept)


def serve_connection(connection: Connection, peer: str, accept: Callable[[Connection], None]) -> None:
    """Call `accept`, close the connection afterwards, and log what it raised: one client's trouble stays its own."""
    try:
        accept(connection)
    except TransportError as error:
        log.info("connection ended", peer=peer, reason=str(error))
    except DjinnError as error:
        log.warning("connection ended", peer=peer, error=str(error), kind=type(error).__name__)
    except Exception:
        log.exception("connection ended by an unexpected error", peer=peer)
    finally:
        connection.close()


def _describe(address: object) -> str:
    match address:
        case (str(host), int(port), *_):
            return f"{host}:{port}"
        case _:
            return ""
