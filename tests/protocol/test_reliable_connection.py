"""Frames over connections that lose frames and break arrive once, in order, with the bytes that were sent."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable

import pytest

from djinn_client.runtime.connecting.reconnect import ResumingConnection
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.protocol.delivery.reconnect_limit import BREAKS_LIMIT
from djinn_core.protocol.delivery.reliable_connection import NotReconnected
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.frame_order import KEPT_LIMIT, AckFlags, FrameOrder, Inbox, Outbox, Prefix, split
from djinn_core.wire.messages import Goodbye, Refused, decode, encode
from djinn_core.wire.peer_messages import CLIENT, SendValues
from djinn_core.wire.resume_messages import Resume, Resumed
from djinn_core.wire.state_messages import PIECE, StateRequest
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.disk_quota import DiskQuota
from djinn_server.inline import QueueConnection, connected_pair
from djinn_server.launch.executor_config import RecoveryConfig
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.recovery.journal import SessionIdentity
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.recovery.leases import Leases
from djinn_server.running.cancellation import CancellationState, poll_connection
from djinn_server.running.fair_share import FairShare
from djinn_server.session import ExecutorSession
from djinn_server.session_machine import Cause
from djinn_server.session_pauses import serve_here
from djinn_server.usage_metrics import UsageMetrics


class LossyConnection(Connection):
    """A connection on a fake bad network, which loses some frames and breaks at some."""

    def __init__(self, inner: QueueConnection, chance: Callable[[], float], loses: float, breaks: float) -> None:
        self.inner = inner
        self.limits = inner.limits
        self._chance, self._loses, self._breaks = chance, loses, breaks

    bytes_sent = property(lambda self: self.inner.bytes_sent)
    bytes_received = property(lambda self: self.inner.bytes_received)

    def send(self, frame: Frame) -> None:
        luck = self._chance()
        if luck < self._breaks:
            self.inner.close()
            raise TransportError("broken on purpose")
        if luck < self._breaks + self._loses:
            return
        self.inner.send(frame)

    def receive(self, timeout: float | None = None) -> Frame:
        return self.inner.receive(timeout)

    def close(self) -> None:
        self.inner.close()


class Network:
    """A network that makes pairs of connections between one client and its leased session."""

    def __init__(self, seed: int, loses: float = 0.0, breaks: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._odds = loses, breaks
        self.leases = Leases(RecoveryConfig(60.0), UsageMetrics(), DiskQuota())
        ours, theirs = self._pair()
        self.server = self.leases.lease(SessionIdentity("s", "a client", "told at the beginning", NO_TENANT), theirs)
        self.client = ResumingConnection(ours, self._dial, 60.0, "the server")

    def _pair(self) -> tuple[Connection, Connection]:
        loses, breaks = self._odds
        ours, theirs = (LossyConnection(end, self._random.random, loses, breaks) for end in connected_pair())
        return ours, theirs

    def _dial(self, taken: int, _: float) -> tuple[Connection, int]:
        ours, theirs = self._pair()
        resume = Resume("s", self.server.secret, taken)
        threading.Thread(target=self.leases.serve, args=(theirs, resume), daemon=True).start()
        try:
            answer = decode(ours.receive(120.0).head)
        except TimeoutError:
            raise TransportError("lost on purpose") from None
        assert isinstance(answer, Resumed), answer
        return ours, answer.received


def _receive(server: LeasedConnection) -> Frame:
    """Return the next frame. Wait while the client is away, as a session does."""
    changed = threading.Event()
    server.call_when_changed(changed.set)
    while True:
        changed.clear()
        try:
            return server.receive()
        except TimeoutError:
            until = server.away_until
            if until is not None:
                changed.wait(max(0.0, until - time.monotonic()))


def _echo(server: LeasedConnection) -> None:
    with contextlib.suppress(TransportError):
        while True:
            frame = _receive(server)
            server.send(Frame(frame.head, frame.body))


@pytest.mark.parametrize(("loses", "breaks"), [(0.0, 0.0), (1 / 7, 0.0), (0.0, 0.05), (0.1, 0.03)])
def test_every_frame_arrives_once_and_in_order(loses: float, breaks: float) -> None:
    network, count = Network(11, loses, breaks), 120
    echoing = threading.Thread(target=_echo, args=(network.server,), daemon=True)
    echoing.start()
    came: list[tuple[bytes, bytes]] = []
    for i in range(count):
        memory = bytearray([i]) * (20_000 if i % 9 == 0 else 10)
        network.client.send(Frame(b"%d" % i, [memory]))
        network.client.copy_borrowed()
        memory[:] = bytes(len(memory))  # the caller's again
        if i % 5 == 4:
            came += [(f.head, bytes(f.body[0])) for f in (network.client.receive(120.0) for _ in range(5))]
    assert came == [(b"%d" % i, bytes([i]) * (20_000 if i % 9 == 0 else 10)) for i in range(count)]
    network.client.close()
    network.server.close()
    echoing.join(60.0)
    assert (network.client.resumed > 0) == (breaks > 0)


def test_reconnection_observer_may_use_session() -> None:
    network, told = Network(0), list[float]()
    client = network.client
    threading.Thread(target=_echo, args=(network.server,), daemon=True).start()

    def note_reconnection(seconds: float) -> None:
        told.append(seconds)
        if len(told) == 1:
            client._inner.close()
            client.send(Frame(b"of the observer"))

    client.call_when_resumed(note_reconnection)
    client._inner.close()
    sending = threading.Thread(target=client.send, args=(Frame(b"of the program"),), daemon=True)
    sending.start()
    sending.join(30.0)
    assert not sending.is_alive()
    assert [client.receive(30.0).head for _ in range(2)] == [b"of the program", b"of the observer"]
    assert client.resumed == len(told) == 2
    client.close()
    network.server.close()


def test_interrupted_reconnections_count_as_one_break() -> None:
    network, interrupts = Network(0), iter(range(2 * BREAKS_LIMIT))
    client = network.client

    def dial(taken: int, seconds: float) -> tuple[Connection, int]:
        if next(interrupts, None) is not None:
            raise NotReconnected  # as Ctrl-C does
        return network._dial(taken, seconds)

    client._redial = dial
    threading.Thread(target=_echo, args=(network.server,), daemon=True).start()
    client._inner.close()
    client.send(Frame(b"before Ctrl-C"))
    deadline, found = time.monotonic() + 60.0, None
    while found is None and time.monotonic() < deadline:
        with contextlib.suppress(NotReconnected):
            found = client.receive(30.0).head
    assert found == b"before Ctrl-C"
    assert next(interrupts, None) is None
    client.close()
    network.server.close()


class GarbledConnection(LossyConnection):
    """A connection that receives only invalid frames."""

    def receive(self, timeout: float | None = None) -> Frame:
        raise ProtocolError("not a frame")


def test_silent_peer_is_given_up_with_reason() -> None:
    network, dialled = Network(0), []

    def dial(taken: int, seconds: float) -> tuple[Connection, int]:
        inner, received = network._dial(taken, seconds)
        dialled.append(inner)
        return GarbledConnection(inner, lambda: 1.0, 0.0, 0.0), received

    ours, _ = connected_pair()
    client = ResumingConnection(GarbledConnection(ours, lambda: 1.0, 0.0, 0.0), dial, 60.0, "the server")
    with pytest.raises(ProtocolError, match="not a frame"):
        client.receive(60.0)
    assert 1 <= len(dialled) <= 5


def test_lease_expires_without_reconnection() -> None:
    ours, theirs = connected_pair()
    server = LeasedConnection(theirs, 0.05, UsageMetrics())
    ours.close()
    with pytest.raises(TransportError, match=r"did not reconnect within 0\.05 s"):
        _receive(server)


def test_ended_session_does_not_wait_for_client() -> None:
    ours, theirs = connected_pair()
    server = LeasedConnection(theirs, 60.0, UsageMetrics())
    ours.close()
    threading.Timer(0.05, server.expire).start()
    with pytest.raises(TransportError, match="closed"):
        _receive(server)


@pytest.mark.parametrize("wrong", ["session", "secret"])
def test_wrong_secret_is_refused_as_unknown_session(wrong: str) -> None:
    network = Network(0)
    ours, theirs = connected_pair()
    asked = Resume("s", "guessed", 0) if wrong == "secret" else Resume("t", network.server.secret, 0)
    network.leases.serve(theirs, asked)
    assert decode(ours.receive(120.0).head) == Refused("there is no such session (any more)")


def test_refused_client_gives_up_with_reason() -> None:
    network = Network(0)

    def refuse(taken: int, _: float) -> tuple[Connection, int]:
        from djinn_core.errors import AccessRefused

        raise AccessRefused("gone")

    network.client._redial = refuse
    network.server._inner.close()
    with pytest.raises(TransportError, match="refuses to resume the session: gone"):
        network.client.receive(120.0)


def test_frames_before_refusal_are_received() -> None:
    network = Network(0)
    network.server.send(Frame(encode(Refused("why"))))
    network.server._inner.close()
    network.client.expire()
    assert decode(network.client.receive(120.0).head) == Refused("why")


def test_invalid_acknowledgements_are_refused() -> None:
    outbox = Outbox()
    outbox.put(Frame(b"a"))
    with pytest.raises(ProtocolError, match="2 frames of 1"):
        outbox.acknowledge(2)
    with pytest.raises(ProtocolError, match="no number"):
        split(Frame(b"short"))
    with pytest.raises(ProtocolError, match="unknown"):
        split(Frame(b"\0" * 8 + b"\x08"))
    with pytest.raises(ProtocolError, match="body"):
        split(Frame(Prefix(0, 0).encode(), [b"x"]))


def test_unacknowledged_frames_are_bounded():
    outbox = Outbox()
    for _ in range(KEPT_LIMIT):
        outbox.put(Frame(b"a"))
    with pytest.raises(ProtocolError, match="has acknowledged none"):
        outbox.put(Frame(b"a"))


def test_small_bodies_are_copied_at_send() -> None:
    outbox, written = Outbox(), bytearray(b"before")
    outbox.put(Frame(b"a", [b"", memoryview(written)]))
    written[:] = b"behind"
    ((_, frame),) = outbox.kept()
    assert b"".join(frame.body) == b"before"


def test_frame_counters_wrap_around() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox._sent = inbox.received = (1 << 32) - 1
    assert [outbox.put(Frame(b"a")), outbox.put(Frame(b"b"))] == [0, 1]
    assert [inbox.judge(1), inbox.judge(0)] == [FrameOrder.AHEAD, FrameOrder.NEXT]
    inbox.take()
    assert [inbox.judge(0), inbox.judge(1)] == [FrameOrder.REPEATED, FrameOrder.NEXT]
    inbox.take()
    outbox.acknowledge(inbox.received)
    assert outbox.empty
    assert split(Frame(Prefix(5, 6, AckFlags.RETRANSMIT).encode())) == (Prefix(5, 6, AckFlags.RETRANSMIT), b"")


def test_stale_acknowledgement_is_ignored() -> None:
    network = Network(seed=0)
    wire = network.client._inner.inner
    sent, plain = [], wire.send
    wire.send = lambda frame: (sent.append(split(frame)), plain(frame))
    for number in range(3):
        network.client.send(Frame(b"%d" % number))
        network.client._send_note(AckFlags.ACK_REQUEST)  # the other end is slow, and is asked again and again
    for number in range(3):
        assert bytes(network.server.receive(120.0).head) == b"%d" % number
    network.server.send(Frame(b"done"))
    with contextlib.suppress(TimeoutError):
        network.server.receive(0.1)  # the last question
    assert bytes(network.client.receive(120.0).head) == b"done"
    with contextlib.suppress(TimeoutError):
        network.client.receive(0.1)
    assert [bytes(head) for prefix, head in sent if head] == [b"0", b"1", b"2"]
    answer = Prefix(5, 6, AckFlags.ACK_REPLY, 4)
    assert split(Frame(answer.encode())) == (answer, b"")
    with pytest.raises(ProtocolError, match="lacks the number"):
        split(Frame(Prefix(5, 6, AckFlags.ACK_REPLY).encode()[:-1]))


@pytest.mark.parametrize("asked", [StateRequest(1 << 30), SendValues(1, CLIENT, pack_handles([1 << 32 | 1]))])
def test_large_reply_resumes_after_break(asked: StateRequest | SendValues) -> None:
    network, data = Network(0), random.Random(1).randbytes(6 * PIECE)
    client, server, session = network.client, network.server, ExecutorSession(ExecutorContext.of(CpuRuntime()))
    server._window = PIECE
    client.send(Frame(encode(UploadPart(1 << 32 | 1, "uint8", (len(data),), (1,), len(data))), [data]))
    client.send(Frame(encode(asked)))
    client._inner.close()
    pauses = session.pauses(server)
    pause = next(pauses)
    assert server._outbox.nbytes <= 3 * PIECE, "it keeps more than the window for a client that is away"
    came = bytearray()

    def read() -> None:
        while len(came) < len(data):
            for part in client.receive(120.0).body:
                came.extend(part if len(part) == PIECE else b"")
        client.send(Frame(encode(Goodbye())))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    serve_here(itertools.chain([pause], pauses), session.wakeup)
    reading.join(120.0)
    assert came == data
    session.close()
    server.close()


def test_large_reply_ends_with_lease() -> None:
    ours, theirs = connected_pair()
    server = LeasedConnection(theirs, 0.05, UsageMetrics())
    server._window = PIECE
    ours.close()
    steps = server.send_each(Frame(b"a", [bytes(PIECE)]) for _ in range(100))
    wait = next(steps)
    while not wait.has_arrived((Cause.CLIENT, 0)):
        time.sleep(0.01)
    with pytest.raises(TransportError, match=r"did not reconnect within 0\.05 s"):
        next(steps)


@pytest.mark.parametrize(("received", "error"), [(0, TransportError), (7, ProtocolError)])
def test_short_reconnection_is_reported(received: int, error: type) -> None:
    network, told = Network(0), list[int]()
    network.server.call_when_changed(lambda: told.append(1))
    _, broken = connected_pair()
    broken.close()
    with pytest.raises(error):
        network.server.resume(broken, received)
    assert told, "a session that waits for the connection before would wait for ever"
    with pytest.raises(TimeoutError):
        network.server.receive(0.0)
    assert network.server.away_until is not None
    network.server.send(Frame(b"later"))
    assert network.client.receive(120.0).head == b"later"
    assert network.server.away_until is None


class OvertakenConnection(LossyConnection):
    """A connection that breaks while it is read, after the client has already reconnected."""

    def receive(self, timeout: float | None = None) -> Frame:
        self.replaced()
        raise TransportError("broken on purpose")


def test_reconnected_client_is_not_away() -> None:
    ours, theirs = connected_pair()
    overtaken = OvertakenConnection(connected_pair()[1], lambda: 1.0, 0.0, 0.0)
    server = LeasedConnection(overtaken, 60.0, UsageMetrics())
    overtaken.replaced = lambda: server.resume(theirs, 0)
    poll_connection(CancellationState(FairShare().share(), UsageMetrics()), server)
    assert isinstance(decode(ours.receive(1.0).head), Resumed)
    assert server.away_until is None
    assert server.lease_seconds_left() is None


def test_ended_session_refuses_reconnection() -> None:
    network = Network(0)
    network.server.close()
    ours, theirs = connected_pair()
    with pytest.raises(TransportError, match="closed"):
        network.server.resume(theirs, 0)
    with pytest.raises(TransportError):
        ours.receive(0.0)
