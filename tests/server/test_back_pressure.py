"""Back pressure: a client that sends without reading, or never reads, is slowed or sent away; a server keeps little for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from djinn_client.runtime.connecting.handshake import Server, reach_executor
from djinn_client.runtime.connecting.open import open_inline
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.frame_order import Prefix
from djinn_core.wire.messages import Goodbye, ProtocolClose, StatsRequest, Submit, TemplateRequest, decode, encode
from djinn_core.wire.peer_messages import AwaitTransfer
from djinn_core.wire.upload_messages import UploadPart
from djinn_server import inline
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.session_pauses import POLL_SECONDS
from djinn_server.usage_metrics import UsageMetrics

MIB = 1 << 20
HANDLE = 1 << 32 | 1
ANSWERS = 1500  # of a MiB each: what a server would hold for a client that does not read them
ROOM = 96 * MIB  # more than may be under way; 3 to 6 MiB were seen


@pytest.fixture
def raw_session(serving, url_of):
    """Return a function that opens a session and returns a function to send frames, and the executor's process."""
    transports = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"}).transports
    opened = []

    def begin(scheme):
        usable = tuple(t for t in transports if scheme in t.schemes)
        reached = reach_executor(Server((url_of(scheme),), serving.token, usable, 30.0), "")
        opened.append(reached.connection)
        sent = 0

        def send(message, body=()):
            nonlocal sent
            sent += 1
            reached.connection.send(Frame(Prefix(sent, 0).encode() + encode(message), list(body)))
            return sent

        return send, reached.attached.process

    yield begin
    for connection in opened:
        connection.close()


def resident(process):
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_client_that_never_reads_is_limited(raw_session, scheme):
    send, process = raw_session(scheme)
    send(UploadPart(HANDLE, "uint8", (MIB,), (1,), MIB), [memoryview(bytearray(MIB))])
    before, sent = resident(process), [0]

    def ask():
        try:
            for sequence in range(1, ANSWERS + 1):
                send(Submit(sequence, fetch=pack_handles([HANDLE])))
                sent[0] = sequence
        except TransportError:
            return  # sent away

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    most, still = 0, 0
    while still < 25:  # until nothing grows any more
        time.sleep(0.02)
        grown = resident(process) - before
        still = still + 1 if most and grown <= most else 0
        most = max(most, grown)
    assert most > 0, "the executor has not begun to answer"
    assert most < ROOM, f"{most / MIB:.0f} MiB for {sent[0]} questions"


class SilentClient:
    """A fake connection to a client that keeps sending and acknowledges nothing."""

    def __init__(self, frames, nbytes=64 << 10):
        self.limits = Limits()
        self.bytes_sent = self.bytes_received = 0
        self.taken = 0
        self._most, self._nbytes = frames, nbytes

    def send(self, frame):
        pass

    def receive(self, timeout=None):
        if self.taken == self._most:
            raise TimeoutError
        self.taken += 1
        return Frame(Prefix(self.taken, 0).encode() + b"head", [memoryview(bytearray(self._nbytes))])

    def close(self):
        pass


class DepartedClient(SilentClient):
    """A fake connection to a client that has sent frames, a goodbye last, and hung up."""

    def send(self, frame):
        raise TransportError("it has hung up")

    def receive(self, timeout=None):
        if self.taken == self._most:
            raise TransportError("it has hung up")
        frame = super().receive(timeout)
        return frame if self.taken < self._most else Frame(Prefix(self.taken, 0).encode() + encode(Goodbye()))


@pytest.mark.parametrize(("frames", "nbytes"), [(limits.AHEAD_FRAMES + 10, 0), (30, MIB)], ids=["frames", "bytes"])
def test_goodbye_after_read_ahead_ends_wait(frames, nbytes):
    connection = LeasedConnection(DepartedClient(frames, nbytes), 1.0, UsageMetrics())
    connection.send(Frame(b"reply"))  # does not wait for a client that will not come back
    heads = [connection.receive(0.0).head for _ in range(frames)]
    assert isinstance(decode(heads[-1]), Goodbye)


