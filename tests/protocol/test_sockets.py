import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from servers import wait_for

from djinn_core.errors import ProtocolError, TransportError
from djinn_core.protocol.net.sockets import AcceptedConnection, SocketConnection, SocketListener, send_buffers
from djinn_core.wire.frames import Frame, FrameDecoder, Limits, encode_frame

acknowledged = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="where the kernel tells what was acknowledged"
)

LIMITS = Limits()


@pytest.fixture
def socket_and_connection():
    raw, ours = socket.socketpair()
    connection = SocketConnection(ours, LIMITS, "the other end")
    yield raw, connection
    connection.close()
    raw.close()


@pytest.fixture
def interruptible():
    """Let SIGINT raise. A suite in a shell's background ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


class SignalError(BaseException):
    """Exception that a program's signal handler may raise."""


@pytest.fixture
def raising_sigusr1():
    """Let SIGUSR1 raise an exception that is not KeyboardInterrupt."""

    def raise_signal_error(*_):
        raise SignalError

    previous = signal.signal(signal.SIGUSR1, raise_signal_error)
    yield
    signal.signal(signal.SIGUSR1, previous)


def interrupt(number):
    signal.pthread_kill(threading.main_thread().ident, number)


def interrupt_sending(raw, number):
    """Return a thread that signals the main thread once some of a send has arrived and the rest is blocked."""

    def sending():
        select.select([raw], [], [], 300.0)
        interrupt(number)

    thread = threading.Thread(target=sending)
    thread.start()
    return thread


def interrupt_receiving(connection, number):
    """Return a thread that signals the main thread once it receives."""

    def receiving():
        wait_for(connection._receive_lock.locked, "the receiver")
        interrupt(number)

    thread = threading.Thread(target=receiving)
    thread.start()
    return thread


def encode_bytes(frame):
    return b"".join(bytes(part) for part in encode_frame(frame, LIMITS))


def test_frames_arrive_bytewise_and_through_timeouts(socket_and_connection):
    raw, connection = socket_and_connection
    stream = encode_bytes(Frame(b"head", [b"body", b"", b"more"]))
    for n in range(len(stream) - 1):
        raw.send(stream[n : n + 1])
        with pytest.raises(TimeoutError):
            connection.receive(0.0)
    raw.send(stream[-1:])
    frame = connection.receive(300)
    assert (frame.head, [bytes(b) for b in frame.body]) == (b"head", [b"body", b"", b"more"])
    assert connection.bytes_received == len(stream)


def test_many_frames_in_one_read(socket_and_connection):
    raw, connection = socket_and_connection
    raw.sendall(b"".join(encode_bytes(Frame(b"%d" % n, [b"x" * (n % 3)])) for n in range(500)))
    assert [connection.receive(300).head for _ in range(500)] == [b"%d" % n for n in range(500)]


def test_more_buffers_than_iov_max():
    left, right = socket.socketpair()
    sender, receiver = SocketConnection(left, LIMITS, "a"), SocketConnection(right, LIMITS, "b")
    body = [os.urandom(n % 50) for n in range(5000)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, Frame(b"", body))
        assert [bytes(b) for b in receiver.receive(300).body] == body
        sending.result()
    assert sender.bytes_sent == receiver.bytes_received
    sender.close()
    receiver.close()


def test_large_body_is_read_into_place(socket_and_connection, monkeypatch):
    raw, connection = socket_and_connection
    copied = []
    spread = FrameDecoder._distribute
    monkeypatch.setattr(
        FrameDecoder, "_distribute", lambda self, data, at: (copied.append(len(data)), spread(self, data, at))
    )
    body = bytes(range(256)) * (64 << 10)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(raw.sendall, encode_bytes(Frame(b"head", [body])))
        assert connection.receive(300).body[0] == body
        sending.result(60)
    assert sum(copied) <= 256 << 10


def test_partial_writes_continue():
    class Slow:
        def __init__(self):
            self.taken = b""

        def sendmsg(self, buffers):
            data = b"".join(buffers)[:7]
            self.taken += data
            return len(data)

    slow, counted = Slow(), []
    send_buffers(slow, [b"abc", b"defghijklm", b"nopq", b"rstuvwxyz"], counted.append)
    assert slow.taken == b"abcdefghijklmnopqrstuvwxyz"
    assert sum(counted) == 26


