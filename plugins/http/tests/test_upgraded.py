import contextlib
import http.client
import resource
import socket

import pytest
import structlog  # noqa: F401 - servers have imported it, and could not without a descriptor
from servers import wait_for

from djinn.hooks import Frame, Limits
from djinn_http import HttpTransport, dialect, server, upgraded
from djinn_http.upgraded import AcceptedUpgrade, UpgradedConnection

LIMITS = Limits()


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setattr(server, "_SWEEP_SECONDS", 0.05)

    def accept(connection):
        assert isinstance(connection, AcceptedUpgrade)
        while (frame := connection.receive(60)).head != b"over":
            connection.pulse()
            connection.send(frame)

    listener = HttpTransport().listen("http://127.0.0.1:0", LIMITS, accept)
    yield listener
    listener.close()


@pytest.fixture
def client(listener):
    client = HttpTransport().connect(listener.url, LIMITS, 10)
    yield client
    client.send(Frame(b"over"))
    client.close()


def test_upgraded_socket_leaves_event_loop(listener, client):
    assert isinstance(client, UpgradedConnection)
    client.send(Frame(b"there", [b"and back"]))
    assert [*map(bytes, client.receive(60).body)] == [b"and back"]
    wait_for(lambda: not listener._connections, "the end of what aiohttp knew of it")


def test_idle_message_is_not_a_frame(client, monkeypatch):
    monkeypatch.setattr(upgraded, "WAIT_SECONDS", 0.0)
    for text in (b"one", b"two"):
        before = client.bytes_sent
        client.pulse()
        assert client.bytes_sent > before
        client.send(Frame(text))  # the server's end says that it is idle before it answers
        assert client.receive(60).head == text
    before = client.bytes_received
    wait_for(lambda: client.pulse() or client.bytes_received > before, "the listener to say that its end is idle")
    with pytest.raises(TimeoutError):
        client.receive(0.05)
    assert not client._decoder.frames


def test_busy_connection_sends_no_idle_message(client):
    before = client.bytes_sent
    for _ in range(2):
        client.pulse()
    assert client.bytes_sent == before


def test_draining_listener_sends_idle_messages(listener, client, monkeypatch):
    client.send(Frame(b"there"))
    assert client.receive(60).head == b"there"
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(client_address(listener))
    monkeypatch.setattr(upgraded, "WAIT_SECONDS", 0.0)
    for _ in range(3):  # once is what was under way when it was closed
        before = client.bytes_received
        wait_for(
            lambda was=before: client.take_in() or client.bytes_received > was,
            "the listener to say that its end is idle",
        )


def test_listener_without_descriptors_answers_503(listener):
    asking = {"Content-Type": dialect.CONTENT_TYPE, "Connection": "Upgrade", "Upgrade": dialect.UPGRADE}
    plain = http.client.HTTPConnection(*client_address(listener), timeout=60)
    plain.connect()
    wait_for(lambda: listener._connections, "the listener to accept")
    with exhaust_descriptors():
        plain.request("POST", dialect.PATH + dialect.OPEN, b"", asking)
        response = plain.getresponse()
        assert (response.status, response.read()) == (503, b"too many connections")
    plain.close()
    client = HttpTransport().connect(listener.url, LIMITS, 10)
    assert isinstance(client, UpgradedConnection)
    client.send(Frame(b"over"))
    client.close()


def client_address(listener):
    host, _, port = listener.url.removeprefix("http://").partition(":")
    return host, int(port)


@contextlib.contextmanager
def exhaust_descriptors():
    """Let this process open no further file in the block. Another thread's close frees no usable descriptor."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
