"""Back pressure: a client that sends without reading, or never reads, is slowed or sent away; a server keeps little for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from djinn_core.builtins import builtin_plugins
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.plugins.registry import Selection, load_registry
from djinn_core.runtime.connecting.dialling import reach_executor, reach_gateway
from djinn_core.server.recovery import leased_connection
from djinn_core.server.recovery.leased_connection import LeasedConnection
from djinn_core.server.usage_metrics import UsageMetrics
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.frame_order import Prefix
from djinn_core.wire.messages import Submit, UploadPart, encode

MIB = 1 << 20
HANDLE = 1 << 32 | 1
ANSWERS = 1500  # of a MiB each: what a server would hold for a client that does not read them
ROOM = 96 * MIB  # more than may be under way; 3 to 6 MiB were seen


@pytest.fixture
def raw(serving, url_of):
    """A session whose client does as it likes: sends a message as the next frame; the executor's process."""
    transports = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"}).transports
    opened = []

    def begin(scheme):
        usable = tuple(t for t in transports if scheme in t.schemes)
        gateway = reach_gateway((url_of(scheme),), serving.token, "", usable, 30.0)
        reached = reach_executor(gateway, usable, 30.0)
        opened.extend([gateway.connection, reached.connection])
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
    """Bytes of a process, as the system counts them."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_a_client_that_never_reads_is_not_answered_on_credit(raw, scheme):
    send, process = raw(scheme)
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


class Deaf:
    """Stands for a connection to a client that keeps sending and says that it has taken nothing."""

    def __init__(self, frames):
        self.limits = Limits()
        self.bytes_sent = self.bytes_received = 0
        self._frames = iter(range(1, frames + 1))

    def send(self, frame):
        pass

    def receive(self, timeout=None):
        number = next(self._frames, None)
        if number is None:
            raise TimeoutError
        return Frame(Prefix(number, 0).encode() + b"head", [memoryview(bytearray(64 << 10))])

    def close(self):
        pass


def test_who_sends_while_it_is_being_answered_must_take_answers(monkeypatch):
    monkeypatch.setattr(leased_connection, "AHEAD_BYTES", MIB)
    connection = LeasedConnection(Deaf(4096), 1.0, UsageMetrics())
    connection._window = MIB
    with pytest.raises(ProtocolError, match="does not take what is sent to it"):
        connection.send(Frame(b"answer", [memoryview(bytearray(2 * MIB))]))
    assert len(connection._early) <= 65


def test_only_a_little_is_read_ahead():
    connection = LeasedConnection(Deaf(4096), 1.0, UsageMetrics())
    connection.read_ahead(64, MIB)
    assert len(connection.queued()) == 16
    connection.read_ahead(64, MIB)
    assert len(connection.queued()) == 16, "until the session has taken it"
    for _ in range(16):
        connection.receive(1.0)
    connection.read_ahead(8, MIB)
    assert len(connection.queued()) == 8
