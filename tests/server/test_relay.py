"""The gateway's relay when one end breaks off: the other end learns the reason above all."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress
from functools import partial

import pytest

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.protocol.addresses import transport_for
from djinn_core.wire.frames import encode_frame
from djinn_server.gateway.relay import Relays, over_limits, relay, relay_directions

SECONDS = 120.0
LIMITS = Limits()


class DelayedConnection:
    """A connection with delayed frames, as of a gateway that is busy when the executor hangs up."""

    def __init__(self, connection, seconds):
        self._connection = connection
        self._seconds = seconds

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def receive(self, timeout=None):
        frame = self._connection.receive(timeout)
        time.sleep(self._seconds)
        return frame


@pytest.fixture
def make_relayed(registry):
    """Return a function that makes a client's connection, relayed to an executor function of the test."""
    opened = []

    def make(url, executor, late=0.0, watched=lambda *_: nullcontext()):
        def listen(url, accept):
            opened.append(transport_for(url, registry.transports).listen(url, LIMITS, accept))
            return opened[-1].url

        def serve(connection):
            executor(connection)  # what it returns does not matter: the listener closes the connection

        inner_url = listen("unix://", serve)

        def pass_on(connection):
            inner = transport_for(inner_url, registry.transports).connect(inner_url, LIMITS, SECONDS)
            ways = relay_directions(connection, DelayedConnection(inner, late))
            with watched(*ways):
                relay(*ways)

        opened.append(transport_for(url, registry.transports).connect(listen(url, pass_on), LIMITS, SECONDS))
        return opened[-1]

    yield make
    for one in reversed(opened):
        one.close()


@pytest.fixture(params=["tcp://127.0.0.1:0", "http://127.0.0.1:0"], ids=["tcp", "http"])
def url(request):
    return request.param


def send_until_it_fails(connection, nbytes=100_000):
    with pytest.raises(TransportError):
        for _ in range(1000):
            connection.send(Frame(b"more", [bytes(nbytes)]))
            time.sleep(0.01)


def test_executor_reason_reaches_sending_client(make_relayed, url, monkeypatch):
    # No lingering: what the client sends finds no receiver while the reason is still on its way.
    monkeypatch.setattr("djinn_core.protocol.net.sockets._LINGER_SECONDS", 0.0)

    def executor(connection):
        connection.receive(SECONDS)
        connection.send(Frame(b"the reason"))

    client = make_relayed(url, executor, late=0.5)
    client.send(Frame(b"garbage"))
    send_until_it_fails(client)
    assert client.receive(SECONDS).head == b"the reason"
    with pytest.raises(TransportError):
        client.receive(SECONDS)


def test_last_client_frames_reach_executor(make_relayed, url):
    came = []
    over = threading.Event()

    def executor(connection):
        try:
            while True:
                came.append(connection.receive(SECONDS).head)
                with suppress(TransportError):
                    connection.send(Frame(b"a reply that is not read"))
        except TransportError:
            over.set()

    client = make_relayed(url, executor)
    for n in range(20):
        client.send(Frame(b"%d" % n))
    client.close()
    assert over.wait(SECONDS)
    assert came == [b"%d" % n for n in range(20)]


def test_lingering_executor_does_not_block_relay(make_relayed, monkeypatch):
    monkeypatch.setattr("djinn_server.gateway.relay._REASON_SECONDS", 0.2)
    gone = threading.Event()

    def executor(connection):
        connection.receive(SECONDS)
        connection.stop_sending("the test says so")  # it neither reads nor closes
        over.wait(SECONDS)
        with pytest.raises(TransportError):
            while True:
                connection.receive(SECONDS)
        gone.set()

    over = threading.Event()
    client = make_relayed("tcp://127.0.0.1:0", executor)
    client.send(Frame(b"hello"))
    with pytest.raises(TransportError):
        client.receive(SECONDS)
    over.set()
    assert gone.wait(SECONDS)


def test_relay_memory_limit_cuts_largest_only(make_relayed, url):
    relays, over = Relays(max_tenant_bytes=8 << 20), threading.Event()

    def executor(connection):
        with suppress(TransportError):
            if connection.receive(SECONDS).head == b"read on":
                connection.send(connection.receive(SECONDS))
            over.wait(SECONDS)

    greedy, modest = (
        make_relayed(url, executor, watched=partial(relays.limiting, who)) for who in ("greedy", "modest")
    )
    greedy.send(Frame(b"hello"))
    modest.send(Frame(b"read on"))
    cut = threading.Thread(target=send_until_it_fails, args=(greedy, 16 << 20))
    cut.start()
    modest.send(Frame(b"a little", [bytes(1000)]))
    assert modest.receive(SECONDS).head == b"a little"
    cut.join(SECONDS)
    over.set()
    assert not cut.is_alive()


def test_partial_frames_count_towards_limit(make_relayed):
    relays, over = Relays(max_tenant_bytes=8 << 20), threading.Event()
    client = make_relayed(
        "tcp://127.0.0.1:0", lambda _: over.wait(3 * SECONDS), watched=partial(relays.limiting, "greedy")
    )
    begun = b"".join(bytes(part) for part in encode_frame(Frame(b"much", [bytes(64 << 20)]), LIMITS))[: 32 << 20]
    with suppress(OSError):  # reset while it is sent
        client._socket.sendall(begun)
    with pytest.raises(TransportError):
        client.receive(SECONDS)
    over.set()


def test_largest_holder_is_cut_first():
    ways = [object() for _ in range(5)]
    held = {"a": {ways[0]: 5, ways[1]: 6}, "b": {ways[2]: 9}, "c": {ways[3]: 1, ways[4]: 0}}
    assert over_limits(held, each=11, together=21) == {}
    assert over_limits(held, each=10, together=21) == {ways[1]: "a"}
    assert over_limits(held, each=8, together=100) == {ways[1]: "a", ways[2]: "b"}
    assert over_limits(held, each=11, together=9) == {ways[1]: "a", ways[2]: "b"}
