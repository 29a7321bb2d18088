import pytest
from servers import wait_for

from djinn.transports import Frame, Limits
from djinn_http import HttpTransport, upgraded
from djinn_http.upgraded import AcceptedUpgrade, UpgradedConnection

LIMITS = Limits()


@pytest.fixture
def listener():
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


def test_the_socket_leaves_the_event_loop(listener, client):
    assert isinstance(client, UpgradedConnection)
    client.send(Frame(b"there", [b"and back"]))
    assert [*map(bytes, client.receive(60).body)] == [b"and back"]
    wait_for(lambda: not listener._connections, "the end of what aiohttp knew of it")


def test_an_idle_end_says_so_and_no_frame_comes_of_it(client, monkeypatch):
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


def test_a_busy_end_says_nothing(client):
    before = client.bytes_sent
    for _ in range(2):
        client.pulse()
    assert client.bytes_sent == before