def test_close_within_frame_is_an_error(socket_and_connection):
    raw, connection = socket_and_connection
    raw.sendall(encode_bytes(Frame(b"head"))[:-1])
    raw.close()
    with pytest.raises(TransportError, match="in the middle of a frame"):
        connection.receive(300)


def test_garbage_closes_the_connection(socket_and_connection):
    raw, connection = socket_and_connection
    raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(ProtocolError, match="the other end: not a frame"):
        connection.receive(300)
    raw.settimeout(300)
    with pytest.raises((ConnectionError, TimeoutError)) as caught:
        while raw.recv(100):
            pass
        raise ConnectionResetError
    assert not isinstance(caught.value, TimeoutError)
    with pytest.raises(TransportError):
        connection.receive(300)


def test_frames_before_the_first_wrong_byte_are_delivered(socket_and_connection):
    raw, connection = socket_and_connection
    raw.sendall(encode_bytes(Frame(b"the reason", [b"why"])) + bytes(100))
    assert connection.receive(300).head == b"the reason"
    with pytest.raises(ProtocolError, match="not a frame"):
        connection.receive(300)


def pair_over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return SocketConnection(ours, Limits(), "the other end"), theirs


@acknowledged
def test_close_delivers_sent_frames():
    connection, theirs = pair_over_tcp()
    with theirs:
        theirs.sendall(encode_bytes(Frame(b"not read")))
        frames = [Frame(b"%d" % n) for n in range(40)]  # more segments than the kernel sends before an acknowledgement
        for frame in frames:
            connection.send(frame)
        connection.close()
        expected = b"".join(map(encode_bytes, frames))
        came = b""
        with suppress(ConnectionResetError):
            while piece := theirs.recv(1 << 16):
                came += piece
        assert came == expected


@acknowledged
@pytest.mark.parametrize("broken", [False, True])
def test_close_is_bounded(monkeypatch, broken):
    monkeypatch.setattr("djinn_core.protocol.net.sockets._DELIVER_SECONDS", 600.0 if broken else 0.2)
    connection, theirs = pair_over_tcp()
    with theirs:
        connection._socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                connection._socket.send(bytes(1 << 20))
        if broken:
            theirs.close()
        connection.close()
    assert connection._socket.fileno() == -1


def test_accepted_connection_drains_after_last_frame():
    raw, ours = socket.socketpair()
    connection = AcceptedConnection(ours, LIMITS, "the client")
    connection.send(Frame(b"the reason"))
    with raw, ThreadPoolExecutor(1) as pool:
        closing = pool.submit(connection.close)
        raw.settimeout(300)
        raw.sendall(bytes(8 << 20))  # more than fits between the two: it would break off if the other end did not read
        assert b"the reason" in raw.recv(1000)
        assert raw.recv(1000) == b""
        raw.shutdown(socket.SHUT_WR)
        closing.result(60)
    with pytest.raises(TransportError):
        connection.receive(300)


@pytest.mark.parametrize("bound", ["_LINGER_SECONDS", "_LINGER_BYTES"])
def test_accepted_connection_drain_is_bounded(monkeypatch, bound):
    monkeypatch.setattr(f"djinn_core.protocol.net.sockets.{bound}", 0)
    raw, ours = socket.socketpair()
    connection = AcceptedConnection(ours, LIMITS, "the client")
    with raw:
        raw.settimeout(300)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(connection.close)
            with pytest.raises(ConnectionError):
                raw.sendall(bytes(64 << 20))
            closing.result(60)


