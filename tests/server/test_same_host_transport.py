"""A third party's transport that reaches programs on this host alone: servers listen with it if it is named, own executors if it is fast."""

from __future__ import annotations

import os

import attrs
import pytest
from servers import start_server

from djinn.testing import TransportConformance, self_signed_tls
from djinn_client.runtime.connecting.handshake import _usable_urls
from djinn_core.errors import ConfigurationError
from djinn_core.protocol.addresses import parse_url
from djinn_core.protocol.local import LocalTransport
from djinn_server.launch.listen_addresses import ListenAddress, ListenAddresses, listening_transports
from djinn_tcp import TcpTransport

PLUGIN = """
import os
import shutil
import socket
import tempfile
from urllib.parse import quote, unquote, urlsplit

from djinn.errors import TransportError
from djinn.hooks import SocketListener, SocketTransport, TransportCapabilities, hookimpl

djinn_api_version = "2.0"

class PathTransport(SocketTransport):
    name = "path"
    schemes = ("path",)
    capabilities = TransportCapabilities(same_host=True, speed=SPEED)

    def dial(self, url, timeout):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        sock.connect(sock_path(url))
        return sock

    def bind(self, url):
        path = sock_path(url) or os.path.join(tempfile.mkdtemp(prefix="path-"), str(urlsplit(url).port))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        return sock, "path://" + quote(path)

    def listen(self, url, limits, accept):
        try:
            sock, actual = self.bind(url)
        except OSError as error:
            raise TransportError(f"cannot listen at {url}: {error}") from error
        return SocketListener(sock, actual, limits, accept, lambda: shutil.rmtree(os.path.dirname(sock_path(actual))))

def sock_path(url):
    return unquote(urlsplit(url).path)

@hookimpl
def djinn_register_transports():
    return [PathTransport()]
"""

PROGRAM = """
import torch, djinn
print(float((torch.ones(3, device="remote_accelerator") * 2).sum()))
print(*sorted(name for name in djinn.stats() if name.startswith("sessions")))
"""


def plugin(folder, speed):
    """Return the environment of a process in which the transport is installed."""
    (folder / "path_transport.py").write_text(PLUGIN.replace("SPEED", str(speed)))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    return {"DJINN_PLUGINS": "tcp,path_transport", "PYTHONPATH": path, "DJINN_TOKEN": "t" * 20}


@pytest.fixture
def path_transport(tmp_path):
    namespace = {"__name__": "path_transport"}
    exec(PLUGIN.replace("SPEED", "1"), namespace)
    return namespace["PathTransport"]()


def run(python, environment):
    done = python.run("-c", PROGRAM, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("\n")[:2]


@pytest.mark.parametrize(("speed", "carrier"), [(1, "unix"), (110, "path")])
def test_server_listens_for_this_host_if_named(start_python, python, plain_environment, tmp_path, speed, carrier):
    """No network address is used, so `--host` needs no TLS, and nothing is advertised to other machines."""
    environment = plain_environment | plugin(tmp_path, speed)
    options = ("--store-gib", "0", "--host", "0.0.0.0", "--without-transport", "tcp", "--transport", "path")
    server = start_server(start_python, tmp_path, *options, env=environment)
    try:
        (url,) = server.urls
        assert url.startswith("path:///")
        log = server.log.read_text()
        assert f"Listening at {url}, for programs on this host only\n" in log
        assert "On other machines" not in log
        # The socket of the executor that is the fastest carries the data.
        assert run(python, environment | {"DJINN_SERVERS": url}) == ["6.0", f"sessions, {carrier}"]
        assert run(python, environment | {"DJINN_CONNECTION_FILE": str(server.file)})[0] == "6.0"
    finally:
        assert server.stop() == 0


def test_connection_file_for_other_machines_has_no_socket(start_python, plain_environment, tmp_path):
    environment = plain_environment | plugin(tmp_path, 110)
    options = ("--store-gib", "0", "--host", "0.0.0.0", "--insecure-plaintext-on-network", "--transport", "path")
    server = start_server(start_python, tmp_path, *options, env=environment)
    try:
        assert [url.partition(":")[0] for url in server.urls] == ["tcp"]
        (others,) = [line for line in server.log.read_text().splitlines() if line.startswith("On other machines")]
        assert "path:" not in others
    finally:
        assert server.stop() == 0


def test_tcp_at_a_network_address_still_needs_tls(python, plain_environment, tmp_path):
    environment = plain_environment | plugin(tmp_path, 1)
    command = ("-m", "djinn_core.cli", "serve", "--device", "cpu", "--connection-file", tmp_path / "c")
    done = python.run(*command, "--host", "0.0.0.0", "--transport", "path", env=environment)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "does not listen on 0.0.0.0" in " ".join(output.split())
    assert "Starting an executor" not in output


@pytest.mark.parametrize(("speed", "carrier"), [(1, "unix"), (110, "path")])
def test_own_executor_uses_the_fastest_transport_of_this_host(python, plain_environment, tmp_path, speed, carrier):
    assert run(python, plain_environment | plugin(tmp_path, speed)) == ["6.0", f"sessions, {carrier}"]


def test_server_with_certificates_listens_for_this_host(path_transport, tmp_path):
    tls = self_signed_tls(tmp_path)
    addresses = ListenAddresses("0.0.0.0", {"path": ListenAddress("", 7), "local": ListenAddress()})
    found = listening_transports((path_transport, LocalTransport(), TcpTransport()), tls, addresses)
    assert next(one.url(one.address.port) for one in found) == "path://127.0.0.1:7"
    assert [one.transport.name for one in found] == ["path", "local", "tcps"]
    asking = attrs.evolve(tls, authority=tls.certificate)
    with pytest.raises(ConfigurationError, match="the transport 'path' has no TLS"):
        listening_transports((path_transport, TcpTransport()), asking, addresses)


def test_client_follows_a_socket_only_over_the_scheme_that_it_named(path_transport):
    transports = (path_transport, LocalTransport(), TcpTransport())
    urls = ("path:///tmp/executor", "unix:///tmp/other/executor.sock")
    believed = lambda reached: list(_usable_urls(urls, parse_url(reached), transports, any_machine=False))
    assert believed("path:///tmp/gateway") == ["path:///tmp/executor"]
    assert believed("tcp://127.0.0.1:1") == believed("unix:///tmp/server.sock") == []


class TestWire(TransportConformance):
    """Run the suite's raw-socket tests with a transport whose URL is a path."""

    @pytest.fixture
    def transport(self, path_transport):
        return path_transport

    @pytest.fixture
    def listen_url(self):
        return "path://127.0.0.1:0"


_WIRE = {"test_timeouts_within_a_frame_lose_nothing", "test_counters_match_bytes_on_the_wire"}
_WIRE |= {"test_garbage_from_an_unauthenticated_client_harms_no_other", "test_transport_has_every_member"}
for _name in [name for name in dir(TransportConformance) if name.startswith("test_")]:
    if _name not in _WIRE:
        setattr(TestWire, _name, None)
