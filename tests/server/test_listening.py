"""Listen addresses of `djinn serve`: ports and addresses by transport, those advertised to other machines, its log."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import click
import psutil
import pytest
from click.testing import CliRunner
from servers import started_server

from djinn_client.runtime.connecting.open import open_connections
from djinn_core.cli import main
from djinn_core.errors import ConfigurationError, PluginError, TransportError
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_server.cli.serve import ListenChoice, listen_options
from djinn_server.launch import listen_addresses
from djinn_server.launch.listen_addresses import (
    ListenAddress,
    ListenAddresses,
    advertised,
    configured_transports,
    own_address,
)

OTHER_TRANSPORT = """
from djinn.hooks import hookimpl
from djinn.hooks import Listener, Transport
from djinn_tcp import TcpTransport

djinn_api_version = "2.0"

class Listening(Listener):
    def __init__(self, inner):
        self.url, self.inner = inner.url.replace("tcp", "other"), inner

    def close(self):
        self.inner.close()

class Other(Transport):
    name = "other"
    schemes = ("other",)
    capabilities = TcpTransport().capabilities

    def connect(self, url, limits, timeout):
        return TcpTransport().connect(url.replace("other", "tcp"), limits, timeout)

    def listen(self, url, limits, accept):
        return Listening(TcpTransport().listen(url.replace("other", "tcp"), limits, accept))

@hookimpl
def djinn_register_transports():
    return [Other()]
"""


def parse_listen(*arguments: str) -> ListenChoice:
    """Return the parsed listen options of a command line."""
    found: list[ListenChoice] = []
    command = click.command()(listen_options(lambda **given: found.append(given["listen"])))
    command.main(arguments, standalone_mode=False)
    return found[0]


@pytest.fixture
def transports():
    return load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"}).transports


@pytest.fixture
def used_port():
    """Yield a port with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_transport_addresses_are_parsed():
    addresses = parse_listen(
        "--transport", "tcp=0.0.0.0:5556", "--transport", "http=5557", "--transport", "x=[::1]:5"
    ).addresses
    assert addresses.by_transport == {
        "tcp": ListenAddress("0.0.0.0", 5556),
        "http": ListenAddress("", 5557),
        "x": ListenAddress("::1", 5),
    }
    assert addresses.hosts == ("127.0.0.1", "0.0.0.0", "::1")


def test_older_options_are_equivalent():
    assert (
        parse_listen("--port", "5556", "--http-port", "0").addresses
        == parse_listen("--transport", "tcp=5556", "--transport", "http=0").addresses
    )
    assert parse_listen("--host", "::1").addresses == ListenAddresses("::1")
    assert parse_listen("--transport", "tcp").addresses == parse_listen("--port", "0").addresses


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--transport", "tcp="), "must be NAME, NAME=PORT"),
        (("--transport", "tcp=99999"), "must be NAME, NAME=PORT"),
        (("--advertise", "tcp://x:1"), "without scheme and port"),
        (("--advertise", "x:1"), "without scheme and port"),
    ],
)
def test_invalid_listen_options_are_refused(arguments, said):
    with pytest.raises(click.BadParameter, match=said):
        parse_listen(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "5", "--transport", "tcp=6"), "port of tcp is set twice"),
        (("--port", "5", "--without-transport", "tcp"), "excludes a transport whose port another option sets"),
    ],
)
def test_contradictory_listen_options_are_refused(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_listen(*arguments)


def test_omitted_transports_do_not_listen(transports):
    chosen = configured_transports(
        transports, None, ListenAddresses(by_transport={"tcp": ListenAddress("", 7)}, without=frozenset({"http"}))
    )
    assert [(one.transport.name, one.url(one.address.port)) for one in chosen] == [("tcp", "tcp://127.0.0.1:7")]
    with pytest.raises(PluginError, match="--without-transport excludes http, tcp"):
        configured_transports(transports, None, ListenAddresses(without=frozenset({"http", "tcp"})))
    with pytest.raises(ConfigurationError, match="no transport is named 'htp': did you mean 'http'"):
        configured_transports(transports, None, ListenAddresses(without=frozenset({"htp"})))


def test_advertised_addresses_are_reachable():
    own = own_address()
    assert own not in {"", "0.0.0.0"}
    wildcard = ("tcps://0.0.0.0:5556", "https://[::]:5557")
    assert advertised(wildcard, "", by_name=False) == (f"tcps://{own}:5556", f"https://{own}:5557")
    assert advertised(wildcard, "gpu-box", by_name=False) == ("tcps://gpu-box:5556", "https://gpu-box:5557")
    assert advertised(("tcp://10.1.2.3:1",), "", by_name=False) == ("tcp://10.1.2.3:1",)
    mixed = ("tcp://0.0.0.0:1", "http://127.0.0.1:2")
    assert advertised(mixed, "gpu-box", by_name=False) == ("tcp://gpu-box:1", "http://127.0.0.1:2")
    assert advertised(("http://127.0.0.1:2",), "proxy", by_name=False) == ("http://proxy:2",)


def test_machine_without_a_default_route_advertises_the_address_of_its_interface(monkeypatch):
    def address(text):
        return SimpleNamespace(family=socket.AF_INET, address=text)

    def unreachable(_):
        raise OSError("Network is unreachable")

    addresses = {"lo": ["127.0.0.1"], "down": ["10.9.9.9"], "link": ["169.254.1.1"], "eth0": ["10.77.3.1"]}
    monkeypatch.setattr(listen_addresses, "address_towards", unreachable)
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {name: [*map(address, found)] for name, found in addresses.items()}
    )
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "down") for name in addresses}
    )
    assert advertised(("tcps://0.0.0.0:5556",), "", by_name=False) == ("tcps://10.77.3.1:5556",)
    del addresses["eth0"]
    assert own_address() == socket.gethostname()