def test_interrupted_receive_loses_nothing(socket_and_connection, interruptible):
    raw, connection = socket_and_connection
    stream = encode_bytes(Frame(b"head", [b"x" * 1000]))
    raw.sendall(stream[:500])
    timer = interrupt_receiving(connection, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        connection.receive()
    timer.join()
    raw.sendall(stream[500:])
    assert connection.receive(300).head == b"head"


def test_receive_works_after_long_silence(monkeypatch):
    monkeypatch.setattr("djinn_core.protocol.net.sockets._READ_SECONDS", 0.05)
    raw, ours = socket.socketpair()
    connection = SocketConnection(ours, LIMITS, "the other end")
    stream = encode_bytes(Frame(b"head", [b"x" * 1000]))
    with raw:
        for timeout in (None, 120, 60):
            timers = [
                threading.Timer(0.15 + 0.1 * half, raw.sendall, [part])
                for half, part in enumerate((stream[:500], stream[500:]))
            ]
            for timer in timers:
                timer.start()
            assert connection.receive(timeout).body[0] == b"x" * 1000
        with pytest.raises(TimeoutError):
            connection.receive(0.08)
    connection.close()


def test_interrupted_send_is_finished_first(socket_and_connection, interruptible):
    raw, connection = socket_and_connection
    body = bytearray(b"b" * (8 << 20))
    frames = [Frame(b"first", [bytes(body), b"end"]), Frame(b"last")]
    timer = interrupt_sending(raw, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        connection.send(Frame(b"first", [body, b"end"]))  # the other end does not read
    body[:] = bytes(len(body))
    stream = b"".join(map(encode_bytes, frames))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_late, raw, len(stream), timer)
        connection.send(frames[1])
        assert reading.result(60) == stream
    assert connection.bytes_sent == len(stream)


def test_send_left_by_signal_handler_is_finished(socket_and_connection, raising_sigusr1):
    raw, connection = socket_and_connection
    frames = [Frame(b"first", [bytes(8 << 20), b"end"]), Frame(b"x" * (8 << 20)), Frame(b"last")]
    stream = b"".join(map(encode_bytes, frames))
    with ThreadPoolExecutor(1) as pool:
        for frame in frames[:2]:
            timer = interrupt_sending(raw, signal.SIGUSR1)
            reading = pool.submit(read_late, raw, len(encode_bytes(frame)), timer)
            with pytest.raises(SignalError):
                connection.send(frame)
            assert reading.result(60) == encode_bytes(frame)
    connection.send(frames[2])
    assert raw.recv(1 << 20) == encode_bytes(frames[2])
    assert connection.bytes_sent == len(stream)


def read_late(raw, count, timer):
    timer.join()
    came = bytearray()
    while len(came) < count:
        came += raw.recv(count - len(came))
    return bytes(came)


def test_send_left_by_signal_handler_times_out(socket_and_connection, raising_sigusr1, monkeypatch):
    monkeypatch.setattr("djinn_core.protocol.net.sockets._FINISH_SECONDS", 0.1)
    raw, connection = socket_and_connection
    timer = interrupt_sending(raw, signal.SIGUSR1)
    with pytest.raises(SignalError):
        connection.send(Frame(b"", [bytes(64 << 20)]))
    timer.join()
    with pytest.raises(TransportError, match="interrupted while it sent"):
        connection.send(Frame(b"x"))


def test_close_wakes_a_blocked_send(socket_and_connection):
    _, connection = socket_and_connection
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(connection.send, Frame(b"", [bytes(64 << 20)]))
        time.sleep(0.2)
        connection.close()
        with pytest.raises(TransportError):
            sending.result(60)


def test_close_in_signal_handler_ends_wait(socket_and_connection):
    _, connection = socket_and_connection
    previous = signal.signal(signal.SIGUSR1, lambda *_: connection.close())
    timer = interrupt_receiving(connection, signal.SIGUSR1)
    try:
        with pytest.raises(TransportError):
            connection.receive(300)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


def test_second_receiver_respects_timeout(socket_and_connection):
    raw, connection = socket_and_connection
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connection.receive, 60)
        wait_for(connection._receive_lock.locked, "the first receiver")
        with pytest.raises(TimeoutError, match="another thread"):
            connection.receive(0.05)
        raw.sendall(encode_bytes(Frame(b"x")))
        assert first.result().head == b"x"


def test_forked_child_does_not_close_connection(socket_and_connection):
    raw, connection = socket_and_connection
    child = os.fork()
    if child == 0:
        try:
            connection.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    connection.send(Frame(b"parent"))
    raw.settimeout(300)
    assert b"parent" in raw.recv(100)


def test_close_leaks_no_descriptor():
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(20):
        left, right = socket.socketpair()
        one, other = SocketConnection(left, LIMITS, "a"), SocketConnection(right, LIMITS, "b")
        one.close()
        with pytest.raises(TransportError):
            other.receive(300)
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_listener_survives_failed_accept(caplog):
    sock = socket.create_server(("127.0.0.1", 0))

    def accept(connection):
        raise RuntimeError("a bug of the server's")

    listener = SocketListener(sock, "tcp://somewhere", LIMITS, accept)
    try:
        for _ in range(3):
            with socket.create_connection(sock.getsockname()) as client:
                client.settimeout(300)
                assert client.recv(1) == b""
    finally:
        listener.close()
        listener.close()
    assert "a bug of the server's" in caplog.text
