"""TLS over a connected socket, with the interface of a plain socket, so that connections can use either.

Two threads must not enter OpenSSL at once, and a thread that waits for the other end must not block a sender. So TLS
records are processed in memory under a lock. They are sent and received outside of the lock.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.protocol.net.sockets import AcceptedConnection, SocketConnection, wait_readable
from djinn_core.protocol.net.tls_contexts import check_fingerprint, client_context
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.system.tcp import Poll, wait_writable
from djinn_core.wire.frames import Buffer, Limits

_READ_BYTES: Final = 256 << 10  # bytes of records per receive
_WRITE_BYTES: Final = 256 << 10  # plain bytes per send


class TlsSocket:
    """TLS over a connected, blocking stream socket, which it owns.

    Attributes:
        bytes_sent: bytes sent on the network, including the handshake.
        bytes_received: bytes received on the network, including the handshake.
        family: address family of the socket.
        torn: True if an interrupt has left bytes unprocessed. The caller that processes the result of `recv_into`
            resets it.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        """Wrap `sock`.

        `server_name` is the name that a client expects in the certificate, or None at the server's end.
        """
        self.bytes_sent = 0
        self.bytes_received = 0
        self.family = sock.family
        self.torn = False
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_name is None, server_name)
        self._records = threading.Lock()
        self._order = threading.Lock()  # records are sent in the order of their creation
        self._unsent = memoryview(b"")  # the unsent rest of the records
        self._scratch = memoryview(np.empty(_READ_BYTES, np.uint8))  # type: ignore[arg-type] # takes no memory before it is used
        self._read: list[int] = []  # unprocessed bytes in `_scratch`: at most one number

    def shake_hands(self, timeout: float) -> None:
        """Do the TLS handshake within `timeout` seconds. Afterwards the socket has no timeout.

        Raises:
            OSError: the other end does not speak TLS, or one end does not accept the certificate of the other.
        """
        deadline = time.monotonic() + timeout
        try:
            while not self._shake():
                self._flush()
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no TLS handshake in {timeout:g} s")
                self._read_records(0)
        finally:
            self._socket.settimeout(timeout)
            self._flush()  # after a failure: the alert that says why
        self._socket.setblocking(True)

    def certificate(self) -> bytes | None:
        """Certificate of the other end in DER; None if it presented no certificate."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def unsent(self) -> bool:
        """True if this object buffers records that are not on the wire yet."""
        with self._records:  # between the two
            return bool(self._unsent or self._outgoing.pending)

    @property
    def has_buffered(self) -> bool:
        """True if this object buffers received bytes, which `select` on the socket does not report."""
        return bool(self._tls.pending() or self._incoming.pending)

    def send(self, data: Buffer) -> int:
        """Send as many of the first bytes of `data` as a single send accepts. Return their number."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Buffer], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Send the first bytes of `buffers`. Return their number. Raises `BlockingIOError` as a plain socket would."""
        del ancillary
        nbytes = 0
        if self._unsent and not self._flush(flags=flags):
            raise BlockingIOError
        with self._records:
            for buffer in buffers:
                part = memoryview(buffer).cast("B")[: _WRITE_BYTES - nbytes]
                if len(part):
                    nbytes += self._tls.write(part)
                if nbytes >= _WRITE_BYTES:
                    break
        self._flush(flags=flags)
        return nbytes

    def recv_into(self, buffer: memoryview | bytearray, nbytes: int = 0, flags: int = 0) -> int:
        """Read into `buffer`. Return the number of bytes, 0 at the end. Raises `BlockingIOError` as a plain socket would."""
        view = memoryview(buffer)[: nbytes or None]
        while True:
            with self._records:
                self.torn = True
                count = self._take_records(view)
                if count is not None:
                    return count
                self.torn = False
            if self._outgoing.pending:
                self._flush(wait=False, flags=flags)
            self._read_records(flags)

    def _take_records(self, view: memoryview) -> int | None:
        """Read arrived bytes into `view`. Return their number, 0 at the end, or None if nothing has arrived."""
        size, nbytes = len(view), 0
        try:
            while nbytes < size and (not nbytes or self.has_buffered):
                nbytes += cast("int", self._tls.read(size - nbytes, view[nbytes:]))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return nbytes
        except ssl.SSLWantReadError:
            return nbytes or None
        return nbytes

    def flush(self) -> None:
        """Wait until all bytes that `sendmsg` has buffered are on the wire."""
        while not self._flush():
            pass

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        """Call `getsockopt` of the socket."""
        return self._socket.getsockopt(level, option, length)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Call `setsockopt` of the socket."""
        self._socket.setsockopt(level, option, value)

    def setblocking(self, flag: bool) -> None:
        """Call `setblocking` of the socket."""
        self._socket.setblocking(flag)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def getpeername(self) -> Any:
        """Return the address of the peer."""
        return self._socket.getpeername()

    def getsockname(self) -> Any:
        """Return the address of this end."""
        return self._socket.getsockname()

    def shutdown(self, how: int) -> None:
        """Shut down the socket. TLS need not mark the end: frames have lengths, and sessions end with a message."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _shake(self) -> bool:
        with self._records:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

    def _read_records(self, flags: int) -> None:
        if not self._read:  # one interpreter step, as in `SocketConnection`
            self._read.extend(map(self._socket.recv_into, (self._scratch,), (0,), (flags,)))
        self.torn = True
        count = self._read.pop()
        self.bytes_received += count
        with self._records:
            if count:
                self._incoming.write(self._scratch[:count])
            else:
                self._incoming.write_eof()
        self.torn = False

    def _flush(self, wait: bool = True, flags: int = 0) -> bool:
        """Send finished records. Return True if all are sent.

        Without `wait` or with `flags`, return False if another thread is flushing: it sends these records, too.

        Return False as well if the other end does not read, and an interrupt is pending or `flags` has `DONTWAIT`. Then
        the unsent records are sent before later records.
        """
        while self._outgoing.pending or self._unsent:
            if not self._order.acquire(blocking=wait and not flags):
                return False
            try:
                if not self._unsent:
                    with self._records:
                        self._unsent = memoryview(self._outgoing.read())
                while self._unsent:
                    try:
                        count = self._socket.send(self._unsent, flags)
                    except BlockingIOError:
                        if interrupt_mask.pending or flags:
                            return False
                        wait_writable(self._socket)
                        continue
                    self._unsent = self._unsent[count:]
                    self.bytes_sent += count
            finally:
                self._order.release()
        return True


