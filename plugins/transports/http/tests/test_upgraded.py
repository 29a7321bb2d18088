import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import wait_for

from djinn.transports import Frame, Limits, TransportError
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
    with pytest.raises(TimeoutError):
        client.receive(0.05)


def test_a_busy_end_says_nothing(client):
    before = client.bytes_sent
    for _ in range(2):
        client.pulse()
    assert client.bytes_sent == before


@pytest.mark.parametrize("protocol", [b"websocket", b"djinn/2"])
def test_another_protocol_is_refused(protocol):
    def answer(server):
        with server:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(
                    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n" % protocol
                )

    server = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer, server)
        with pytest.raises(TransportError, match="another protocol"):
            HttpTransport().connect(f"http://127.0.0.1:{server.getsockname()[1]}", LIMITS, 10)
