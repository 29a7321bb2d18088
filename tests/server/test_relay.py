"""What the gateway passes on where an end breaks off: the reason above all."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.launch.addresses import transport_for
from djinn_core.server.gateway.relay import relay

SECONDS = 20.0
LIMITS = Limits()


class SlowToArrive:
    """A connection whose frames come late: it stands for a gateway that is busy when the executor hangs up."""

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
def relayed(registry):
    """Makes a client's connection, over a transport, that is relayed to an executor which is a function of the test's."""
    opened = []

    def make(url, executor, late=0.0):
        def listen(url, accept):
            opened.append(transport_for(url, registry.transports).listen(url, LIMITS, accept))
            return opened[-1].url

        inner_url = listen("unix://", executor)

        def pass_on(connection):
            inner = transport_for(inner_url, registry.transports).connect(inner_url, LIMITS, SECONDS)
            relay(connection, SlowToArrive(inner, late))

        opened.append(transport_for(url, registry.transports).connect(listen(url, pass_on), LIMITS, SECONDS))
        return opened[-1]

    yield make
    for one in reversed(opened):
        one.close()


@pytest.fixture(params=["tcp://127.0.0.1:0", "http://127.0.0.1:0"], ids=["tcp", "http"])
def url(request):
    return request.param


def send_until_it_fails(connection):
    with pytest.raises(TransportError):
        for _ in range(1000):
            connection.send(Frame(b"more", [bytes(100_000)]))
            time.sleep(0.01)


def test_the_executors_reason_reaches_a_client_that_goes_on_sending(relayed, url, monkeypatch):
    # No lingering: what the client sends finds nobody while the reason is still on its way.
    monkeypatch.setattr("djinn_core.builtins.sockets._LINGER_SECONDS", 0.0)

    def executor(connection):
        connection.receive(SECONDS)
        connection.send(Frame(b"the reason"))

    client = relayed(url, executor, late=0.5)
    client.send(Frame(b"garbage"))
    send_until_it_fails(client)
    assert client.receive(SECONDS).head == b"the reason"
    with pytest.raises(TransportError):
        client.receive(SECONDS)


def test_what_a_client_sent_last_reaches_the_executor(relayed, url):
    came = []
    over = threading.Event()

    def executor(connection):
        try:
            while True:
                came.append(connection.receive(SECONDS).head)
                with suppress(TransportError):
                    connection.send(Frame(b"an answer that nobody reads"))
        except TransportError:
            over.set()

    client = relayed(url, executor)
    for n in range(20):
        client.send(Frame(b"%d" % n))
    client.close()
    assert over.wait(SECONDS)
    assert came == [b"%d" % n for n in range(20)]


def test_an_executor_that_does_not_hang_up_does_not_keep_the_relay(relayed, monkeypatch):
    monkeypatch.setattr("djinn_core.server.gateway.relay._LAST_WORDS_SECONDS", 0.2)
    gone = threading.Event()

    def executor(connection):
        connection.receive(SECONDS)
        connection._stop_sending("the test says so")  # it neither reads nor closes
        over.wait(SECONDS)
        with pytest.raises(TransportError):
            while True:
                connection.receive(SECONDS)
        gone.set()

    over = threading.Event()
    client = relayed("tcp://127.0.0.1:0", executor)
    client.send(Frame(b"hello"))
    with pytest.raises(TransportError):
        client.receive(SECONDS)
    over.set()
    assert gone.wait(SECONDS)