@pytest.mark.parametrize(("nbytes", "most"), [(64 << 10, 17), (0, 100)], ids=["bytes", "frames"])
def test_client_that_reads_no_reply_exceeds_the_backlog_limit(monkeypatch, nbytes, most):
    for name, limit in (("AHEAD_BYTES", 0), ("BACKLOG_BYTES", MIB), ("BACKLOG_FRAMES", 100)):
        monkeypatch.setattr(limits, name, limit)
    deaf = SilentClient(4096, nbytes)
    connection = LeasedConnection(deaf, 1.0, UsageMetrics())
    connection._window = MIB
    with pytest.raises(ProtocolError, match="without reading a reply; the limits are 100 messages and 1,048,576 bytes"):
        connection.send(Frame(b"answer", [memoryview(bytearray(2 * MIB))]))
    assert deaf.taken <= most


def test_read_of_acknowledgements_stops_at_ahead_bytes():
    deaf = SilentClient(64, MIB)
    LeasedConnection(deaf, 1.0, UsageMetrics()).send(Frame(b"answer", [memoryview(bytearray(MIB))]))
    assert deaf.taken == limits.AHEAD_BYTES // MIB


class CountingConnection:
    """The executor's end of a connection. Counts received frames."""

    def __init__(self, inner):
        self._inner = inner
        self.received = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def receive(self, timeout=None):
        frame = self._inner.receive(timeout)
        self.received += 1
        return frame


@pytest.fixture
def unleased(monkeypatch):
    """Connect a hand-driven client to an inline executor. Yield both ends of the connection."""
    monkeypatch.setattr(limits, "BACKLOG_BYTES", MIB)
    monkeypatch.setattr(limits, "BACKLOG_FRAMES", 100)
    monkeypatch.setattr(limits, "AHEAD_FRAMES", 0)
    ends, pair = [], inline.connected_pair

    def connected_pair():
        ours, theirs = pair()
        ends.append(CountingConnection(theirs))
        return ours, ends[0]

    monkeypatch.setattr(inline, "connected_pair", connected_pair)
    opened = open_inline(Settings(executor="inline", device="cpu"))
    yield opened.connection, ends[0]
    opened.connection.close()


def queued_message(nbytes):
    """Return a message that a waiting session queues in its backlog."""
    return Frame(encode(StatsRequest()), [memoryview(bytearray(nbytes))])


@pytest.mark.parametrize(("nbytes", "most"), [(128 << 10, 8), (0, 100)], ids=["bytes", "frames"])
def test_session_that_waits_for_a_template_limits_its_backlog(unleased, nbytes, most):
    connection, end = unleased
    connection.send(Frame(encode(Submit(1, digest=bytes(16)))))
    assert isinstance(decode(connection.receive(60.0).head), TemplateRequest)
    before = end.received
    for _ in range(200):
        connection.send(queued_message(nbytes))
    closed = decode(connection.receive(60.0).head)
    assert isinstance(closed, ProtocolClose)
    assert "the limits are 100 messages and 1,048,576 bytes" in closed.reason
    assert end.received - before == most + 1


@pytest.mark.parametrize(("nbytes", "most"), [(128 << 10, 4), (0, 50)], ids=["bytes", "frames"])
def test_session_that_waits_for_a_transfer_stops_reading_at_half_the_backlog(unleased, nbytes, most):
    connection, end = unleased
    before = end.received
    connection.send(Frame(encode(AwaitTransfer(1, 1, pack_handles([HANDLE])))))
    for _ in range(200):
        connection.send(queued_message(nbytes))
    deadline = time.monotonic() + 60.0
    while end.received < before + 1 + most:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(2.5 * POLL_SECONDS)  # in which it looks twice
    assert end.received == before + 1 + most


def test_read_ahead_is_bounded():
    connection = LeasedConnection(SilentClient(4096), 1.0, UsageMetrics())
    connection.read_ahead(64, MIB)
    assert len(connection.queued()) == 16
    connection.read_ahead(64, MIB)
    assert len(connection.queued()) == 16, "until the session has taken it"
    for _ in range(16):
        connection.receive(1.0)
    connection.read_ahead(8, MIB)
    assert len(connection.queued()) == 8
