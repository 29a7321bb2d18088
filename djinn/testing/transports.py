"""Conformance suite for transports."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from djinn.testing import suite
from djinn.testing.suite import Ending, R, missing, require_protocol, start
from djinn.testing.wiretap import CountingRelay, dial
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Buffer, Connection, Frame, Limits, Listener, Transport
from djinn_core.protocol.net.streams import StreamConnection

# Seconds that a single wait may take. Set CONFORMANCE_SECONDS higher on a machine that does other work as well.
SECONDS = float(os.environ.get("CONFORMANCE_SECONDS", "10"))
LARGE_BYTES = 64 << 20
LIMITS = Limits(head=1 << 20, body=256 << 20, buffers=4096)
SMALL = Limits(head=1000, body=100_000, buffers=8)

_SENDING = "`send` must return once the other end has received the frame"
_CLOSING = "`close` must return once the other end has closed, too"
_BOTH = (
    "`send` and `receive` of a connection wait for each other while both ends send. A thread that sends must not hold what a "
    "thread that receives needs, such as a lock; and where one thread does both, it must go on reading while it cannot write"
)


def outcome(future: Future[R], message: str) -> R:
    """Return the result of a started call. If the call takes longer than `SECONDS` of this module, fail with `message`."""
    return suite.outcome(future, message, SECONDS)


class Served:
    """A transport that listens, and passes accepted connections to the test.

    Attributes:
        transport: the transport.
        listener: the transport's listener.
    """

    def __init__(self, transport: Transport, url: str, limits: Limits) -> None:
        self.transport = transport
        self.listener: Listener = transport.listen(url, limits, self._accept)
        self._accepted: queue.Queue[Connection] = queue.Queue()
        self._opened: list[Connection] = []
        self._over = threading.Event()

    def connect(self, url: str = "", limits: Limits = LIMITS) -> tuple[Connection, Connection]:
        """Open a connection, and return both ends. The client's end is first."""
        client = self.transport.connect(url or self.listener.url, limits, SECONDS)
        try:
            server = self._accepted.get(timeout=SECONDS)
        except queue.Empty:
            pytest.fail(f"`connect` has returned, and the listener has not called `accept` in {SECONDS:g} s")
        self._opened += [client, server]
        return client, server

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._over.set()
        for connection in self._opened:
            connection.close()
        self.listener.close()

    def _accept(self, connection: Connection) -> None:
        self._accepted.put(connection)
        self._over.wait()


def frames_equal(left: Frame, right: Frame) -> bool:
    """Return True if two frames have equal heads, and bodies of equal buffers."""
    return left.head == right.head and [bytes(b) for b in left.body] == [bytes(b) for b in right.body]


def check_own_names(connection: Connection) -> None:
    """Fail if a subclass of `StreamConnection` assigns an attribute that the base class uses for itself."""
    for name, kind in StreamConnection.OWN.items() if isinstance(connection, StreamConnection) else ():
        value = getattr(connection, name, None)
        assert isinstance(value, kind), (
            f"`{name}` of {type(connection).__name__} is a {type(value).__name__}: `StreamConnection` has a {kind.__name__} "
            "of that name. Choose another name, and call `super().__init__`"
        )


def send_all(sender: Connection, frames: Iterable[Frame]) -> None:
    """Send `frames` one after the other."""
    for frame in frames:
        sender.send(frame)


def receive_many(receiver: Connection, count: int) -> list[Frame]:
    """Receive the next `count` frames."""
    return [receiver.receive(SECONDS) for _ in range(count)]