def test_host_name_is_advertised_with_certificate():
    assert advertised(("tcps://0.0.0.0:1",), "", by_name=True) == (f"tcps://{socket.getfqdn()}:1",)


def test_taken_port_fails_before_start(used_port, python, plain_environment, tmp_path):
    command = ["serve", "--device", "cpu", "--port", str(used_port), "--connection-file", tmp_path / "c"]
    done = python.run("-m", "djinn_core.cli", *command, env=plain_environment)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"cannot listen for tcp at 127.0.0.1:{used_port}" in output
    assert "Starting an executor" not in output


@pytest.mark.parametrize("name", ["http", "https", "tcps"])
def test_taken_transport_ports_are_detected(used_port, name):
    with pytest.raises(TransportError, match=f"for {name} at"):
        ListenAddresses(by_transport={name: ListenAddress("", used_port)}).check_ports(None)
    with pytest.raises(TransportError, match="for operations at"):
        ListenAddresses().check_ports(used_port)
    ListenAddresses(by_transport={"other": ListenAddress("", used_port)}).check_ports(
        None
    )  # another transport's use of a port is unknown


def test_duplicate_port_is_detected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigurationError, match=f"port {port} is set twice, for tcp and for http"):
        ListenAddresses(by_transport={"tcp": ListenAddress("", port), "http": ListenAddress("", port)}).check_ports(
            None
        )


def test_server_listens_on_network_interfaces(start_python, plain_environment, tmp_path, registry):
    """One transport listens at each interface, one of another package at its own port, and one not at all."""
    (tmp_path / "other_transport.py").write_text(OTHER_TRANSPORT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    token = "t" * 20
    environment = plain_environment | {
        "DJINN_PLUGINS": "tcp,http,other_transport",
        "PYTHONPATH": str(tmp_path),
        "DJINN_TOKEN": token,
    }
    command = [
        "-m",
        "djinn_core.cli",
        "serve",
        "--device",
        "cpu",
        "--store-gib",
        "0",
        "--insecure-plaintext-on-network",
    ]
    command += ["--connection-file", tmp_path / "connection.json", "--without-transport", "http"]
    command += ["--transport", "tcp=0.0.0.0:0", "--transport", f"other={port}"]
    server = started_server(start_python, command, tmp_path, environment)
    try:
        assert sorted(url.partition(":")[0] for url in server.urls) == ["other", "tcp"]
        assert server.url("other") == f"other://127.0.0.1:{port}"
        assert "0.0.0.0" not in server.file.read_text()
        (opened,) = open_connections(server.settings(servers=(server.url("tcp"),), token=token), registry)
        opened.connection.close()
        assert opened.url.startswith("tcp://")
    finally:
        assert server.stop() == 0
    log = server.log.read_text()
    assert log.index("Starting an executor") < log.index("Listening at")
    assert f"On other machines: export DJINN_SERVERS={server_url(log)}" in log
    assert "http://" not in log
    assert token not in log


def server_url(log: str) -> str:
    """Return addresses that are advertised to other machines, for listen addresses."""
    (line,) = [line for line in log.splitlines() if line.startswith("Listening at tcp://")]
    return f"tcp://{own_address()}:{line.rpartition(':')[2]}"


# The forked process has imported what needs the library.
FORGET = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("aiohttp", "djinn_http", "djinn_observability"):
        del sys.modules[name]
from djinn_core.cli import main
main()
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--operations-port", "0"],
            "--operations-port needs a plugin that serves operations, and none is in use",
        ),
        ([], "or leave the transport out: --without-transport http"),
    ],
)
def test_missing_transport_library_is_named(python, plain_environment, tmp_path, options, said):
    (tmp_path / "aiohttp.py").write_text("raise ImportError('No module named aiohttp')")
    command = ["serve", "--device", "cpu", "--connection-file", tmp_path / "c", *options]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    done = python.run("-c", FORGET, *command, env=plain_environment | {"PYTHONPATH": path})
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert said in " ".join(output.split())
    assert "Traceback" not in output


def test_limit_of_unknown_tenant_is_refused(tmp_path):
    table = str(tmp_path / "tokens.json")
    run = lambda *arguments: CliRunner().invoke(main, ["token", *arguments, "--file", table])
    assert run("create", "bert").exit_code == 0
    done = run("limit", "bret", "--sessions", "2")
    assert done.exit_code == 1
    assert "no token of a tenant 'bret': did you mean 'bert'?" in done.output
    assert "bret" not in Path(table).read_text()
    assert run("limit", "bert", "--sessions", "2").exit_code == 0
    assert run("limit", "default", "--sessions", "2").exit_code == 0