class TlsConnection(SocketConnection):
    """A client's connection over TLS."""

    _counts = False
    _socket: TlsSocket  # type: ignore[assignment] # has all that is called

    def __init__(self, sock: TlsSocket, limits: Limits, peer: str) -> None:
        super().__init__(sock, limits, peer)  # type: ignore[arg-type] # as above
        self.bytes_sent, self.bytes_received = sock.bytes_sent, sock.bytes_received

    @property
    def certificate(self) -> bytes:
        """Return the other end's TLS certificate in DER; empty if it presented no certificate."""
        return self._socket.certificate() or b""

    @property
    def _torn(self) -> bool:
        return super()._torn or self._socket.torn

    def _finish(self, buffers: Sequence[Buffer]) -> bool:
        del buffers
        return False  # the sent part of a record is unknown

    def _wait_readable(self, poll: Poll, deadline: float | None) -> bool:
        return self._socket.has_buffered or wait_readable(poll, deadline)

    @property
    def unsent(self) -> bool:  # type: ignore[override] # a plain socket has nothing
        """Return True if some accepted bytes are not on the wire yet."""
        return self._socket.unsent

    def _count_parallel(self, bytes_sent: int, bytes_received: int) -> None:
        self._socket.bytes_sent += bytes_sent
        self._socket.bytes_received += bytes_received
        super()._count_parallel(bytes_sent, bytes_received)

    def _count_sent(self, count: int) -> None:
        del count  # of plain bytes
        self.bytes_sent = self._socket.bytes_sent

    def _count_received(self, count: int) -> None:
        del count
        self.bytes_received = self._socket.bytes_received
        self._socket.torn = False  # from here on `_has_unprocessed` marks the unprocessed bytes


class AcceptedTlsConnection(TlsConnection, AcceptedConnection):
    """A server's connection over TLS."""


def dial_tls(sock: socket.socket, tls: TlsOptions, host: str, timeout: float) -> TlsSocket:
    """Return a client's TLS connection over a connected socket, after verification of the server's certificate.

    Close the socket on failure.

    Raises:
        TransportError: the server does not speak TLS, or shows a certificate that cannot be trusted.
        ConfigurationError: a file of the settings cannot be used.
    """
    try:
        secure = TlsSocket(sock, client_context(tls), host)
        secure.shake_hands(timeout)
        check_fingerprint(tls, secure.certificate(), host)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise TransportError(
            f"the certificate of {host} cannot be trusted: {error.verify_message}. Name its authority with the setting "
            "tls_authority, or its fingerprint with tls_fingerprints: `djinn serve` prints it, and `djinn login` asks about it in a terminal"
        ) from error
    except TransportError:
        sock.close()
        raise
    except (OSError, ValueError) as error:
        sock.close()
        reason = "" if isinstance(error, TimeoutError) else "; does the server use TLS at this address and port?"
        raise TransportError(f"no TLS connection to {host}: {error}{reason}") from error
    except BaseException:
        sock.close()
        raise
    return secure
