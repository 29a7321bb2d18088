"""Large buffers over connections parallel to one: whole, in order, once, over sockets of this machine, with and without TLS."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import wait_for

from djinn.testing import self_signed_tls
from djinn_client.runtime.connecting.reconnect import ResumingConnection
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.protocol.net.parallel_groups import ParallelGroups
from djinn_core.protocol.net.sockets import AcceptedConnection, SocketConnection
from djinn_core.protocol.net.striping import MANY_BYTES
from djinn_core.protocol.net.tls_contexts import server_context
from djinn_core.protocol.net.tls_sockets import AcceptedTlsConnection, TlsConnection, TlsSocket, dial_tls
from djinn_core.wire.frames import STRIPED_BYTES, Frame, Limits, encode_frame, striped
from djinn_core.wire.resume_messages import ParallelAttach
from djinn_core.wire.striping import PIECE_BYTES, pieces
from djinn_server.executor import Executor

LIMITS = Limits()
GROUP = bytes(32)
MIB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return self_signed_tls(tmp_path_factory.mktemp("tls"))


def pair(tls=None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    if tls is None:
        return SocketConnection(near, LIMITS, "server"), AcceptedConnection(far, LIMITS, "client")
    secure = TlsSocket(far, server_context(tls), None)
    with ThreadPoolExecutor(1) as threads:
        dialled = threads.submit(dial_tls, near, TlsOptions(fingerprints=tls.fingerprints), "localhost", 10.0)
        secure.shake_hands(10.0)
    return TlsConnection(dialled.result(), LIMITS, "server"), AcceptedTlsConnection(secure, LIMITS, "client")


class ParallelPair:
    """Both ends of a connection with parallel connections, over which a frame was sent."""

    def __init__(self, number, tls=None):
        self.near, self.far = pair(tls)
        self.near.send(Frame(b"first"))
        self.far.receive(10.0)
        self.beside = [pair(tls) for _ in range(number)]
        groups = {GROUP: [far for _, far in self.beside]}
        self.far.accept_parallel(lambda group: groups.pop(group, ()))
        self.near.use_parallel(GROUP, [near for near, _ in self.beside])

    def close(self):
        for connection in (self.near, self.far):
            connection.close()


@pytest.fixture
def open_pairs():
    every = []
    yield every
    for one in every:
        one.close()


@pytest.fixture
def make_pair(open_pairs):
    def open_ends(number=3):
        open_pairs.append(ParallelPair(number))
        return open_pairs[-1]

    return open_ends


@pytest.fixture(params=["plain", "tls"])
def make_pair_with_or_without_tls(request, open_pairs, tls):
    def open_ends(number=3):
        open_pairs.append(ParallelPair(number, tls if request.param == "tls" else None))
        return open_pairs[-1]

    return open_ends


def frames(seed, number=12):
    """Return frames of all kinds: small frames, large buffers beside small and empty ones, and piece-sized ones."""
    draw = random.Random(seed)
    sizes = (0, 1, 1000, STRIPED_BYTES - 1, STRIPED_BYTES, STRIPED_BYTES + 1, 2 * PIECE_BYTES, 5 * MIB + 77)
    made = []
    for position in range(number):
        body = [draw.randbytes(draw.choice(sizes)) for _ in range(draw.randrange(5))]
        made.append(Frame(b"%d" % position, body))
    return made


def frames_equal(frame, other):
    return frame.head == other.head and [bytes(b) for b in frame.body] == [bytes(b) for b in other.body]


@pytest.mark.parametrize("seed", range(2))
def test_frames_arrive_in_both_directions(make_pair_with_or_without_tls, seed):
    both, there, back = make_pair_with_or_without_tls(), frames(seed), frames(seed + 100)

    def send(connection, sent):
        for frame in sent:
            connection.send(frame)

    with ThreadPoolExecutor(1) as threads:
        for sender, receiver, sent in ((both.near, both.far, there), (both.far, both.near, back)):
            sending = threads.submit(send, sender, sent)
            for frame in sent:
                assert frames_equal(receiver.receive(60.0), frame)
            sending.result()
    large = sum(len(b) for f in there for b in f.body if len(b) >= STRIPED_BYTES)
    carried = sum(near.bytes_sent for near, _ in both.beside)
    assert carried > large / 2
    assert both.near.bytes_sent > carried
    assert both.far.bytes_received == both.near.bytes_sent


def test_each_parallel_connection_carries_pieces(make_pair_with_or_without_tls):
    both = make_pair_with_or_without_tls(4)
    frame = Frame(b"head", [random.Random(0).randbytes(48 * MIB)])
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(both.near.send, frame)
        assert frames_equal(both.far.receive(60.0), frame)
        sending.result()
    assert all(near.bytes_sent > PIECE_BYTES for near, _ in both.beside)
    assert both.far.buffered_bytes == 0


@pytest.mark.parametrize("secured", [False, True])
def test_local_connection_is_recognised(secured, tls):
    for connection in pair(tls if secured else None):
        assert connection.local
        connection.close()
        assert connection.local


def test_slow_connection_delays_only_its_pieces(make_pair_with_or_without_tls):
    both = make_pair_with_or_without_tls(2)
    slow = both.beside[0][1]
    with slow._receive_lock:  # nothing is read from it until the rest has come
        frame = Frame(b"head", [bytes(64 * MIB)])
        sending = threading.Thread(target=both.near.send, args=(frame,))
        sending.start()
        found = []
        receiving = threading.Thread(target=lambda: found.append(both.far.receive(60.0)))
        receiving.start()
        wait_for(lambda: both.beside[1][0].bytes_sent > 40 * MIB, "the fast one to carry most")
        assert not found
    receiving.join(60)
    sending.join(60)
    assert frames_equal(found[0], frame)


def test_striped_receive_timeout_loses_no_frame(make_pair):
    both = make_pair()
    frame, last = Frame(b"head", [bytes(3 * MIB), b"little"]), Frame(b"last")
    main, large = striped(encode_frame(frame, LIMITS))
    both.near._socket.sendall(b"".join(main) + b"".join(encode_frame(last, LIMITS)))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            both.far.receive(0.05)
    every = list(pieces(1, large))
    for place, piece in enumerate(reversed(every)):  # in any order, over any of them
        both.beside[place % 2][0]._socket.sendall(b"".join(encode_frame(piece, LIMITS)))
        if place == 1:
            with pytest.raises(TimeoutError):
                both.far.receive(0.05)
    assert frames_equal(both.far.receive(10.0), frame)
    assert frames_equal(both.far.receive(10.0), last)


def test_end_of_piece_is_read_at_once(make_pair):
    both = make_pair(1)
    main, large = striped(encode_frame(Frame(b"head", [bytes(range(256)) * (PIECE_BYTES // 128)]), LIMITS))
    both.near._socket.sendall(b"".join(main))
    (near, far), (first, second) = both.beside[0], pieces(1, large)
    reads = []
    take = far._process_received
    far._process_received = lambda count: (reads.append(count), take(count))
    data = b"".join(encode_frame(first, LIMITS))
    near._socket.sendall(data[:-10_000])
    with pytest.raises(TimeoutError):
        both.far.receive(0.3)
    del reads[:]
    near._socket.sendall(data[-10_000:])
    with pytest.raises(TimeoutError):
        both.far.receive(0.3)
    assert sum(reads) == 10_000
    assert len(reads) < 5
    near._socket.sendall(b"".join(encode_frame(second, LIMITS)))
    assert bytes(both.far.receive(10.0).body[0]) == b"".join(large)


def test_unusable_connections_are_closed(monkeypatch):
    (main_near, main_far), (near, far) = pair(), pair()
    main_far.accept_parallel(lambda _: [far])
    main_near.use_parallel(GROUP, [near])

    def raise_no_descriptors():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("selectors.DefaultSelector", raise_no_descriptors)
    with pytest.raises(TransportError, match="Too many open files"):
        main_far.receive(5.0)
    assert far.await_end(0.0)
    for connection in (main_near, main_far, far):
        connection.close()


@pytest.mark.parametrize("half", [b"", b"a record that another thread is just making"])
def test_polling_for_pieces_does_not_block(half, tls):
    near, far = pair(tls)
    while not near.unsent:
        near.push([bytes(PIECE_BYTES)])
    near._socket._tls.write(half)

    def poll_once():
        with pytest.raises(TimeoutError):
            near.receive(0.0)

    looking = threading.Thread(target=poll_once)
    looking.start()
    looking.join(5.0)
    assert not looking.is_alive()
    for connection in (near, far):
        connection.end("the test is over")
        connection.close()


def test_unanswerable_connection_is_dropped():
    near, far = pair()
    far.stop_sending("the other end is gone")
    groups = ParallelGroups()
    executor = SimpleNamespace(_leases=SimpleNamespace(knows=lambda *_: True), _parallel=groups)
    Executor._attend_parallel(executor, far, ParallelAttach("session", "secret", GROUP))
    assert not groups.claim("session", GROUP)
    near.close()


def test_thread_limit_falls_back_to_one_connection(monkeypatch):
    near, far = pair()
    session = ResumingConnection(near, None, 1.0, "server", 2)

    def start(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    near._count_many(MANY_BYTES)
    session.send(Frame(b"more"))
    assert far.receive(10.0).head.endswith(b"more")
    near.close()
    far.close()


def test_frames_sent_before_close_are_received(make_pair_with_or_without_tls):
    for seed in range(3):
        both, sent = (
            make_pair_with_or_without_tls(),
            [Frame(b"head", [random.Random(seed).randbytes(24 * MIB)]), Frame(b"last")],
        )
        both.near.send(Frame(b"first"))
        both.far.receive(10.0)

        def send_and_close(both=both, sent=sent):
            for frame in sent:
                both.far.send(frame)
            both.far.close()

        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(send_and_close)
            for frame in sent:
                assert frames_equal(both.near.receive(10.0), frame)
            with pytest.raises(TransportError):
                both.near.receive(10.0)
            sending.result()


@pytest.mark.parametrize("hangs_up", [False, True])
def test_early_end_closes_all_connections(make_pair, hangs_up):
    both = make_pair(2)
    frame = Frame(b"head", [bytes(2 * PIECE_BYTES)])
    main, large = striped(encode_frame(frame, LIMITS))
    both.near._socket.sendall(b"".join(main))
    (one, _), (other, _) = both.beside
    first, second = (b"".join(encode_frame(piece, LIMITS)) for piece in pieces(1, large))
    one._socket.sendall(first)
    one._socket.shutdown(socket.SHUT_WR)
    if not hangs_up:
        with pytest.raises(TransportError, match="closed the connection"):
            both.far.receive(10.0)
        return
    both.near._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(TimeoutError):
        both.far.receive(0.3)
    other._socket.sendall(second)
    assert frames_equal(both.far.receive(10.0), frame)


@pytest.fixture
def raise_at_line():
    """Raise an exception at a line of the code that receives striped frames. Executed lines are counted."""
    before = sys.gettrace()

    def start(position):
        lines = itertools.count()

        def trace(frame, event, _):
            if event == "line" and next(lines) == position:
                raise SimulatedInterrupt
            return trace

        files = ("parallel_connections.py", "striping.py")
        sys.settrace(lambda frame, *_: trace if Path(frame.f_code.co_filename).name in files else None)

    yield start
    sys.settrace(before)


class SimulatedInterrupt(Exception):
    """An exception that a signal handler could raise."""


def test_interrupted_transfer_loses_no_frame(make_pair, raise_at_line):
    for position in range(0, 120, 3):
        both, sent = make_pair(2), [Frame(b"%d" % n, [bytes([n]) * (2 * PIECE_BYTES)]) for n in range(3)]
        both.near.send(Frame(b"first"))
        both.far.receive(10.0)

        def send(both=both, sent=sent):
            with contextlib.suppress(TransportError):
                for frame in sent:
                    both.near.send(frame)

        sending = threading.Thread(target=send)
        sending.start()
        received = []
        raise_at_line(position)
        with contextlib.suppress(TransportError):
            while len(received) < len(sent):
                with contextlib.suppress(SimulatedInterrupt):
                    received.append(both.far.receive(10.0))
        sys.settrace(None)
        both.close()
        sending.join(10)
        assert all(map(frames_equal, received, sent))


def test_early_pieces_of_next_frame_are_kept(make_pair):
    both = make_pair(2)
    first, second = (Frame(b"%d" % n, [bytes([n]) * (2 * PIECE_BYTES)]) for n in (1, 2))
    (main, large), (next_main, next_large) = (striped(encode_frame(f, LIMITS)) for f in (first, second))
    both.near._socket.sendall(b"".join(main))
    one, other = (near._socket for near, _ in both.beside)
    one.sendall(b"".join(encode_frame(next(iter(pieces(1, large))), LIMITS)))
    early, late = (encode_frame(piece, LIMITS) for piece in pieces(2, next_large))
    sending = threading.Thread(target=one.sendall, args=(b"".join(early),))
    sending.start()
    with pytest.raises(TimeoutError):
        both.far.receive(0.2)
    other.sendall(b"".join(encode_frame(list(pieces(1, large))[1], LIMITS)))
    assert frames_equal(both.far.receive(10.0), first)
    both.near._socket.sendall(b"".join(next_main))
    other.sendall(b"".join(late))
    assert frames_equal(both.far.receive(10.0), second)
    sending.join(10)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda p: [p[0], p[0]], "is not missing"),
        (lambda p: [Frame(p[0].head, [bytes(PIECE_BYTES - 1)])], "is not missing"),
        (lambda p: [Frame(p[0].head[:8] + b"\x63\0\0\0", p[0].body)], "is not missing"),
        (lambda p: [Frame(b"\x00" + p[0].head[1:], p[0].body)], "is not missing"),
        (lambda p: [Frame(p[0].head)], "is not missing"),
        (lambda p: [Frame(p[0].head[:-1], p[0].body)], "is not a piece of a striped frame"),
        (lambda p: [Frame(p[0].head, [bytes(PIECE_BYTES + 1)])], "exceeds the limits"),
    ],
    ids=["twice", "too short", "none of the frame's", "of an earlier frame", "without bytes", "head", "too long"],
)
def test_invalid_piece_ends_connection(make_pair, wrong, said):
    both = make_pair()
    main, large = striped(encode_frame(Frame(b"head", [bytes(3 * PIECE_BYTES)]), LIMITS))
    both.near._socket.sendall(b"".join(main))
    for piece in wrong(list(pieces(1, large))):
        both.beside[0][0]._socket.sendall(b"".join(encode_frame(piece, LIMITS)))
    with pytest.raises(ProtocolError, match=said):
        both.far.receive(5.0)
    with pytest.raises(TransportError):
        both.far.send(Frame(b"more"))


def test_too_many_early_pieces_end_connection(make_pair):
    both = make_pair(2)
    main, large = striped(encode_frame(Frame(b"head", [bytes(2 * PIECE_BYTES)]), LIMITS))
    both.near._socket.sendall(b"".join(main))
    with ThreadPoolExecutor(2) as threads:
        for (one, _), piece in zip(both.beside, pieces(2, large), strict=True):
            threads.submit(one._socket.sendall, b"".join(encode_frame(piece, LIMITS)))
        with pytest.raises(ProtocolError, match="on all connections"):
            both.far.receive(5.0)


def test_striped_frame_before_agreement_is_refused():
    near, far = pair()
    main, _ = striped(encode_frame(Frame(b"head", [bytes(3 * MIB)]), LIMITS))
    near._socket.sendall(b"".join(main))
    with pytest.raises(ProtocolError, match="kind 1"):
        far.receive(5.0)
    near.close()


def test_missing_group_ends_connection():
    near, far = pair()
    beside = pair()
    far.accept_parallel(lambda _: ())
    near.use_parallel(GROUP, [beside[0]])
    with pytest.raises(ProtocolError, match="named unknown parallel connections"):
        far.receive(5.0)
    for connection in (near, far, *beside):
        connection.close()


@pytest.mark.parametrize("end", [0, 1])
def test_parallel_connections_end_together(make_pair_with_or_without_tls, end):
    both = make_pair_with_or_without_tls()
    frame = Frame(b"head", [bytes(64 * MIB)])
    cut = both.beside[1][end]

    def send():
        for _ in range(8):
            both.near.send(frame)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        assert frames_equal(both.far.receive(60.0), frame)
        cut.close()
        with pytest.raises(TransportError):
            for _ in range(8):
                both.far.receive(60.0)
        with pytest.raises(TransportError):
            sending.result(60)
    both.close()
    assert all(connection.fileno() < 0 for connections in both.beside for connection in connections)


def test_close_waits_for_unread_connections_together(make_pair):
    both = make_pair(4)
    both.near.send(Frame(b"first"))
    both.far.receive(10.0)

    def send():
        with pytest.raises(TransportError):
            both.near.send(Frame(b"head", [bytes(64 * MIB)]))

    sending = threading.Thread(target=send)
    sending.start()
    time.sleep(0.3)  # until nothing more is taken in
    ended = time.monotonic()
    both.near.close()
    sending.join(60)
    assert time.monotonic() - ended < 3.0


def test_large_transfer_is_reported_once():
    near, far = pair()
    told = []

    def dial(group):
        raise TransportError("there is no other connection")

    near.stripe(2, dial, lambda: told.append("sent"))
    far.stripe(2, dial, lambda: told.append("received"))
    with ThreadPoolExecutor(1) as threads:
        for number in range(8):
            sending = threads.submit(near.send, Frame(b"", [bytes(4 * MIB)]))
            far.receive(60.0)
            sending.result()
            assert bool(told) == (number >= 3)
    assert sorted(told) == ["received", "sent"]
    near.close()
    far.close()
