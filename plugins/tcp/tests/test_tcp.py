import socket

import pytest

from djinn.errors import TransportError
from djinn.hooks import Frame, Limits
from djinn_tcp import TcpTransport


@pytest.mark.parametrize(
    "url", ["tcp://host", "tcp://:1", "tcp://host:99999", "http://h:1", "tcp://a@h:1", "tcp://h:1/x"]
)
def test_malformed_address_error_shows_format(url):
    for use in (
        lambda: TcpTransport().connect(url, Limits(), 1),
        lambda: TcpTransport().listen(url, Limits(), lambda connection: None),
    ):
        with pytest.raises(TransportError, match="not a TCP address"):
            use()


def test_port_in_use_error_names_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"cannot listen at {url}"):
            TcpTransport().listen(url, Limits(), lambda connection: None)


def test_sockets_have_no_delay_and_keepalive():
    sockets = []

    def accept(connection):
        sockets.append(connection._socket)
        connection.receive(300)

    listener = TcpTransport().listen("tcp://localhost:0", Limits(), accept)
    client = TcpTransport().connect(listener.url, Limits(), 5)
    client.send(Frame(b"x"))
    while not sockets:
        pass
    options = []
    for sock in (client._socket, sockets[0]):
        if sock.fileno() >= 0:
            options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            options.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
    assert options
    assert all(options)
    client.close()
    listener.close()


def test_ipv6_addresses_are_bracketed():
    listener = TcpTransport().listen("tcp://[::1]:0", Limits(), lambda connection: connection.send(Frame(b"six")))
    assert listener.url.startswith("tcp://[::1]:")
    client = TcpTransport().connect(listener.url, Limits(), 5)
    assert client.receive(300).head == b"six"
    client.close()
    listener.close()