def eventually(condition: Callable[[], bool]) -> bool:
    """Return True if `condition` becomes true within a few seconds."""
    deadline = time.monotonic() + SECONDS / 3
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class TransportConformance(Ending):
    """Tests that every transport must pass.

    Subclass this class and define the fixtures `transport` and `listen_url`. Several listeners must be able to listen
    at `listen_url`. If the URL names neither a TCP socket nor a Unix socket, override the fixture `wire` to return
    False. Then the tests that need a relay or a foreign client are skipped, and `test_calls_in_any_order` breaks no
    connections.

    A wait that does not end fails after 10 s. The environment variable CONFORMANCE_SECONDS changes this limit.
    """

    # Runs of `test_calls_in_any_order`, each of up to 30 calls. Set it higher to look further.
    stateful_examples: ClassVar[int] = 20
    # True if the transport closes all descriptors of this process after its connections and listeners are closed.
    returns_descriptors: ClassVar[bool] = True

    @pytest.fixture
    def transport(self) -> Transport:
        """Return the transport under test."""
        return missing(self, "transport", "your transport")  # type: ignore[return-value]

    @pytest.fixture
    def listen_url(self) -> str:
        """Return a URL to listen at, such as `tcp://127.0.0.1:0`.

        Each listener needs its own address, as with port 0.
        """
        return missing(self, "listen_url", "a URL to listen at")  # type: ignore[return-value]

    @pytest.fixture
    def wire(self) -> bool:
        """Return True if a plain TCP or Unix socket can connect to the listener's URL."""
        return True

    @pytest.fixture
    def uncounted_bytes(self) -> int:
        """Return the maximum number of bytes per direction that the counters of a connection may leave out.

        By default, the transport must count every byte. If a library makes the handshake or frames (WebSocket, HTTP),
        override this fixture with a bound.
        """
        return 0

    @pytest.fixture
    def served(self, transport: Transport, listen_url: str) -> Iterator[Served]:
        """Yield the transport while it listens with `LIMITS`."""
        served = Served(transport, listen_url, LIMITS)
        yield served
        outcome(
            start(served.close),
            "`close` of connections and of the listener must not wait for threads that wait themselves",
        )

    @pytest.fixture
    def ends(self, served: Served) -> tuple[Connection, Connection]:
        """Return the two ends of a connection. The client's end is first."""
        return served.connect()

    @pytest.fixture(params=["up", "down"])
    def direction(
        self, ends: tuple[Connection, Connection], request: pytest.FixtureRequest
    ) -> tuple[Connection, Connection]:
        """Return sender and receiver: in one run from client to server, and in another run from server to client."""
        return ends if request.param == "up" else (ends[1], ends[0])

    def test_transport_has_every_member(self, transport: Transport, ends: tuple[Connection, Connection]) -> None:
        """The transport and its connections have all attributes and methods of their Protocols."""
        require_protocol(transport, "transports")
        assert transport.schemes
        for end in ends:
            assert isinstance(end, Connection), f"{type(end).__name__} is no djinn.hooks.Connection"
            assert end.limits == LIMITS
            check_own_names(end)

    # --- what is sent arrives -------------------------------------------------------------------------------

    def test_frames_arrive_whole_and_in_order(self, direction: tuple[Connection, Connection]) -> None:
        """Heads and bodies of any size arrive complete and in order, including empty ones."""
        sender, receiver = direction
        chance = random.Random(7)  # noqa: S311 - a test's variety
        sizes = (0, 0, 1, 7, 100, 16_383, 16_384, 70_000, 300_000)
        sent = [
            Frame(
                chance.randbytes(chance.choice(sizes)), [chance.randbytes(chance.choice(sizes)) for _ in range(n % 5)]
            )
            for n in range(60)
        ]
        sending = start(send_all, sender, sent)
        for frame in sent:
            assert frames_equal(receiver.receive(SECONDS), frame)
        outcome(sending, _SENDING)

    def test_many_small_frames(self, direction: tuple[Connection, Connection]) -> None:
        """A thousand frames arrive in order, and none is lost or repeated."""
        sender, receiver = direction
        sending = start(send_all, sender, [Frame(str(n).encode()) for n in range(1000)])
        assert [int(receiver.receive(SECONDS).head) for _ in range(1000)] == list(range(1000))
        outcome(sending, _SENDING)

    def test_large_bodies(self, direction: tuple[Connection, Connection]) -> None:
        """A body of 64 MiB arrives, in one buffer and in several buffers."""
        sender, receiver = direction
        data = np.random.default_rng(7).integers(0, 256, LARGE_BYTES, np.uint8)
        view = memoryview(data)  # type: ignore[arg-type]
        third = LARGE_BYTES // 3
        for body in ([view], [view[:third], view[third:third], view[third:]]):
            sending = start(sender.send, Frame(b"large", body))
            received = receiver.receive(SECONDS)
            outcome(sending, _SENDING)
            assert [memoryview(buffer).nbytes for buffer in received.body] == [len(buffer) for buffer in body]
            assert np.array_equal(np.concatenate([np.frombuffer(b, np.uint8) for b in received.body]), data)

    def test_every_kind_of_buffer(self, direction: tuple[Connection, Connection]) -> None:
        """Buffers of any type arrive. Empty buffers keep their positions, and received buffers are writable."""
        sender, receiver = direction
        floats = memoryview(np.arange(6, dtype=np.float32).reshape(2, 3))  # type: ignore[arg-type]
        body: list[Buffer] = [b"", b"abc", bytearray(b"de"), floats, memoryview(b"xyz")[1:2], bytearray(), b""]
        sender.send(Frame(b"", body))
        received = receiver.receive(SECONDS)
        assert received.head == b""
        assert [bytes(buffer) for buffer in received.body] == [bytes(buffer) for buffer in body]
        assert not any(memoryview(buffer).readonly for buffer in received.body if len(buffer))

    @pytest.mark.parametrize("size", [10, 200_000, 8 << 20])
    def test_buffers_may_be_reused_after_send(self, direction: tuple[Connection, Connection], size: int) -> None:
        """The caller may overwrite its buffers once `send` has returned."""
        sender, receiver = direction
        buffer = bytearray(b"a" * size)

        def send_and_overwrite() -> None:
            sender.send(Frame(b"", [buffer]))
            buffer[:] = b"b" * size

        sending = start(send_and_overwrite)
        if size < 1000:
            outcome(sending, "`send` of a few bytes must not wait until the other end receives them")
        assert bytes(receiver.receive(SECONDS).body[0]) == b"a" * size
        outcome(sending, _SENDING)

    def test_small_frames_are_sent_without_a_reader(self, direction: tuple[Connection, Connection]) -> None:
        """`send` returns although nobody reads, while at most 128 KiB are unread."""
        sender, receiver = direction
        frames = [Frame(b"%d" % n, [bytes([n]) * 30_000]) for n in range(4)]
        outcome(start(send_all, sender, frames), "`send` must not wait for a reader while 128 KiB or less are unread")
        assert all(frames_equal(receiver.receive(SECONDS), frame) for frame in frames)

    def test_received_buffers_keep_their_content(self, direction: tuple[Connection, Connection]) -> None:
        """The buffers of a received frame keep their content while a view of them exists, even if more frames arrive."""
        sender, receiver = direction
        frames = []
        for n in range(4):
            sending = start(sender.send, Frame(b"", [bytes([n]) * (1 << 20)]))
            frames.append(memoryview(receiver.receive(SECONDS).body[0])[1000:1010])
            outcome(sending, _SENDING)
        assert [bytes(view) for view in frames] == [bytes([n]) * 10 for n in range(4)]

    # --- several threads ------------------------------------------------------------------------------------

    def test_frames_of_several_senders_do_not_mix(self, direction: tuple[Connection, Connection]) -> None:
        """Frames of several sending threads arrive complete. The frames of each thread arrive in order."""
        sender, receiver = direction

        def send_all(who: int) -> None:
            for n in range(40):
                sender.send(Frame(f"{who} {n}".encode(), [bytes([who]) * (n * 2500)]))

        sending = [start(send_all, who) for who in range(4)]
        received: dict[int, list[int]] = {who: [] for who in range(4)}
        for _ in range(160):
            frame = receiver.receive(SECONDS)
            who, n = map(int, frame.head.split())
            assert bytes(frame.body[0]) == bytes([who]) * (n * 2500)
            received[who].append(n)
        assert all(numbers == list(range(40)) for numbers in received.values())
        for future in sending:
            outcome(future, _SENDING)

    def test_both_ends_send_at_once(self, ends: tuple[Connection, Connection]) -> None:
        """Both ends can send at the same time, each more than all buffers hold."""
        data = bytes(8 << 20)
        sending = [start(send_all, end, [Frame(b"x", [data])] * 6) for end in ends]
        receiving = [start(receive_many, end, 6) for end in ends]
        for future in receiving:
            assert all(len(frame.body[0]) == len(data) for frame in outcome(future, _BOTH))
        for sent in sending:
            outcome(sent, _BOTH)

    def test_connections_are_independent(self, served: Served) -> None:
        """Other connections still work after one connection was closed."""
        pairs = [served.connect() for _ in range(6)]
        closing = [start(pairs[2][0].close), start(pairs[4][1].close)]  # a `close` may wait until the other end closes
        for n in (0, 1, 3, 5):
            client, server = pairs[n]
            client.send(Frame(b"ping %d" % n))
            server.send(server.receive(SECONDS))
            assert client.receive(SECONDS).head == b"ping %d" % n
        pairs[2][1].close()
        pairs[4][0].close()
        for connection in closing:
            outcome(connection, _CLOSING)

    # --- time -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("timeout", [0.0, 0.05])
    def test_a_timeout_loses_nothing(self, direction: tuple[Connection, Connection], timeout: float) -> None:
        """`receive` raises `TimeoutError` in time, and a later call receives the next frame."""
        sender, receiver = direction
        for n in range(3):
            start = time.monotonic()
            with pytest.raises(TimeoutError):
                receiver.receive(timeout)
            assert time.monotonic() - start < timeout + 60
            sender.send(Frame(b"%d" % n, [bytes(20_000)]))
            frame = receiver.receive(SECONDS)
            assert (frame.head, len(frame.body[0])) == (b"%d" % n, 20_000)

    @pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
    def test_timeouts_within_a_frame_lose_nothing(self, served: Served, wire: bool, tmp_path: Path, up: bool) -> None:
        """If a timeout interrupts a frame, the next `receive` continues with the rest of the frame."""
        if not wire:
            pytest.skip("no relay can stand between the ends of this transport")
        data = np.random.default_rng(7).integers(0, 256, 5 << 20, np.uint8)
        waits = 0
        with CountingRelay(served.listener.url, tmp_path, pause_bytes=300_000) as relay:
            ends = served.connect(relay.url)
            sender, receiver = ends if up else ends[::-1]
            sending = start(send_all, sender, [Frame(b"", [memoryview(data)])] * 3)  # type: ignore[arg-type]
            received: list[Frame] = []
            patience = time.monotonic() + SECONDS
            while len(received) < 3:
                assert time.monotonic() < patience, (
                    "repeated calls of `receive(0.0)` must return a frame whose bytes arrive in pieces"
                )
                try:
                    received.append(receiver.receive(0.0))
                except TimeoutError:
                    waits += 1
                    relay.resume()
                    time.sleep(0.0005)
            outcome(sending, _SENDING)
        assert waits >= 10  # the relay paused more often, also where several connections share the bytes
        assert all(np.array_equal(np.frombuffer(frame.body[0], np.uint8), data) for frame in received)

    # --- the end --------------------------------------------------------------------------------------------

    def test_close_wakes_a_receive(self, direction: tuple[Connection, Connection]) -> None:
        """`close` makes a waiting `receive` raise `TransportError` at both ends.

        Later calls fail, and a second `close` has no effect.
        """
        closer, other_end = direction
        waiting = [start(end.receive) for end in direction]
        time.sleep(0.2)
        closer.close()
        for future in waiting:
            with pytest.raises(TransportError):
                outcome(future, "`close` must wake a thread that receives, at this end and at the other one")
        closer.close()
        with pytest.raises(TransportError):
            closer.send(Frame(b"x"))
        with pytest.raises(TransportError):
            closer.receive(SECONDS)
        with pytest.raises(TransportError):
            other_end.receive(SECONDS)
        other_end.close()

    def test_close_cancels_a_send(self, direction: tuple[Connection, Connection]) -> None:
        """A waiting `send` raises `TransportError`.

        The other end never receives bytes that the sender writes afterwards.
        """
        sender, receiver = direction
        buffer = bytearray(LARGE_BYTES)
        sending = start(sender.send, Frame(b"cancelled", [buffer]))
        time.sleep(0.2)
        sender.close()
        # a transport that stores whole bodies, such as an HTTP server, has accepted it by now
        with suppress(TransportError):
            outcome(sending, "`close` must wake a thread that sends")
        buffer[:] = b"x" * LARGE_BYTES
        with suppress(TransportError, ProtocolError, TimeoutError):  # an HTTP transport may notice it late
            assert not np.frombuffer(receiver.receive(1.0).body[0], np.uint8).any()

    def test_frames_sent_before_close_arrive(self, direction: tuple[Connection, Connection]) -> None:
        """Frames that were sent before `close` arrive. Then the connection ends, even if the other end is sending."""
        sender, receiver = direction
        receiver.send(Frame(b"this stays unread"))
        for n in range(5):
            sender.send(Frame(b"%d" % n, [bytes(10_000)]))
        closing = start(sender.close)
        assert [receiver.receive(SECONDS).head for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        with pytest.raises(TransportError):
            receiver.receive(SECONDS)
        receiver.close()
        outcome(closing, _CLOSING)

    def test_a_broken_connection_fails_the_sender(self, direction: tuple[Connection, Connection]) -> None:
        """`send` raises `TransportError` on a broken connection, at the latest after a few frames."""
        closer, sender = direction
        closer.close()

        def send_until_it_fails() -> None:
            for _ in range(100):
                sender.send(Frame(b"x", [bytes(100_000)]))
                time.sleep(0.02)

        with pytest.raises(TransportError):
            send_until_it_fails()

    @pytest.mark.parametrize("size", [10, 64 << 20], ids=["small", "large"])
    def test_close_reason_survives_a_failed_send(self, direction: tuple[Connection, Connection], size: int) -> None:
        """If the other end closes with a reason, `send` raises `TransportError`. Then `receive` returns the reason."""
        closer, sender = direction

        def send_until_it_fails() -> None:
            for _ in range(1000):
                sender.send(Frame(b"this stays unread", [bytes(size)]))
                time.sleep(0.01)

        sending = start(send_until_it_fails)
        time.sleep(0.05)
        closer.send(Frame(b"the reason"))
        closer.close()
        with pytest.raises(TransportError):
            outcome(sending, "`send` must end if the other end has closed the connection")
        with pytest.raises(TransportError):
            sender.send(Frame(b"still unread"))
        assert sender.receive(SECONDS).head == b"the reason"
        with pytest.raises(TransportError):
            sender.receive(SECONDS)

    @pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
    def test_returning_accept_ends_the_connection(self, transport: Transport, listen_url: str, fails: bool) -> None:
        """After `accept` has returned or raised, frames that it sent still arrive, and the next client is served."""

        def accept(connection: Connection) -> None:
            connection.send(Frame(b"refused"))
            if fails:
                raise ProtocolError("the test says so")

        listener = transport.listen(listen_url, LIMITS, accept)
        try:
            for _ in range(2):
                client = transport.connect(listener.url, LIMITS, SECONDS)
                assert client.receive(SECONDS).head == b"refused"
                with pytest.raises(TransportError):
                    client.receive(SECONDS)
                client.close()
        finally:
            listener.close()

    def test_a_closed_listener_refuses_and_frees_its_address(self, transport: Transport, served: Served) -> None:
        """After a listener was closed, existing connections still work, and the address can be used again.

        `connect` raises `TransportError` with the URL.
        """
        client, server = served.connect()
        url = served.listener.url
        served.listener.close()
        client.send(Frame(b"still here"))
        server.send(server.receive(SECONDS))
        assert client.receive(SECONDS).head == b"still here"
        start = time.monotonic()
        with pytest.raises(TransportError) as caught:
            transport.connect(url, LIMITS, 5.0)
        assert url in str(caught.value)
        assert time.monotonic() - start < 60
        again = Served(transport, url, LIMITS)
        again.connect()
        again.close()

    def test_calls_in_any_order(self, transport: Transport, listen_url: str, wire: bool) -> None:
        """In any order of calls, each direction of a connection is a queue that loses no frame.

        `djinn.testing.transports_stateful` makes the calls.
        """
        pytest.importorskip("hypothesis", reason="it needs Hypothesis: `pip install hypothesis`")
        from djinn.testing.transports_stateful import run_transport_states

        run_transport_states(
            transport,
            listen_url,
            wire=wire,
            descriptors=self.returns_descriptors,
            examples=self.stateful_examples,
        )

    # --- limits of unauthenticated clients ------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "frame",
        [Frame(bytes(1001)), Frame(b"", [bytes(100_001)]), Frame(b"", [bytes(60_000)] * 2), Frame(b"", [b""] * 9)],
        ids=["head", "buffer", "body", "buffers"],
    )
    def test_received_frames_respect_limits(
        self, direction: tuple[Connection, Connection], served: Served, frame: Frame
    ) -> None:
        """`receive` raises `ProtocolError` for an oversized frame, and closes this connection.

        Other connections still work.
        """
        sender, receiver = direction
        other_client = served.connect()
        receiver.limits = SMALL
        with suppress(TransportError):  # the other end may close while we send
            sender.send(frame)
        with pytest.raises(ProtocolError, match="exceeds the limits"):
            receiver.receive(SECONDS)
        with pytest.raises((TransportError, ProtocolError)):
            receiver.receive(SECONDS)
        with pytest.raises(TransportError):
            sender.receive(SECONDS)
        other_client[0].send(frame)
        assert frames_equal(other_client[1].receive(SECONDS), frame)

    def test_sent_frames_respect_limits(self, direction: tuple[Connection, Connection]) -> None:
        """`send` raises `ProtocolError` for an oversized frame, and sends nothing.

        The connection still works, and wider limits apply at once.
        """
        sender, receiver = direction
        frame = Frame(b"x", [bytes(100_001)])
        sender.limits = SMALL
        with pytest.raises(ProtocolError, match="exceeds the limits"):
            sender.send(frame)
        sender.limits = LIMITS
        sender.send(frame)
        assert frames_equal(receiver.receive(SECONDS), frame)

    @pytest.mark.parametrize("garbage", [b"", b"\x00" * 64, b"\x16\x03\x01" * 100, b"GET / HTTP/1.1\r\n\r\n", b"DJNF"])
    def test_garbage_from_an_unauthenticated_client_harms_no_other(
        self, served: Served, wire: bool, garbage: bytes
    ) -> None:
        """Garbage ends at most the connection that it arrived on.

        Other clients are served before, during and after it.
        """
        if not wire:
            pytest.skip("a plain socket cannot connect to this transport")
        client, server = served.connect()
        with dial(served.listener.url) as garbled:
            garbled.sendall(garbage)
            client.send(Frame(b"meanwhile"))
            assert server.receive(SECONDS).head == b"meanwhile"
        # If connections are accepted before their first byte is read, the garbled one was accepted first.
        intruder = self._intruder(served)
        if intruder is not None:
            with pytest.raises((ProtocolError, TransportError)):
                intruder.receive(SECONDS)
            intruder.close()
        client, server = served.connect()
        client.send(Frame(b"after"))
        assert server.receive(SECONDS).head == b"after"

    def test_counters_match_bytes_on_the_wire(
        self, served: Served, wire: bool, tmp_path: Path, uncounted_bytes: int
    ) -> None:
        """Counters include framing and other overhead of the transport.

        They may leave out at most `uncounted_bytes`.
        """
        if not wire:
            pytest.skip("no relay can stand between the ends of this transport")
        with CountingRelay(served.listener.url, tmp_path) as relay:
            client, server = served.connect(relay.url)
            for size in (0, 10, 100_000, 3 << 20):
                sending = start(client.send, Frame(b"up", [bytes(size)]))
                server.receive(SECONDS)
                outcome(sending, _SENDING)
                sending = start(server.send, Frame(b"down", [bytes(size // 2), b"x"]))
                client.receive(SECONDS)
                outcome(sending, _SENDING)

            def left_out() -> tuple[int, ...]:
                up = [relay.bytes_up - count for count in (client.bytes_sent, server.bytes_received)]
                return (*up, *(relay.bytes_down - count for count in (client.bytes_received, server.bytes_sent)))

            assert eventually(lambda: all(0 <= n <= uncounted_bytes for n in left_out())), (
                f"a relay saw {relay.bytes_up} bytes up and {relay.bytes_down} down. `bytes_sent` and `bytes_received` of "
                f"client and server leave out {left_out()} of them, but may leave out only {uncounted_bytes}. If a library "
                "sends bytes by itself, such as a handshake, return their bound in the fixture `uncounted_bytes`"
            )
            assert relay.bytes_up > 3 << 20
            client.close()
            server.close()

    @staticmethod
    def _intruder(served: Served) -> Connection | None:
        with suppress(queue.Empty):
            return served._accepted.get(timeout=0.2)  # noqa: SLF001 - the suite's own
        return None
