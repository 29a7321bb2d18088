"""A client on its way to an executor: which way it takes, and what it says when there is none."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from urllib.parse import urlsplit

import msgspec
import pytest

from djinn_client.runtime.connecting import open as connecting
from djinn_client.runtime.connecting.open import open_connections
from djinn_client.runtime.connecting.servers import find_servers
from djinn_core.errors import AccessRefused, ConfigurationError, PluginError, ServerBusy, StartupError, TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.protocol.connection_file import ConnectionFile, write_connection_file
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings
from djinn_core.wire.messages import Goodbye, StatsReply, StatsRequest, encode
from djinn_server.gateway.relay import relay, relay_directions
from djinn_server.inline import connected_pair

SECONDS = 300.0


@pytest.fixture
def open_checked(registry, ask):
    """Return a function that opens a connection and checks it. The sessions end with the test."""
    begun = []

    def open_one(settings, registry=registry):
        (opened,) = open_connections(settings, registry)
        begun.append(opened)
        assert isinstance(ask(opened.connection, StatsRequest()), StatsReply)
        return opened

    yield open_one
    for opened in begun:
        opened.connection.send(Frame(encode(Goodbye())))
        opened.connection.close()
        if opened.executor is not None:
            opened.executor.close()
            assert not opened.executor.alive


def without_transports(registry: Registry, *names: str) -> Registry:
    return registry.evolve(transports=tuple(t for t in registry.transports if t.name not in names))


class Proxy:
    """A TCP proxy that counts the forwarded bytes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.target = (parts.hostname, parts.port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{parts.scheme}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.counts = {"up": 0, "down": 0}
        self.threads = [threading.Thread(target=self.run)]
        self.threads[0].start()

    def run(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(self.target)
        back = threading.Thread(target=self.copy, args=(server, client, "down"))
        back.start()
        self.copy(client, server, "up")
        back.join()
        client.close()
        server.close()

    def copy(self, source: socket.socket, target: socket.socket, way: str) -> None:
        while data := source.recv(65536):
            self.counts[way] += len(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self.threads:
            thread.join(SECONDS)
        self.listener.close()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.url("tcp"))
    yield proxy
    proxy.close()


def test_local_client_uses_fastest_transport(server, open_checked):
    opened = open_checked(server.settings())
    assert opened.url.startswith("unix://")
    assert opened.fallbacks == ()
    assert opened.executor is None


def test_direct_network_connection_without_local_transport(server, open_checked, registry):
    opened = open_checked(server.settings(), without_transports(registry, "local"))
    assert opened.url.startswith("tcp://")
    assert opened.url not in server.urls


def test_relayed_connection_counts_bytes(server, registry, ask, proxy, wait_for, caplog):
    caplog.set_level("INFO", "djinn")
    (opened,) = open_connections(Settings(servers=(proxy.url,), token=server.token), registry)
    assert opened.url == proxy.url
    assert "tunnel or a proxy" in caplog.text
    assert isinstance(ask(opened.connection, StatsRequest()), StatsReply)
    assert (opened.connection.bytes_sent, opened.connection.bytes_received) == (
        proxy.counts["up"],
        proxy.counts["down"],
    )
    opened.connection.close()


def test_relayed_session_ends_with_client(own_server, registry, wait_for):
    from djinn_client.runtime.connecting.handshake import Server
    from djinn_client.runtime.connecting.servers import ask_status

    server = own_server("--lease-seconds", "0.5")

    def sessions():
        status = ask_status(Server((server.url("tcp"),), server.token, registry.transports, SECONDS))
        return {s.session for executor in status.executors for s in executor.sessions}

    def is_over():
        try:
            return opened.attached.session not in sessions()
        except ServerBusy:  # asked too often
            return False

    with contextlib.closing(Proxy(server.url("tcp"))) as proxy:
        (opened,) = open_connections(Settings(servers=(proxy.url,), token=server.token), registry)
        assert opened.attached.session in sessions()
        opened.connection.close()
        wait_for(is_over, "the end of the session")


def test_http_connection_is_relayed(server, open_checked):
    opened = open_checked(Settings(servers=(server.url("http"),), token=server.token))
    assert opened.url == server.url("http")


def test_unreachable_server_falls_back_with_warning(server, open_checked, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    opened = open_checked(Settings(servers=(dead, server.url("tcp")), token=server.token))
    assert len(opened.fallbacks) == 1
    assert dead in opened.fallbacks[0]
    assert f"fell back from {dead}" in caplog.text
    assert opened.url in caplog.text


def test_unreachable_executor_address_falls_back(server, open_checked, registry, monkeypatch, caplog):
    from djinn_client.runtime.connecting import handshake

    # Another process listens where the executor should: it answers, but it does not know the ticket.
    monkeypatch.setattr(handshake, "at_host", lambda url, host: server.url("tcp"))
    opened = open_checked(server.settings(), without_transports(registry, "local"))
    assert opened.url == server.url("tcp")
    assert len(opened.fallbacks) >= 1
    assert "fell back from" in caplog.text


def test_unreachable_server_names_cure(registry):
    with pytest.raises(TransportError, match=r"allow port 1\? Run `djinn doctor`") as error:
        open_connections(Settings(servers=("tcp://127.0.0.1:1",), token="t"), registry)
    assert str(error.value).count("`djinn serve` running") == 1


def test_other_server_is_recognised(registry):
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            peer, _ = other.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportError, match="is not a Djinn server"):
            open_connections(Settings(servers=(url,), token="t"), registry)
        thread.join()


def test_silent_server_times_out(registry):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TransportError, match=r"did not answer within 0\.2 s"):
            open_connections(Settings(servers=(url,), token="t", connect_timeout=0.2), registry)


def test_wrong_token_names_cure(server, registry):
    with pytest.raises(AccessRefused, match=r"does not know the token.*ask the server's operator") as caught:
        open_connections(server.settings(token="not-the-token"), registry)
    assert "not-the-token" not in str(caught.value)


def test_unknown_scheme_names_known_schemes(registry):
    with pytest.raises(
        PluginError, match=r"no transport for quic:// is in use here \(known: .*tcp.*on the client and on the server"
    ):
        open_connections(Settings(servers=("quic://host:1",), token="t"), registry)


@pytest.mark.parametrize("url", ["host:5556", "tcp://host:port"])
def test_invalid_url_is_refused(registry, url):
    with pytest.raises(ConfigurationError, match="is not a server URL"):
        open_connections(Settings(servers=(url,), token="t"), registry)


def test_misspelt_variable_warns(registry, monkeypatch, caplog):
    monkeypatch.setenv("DJINN_SERVER", "tcp://gpu-box:5556")
    monkeypatch.setenv("DJINN_XY", "1")
    with pytest.raises(ConfigurationError):
        open_connections(Settings(servers=("host",), token="t"), registry)
    assert "sets DJINN_SERVER, which is not a setting of Djinn: did you mean DJINN_SERVERS?" in caplog.text
    assert "DJINN_XY" not in caplog.text


def test_connection_file_token_is_for_its_servers_only(server):
    listed = Settings(servers=(server.url("tcp"),), connection_file=server.file)
    assert find_servers(listed).token == server.token
    with pytest.raises(ConfigurationError, match="no token for tcp://elsewhere:1"):
        find_servers(Settings(servers=("tcp://elsewhere:1",), connection_file=server.file))
    assert server.token not in repr(find_servers(listed))


def test_default_configuration_starts_own_executor(open_checked):
    opened = open_checked(Settings(threads=1, plugins=("tcp",)))
    assert opened.url.startswith("unix://")
    assert opened.executor.alive
    assert opened.attached.process == opened.executor.process_id


def test_failed_executor_start_raises(registry):
    with pytest.raises(StartupError, match="no device 'abacus'"):
        open_connections(Settings(device="abacus"), registry)


def test_inline_executor_ends_with_connection(registry, ask):
    (opened,) = open_connections(Settings(executor="inline"), registry)
    assert isinstance(ask(opened.connection, StatsRequest()), StatsReply)
    assert opened.attached.process == os.getpid()
    assert opened.executor is None
    serving = [t for t in threading.enumerate() if t.name == "djinn-inline-executor"]
    opened.connection.close()
    assert serving
    assert not any(t.is_alive() for t in serving), "threads that an ending interpreter stops inside PyTorch abort it"


def test_different_torch_versions_are_named(open_checked, caplog):
    opened = open_checked(Settings(executor="inline"))
    connecting._compare_torch(opened)
    assert caplog.text == ""
    connecting._compare_torch(
        msgspec.structs.replace(opened, attached=msgspec.structs.replace(opened.attached, torch="1.0.0"))
    )
    assert "1.0.0" in caplog.text
    assert "different versions of PyTorch" in caplog.text


def test_relay_forwards_both_directions():
    client, gateway_outer = connected_pair()
    gateway_inner, executor = connected_pair()
    thread = threading.Thread(target=relay, args=relay_directions(gateway_outer, gateway_inner))
    thread.start()
    client.send(Frame(b"there", [b"abc", b""]))
    assert [bytes(b) for b in executor.receive(SECONDS).body] == [b"abc", b""]
    executor.send(Frame(b"back"))
    assert client.receive(SECONDS).head == b"back"
    executor.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    with pytest.raises(TransportError):
        client.receive(SECONDS)


def test_client_and_server_find_same_plugins(registry):
    again = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"})
    assert [t.name for t in again.transports] == [t.name for t in registry.transports]


def test_standby_server_is_used_if_others_fail(open_checked, server, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    opened = open_checked(
        Settings(servers=(gone,), token=server.token, standby=(server.url("tcp"),), disable=("local",))
    )
    assert opened.connection.server == server.url("tcp")
    assert [other.name for other in opened.connection._standby_servers] == [gone, server.url("tcp")]
    assert opened.now.session == opened.attached.session
    assert f"fell back from {gone}" in caplog.text
    assert not opened.attached.caches_weights


def test_standby_server_without_token_names_cure(registry, server, tmp_path):
    file = tmp_path / "connection.json"
    write_connection_file(file, ConnectionFile((server.url("tcp"),), server.token))
    with pytest.raises(ConfigurationError, match="no token for the standby server tcp://elsewhere:1: set DJINN_TOKEN"):
        open_connections(Settings(connection_file=file, standby=("tcp://elsewhere:1",)), registry)
