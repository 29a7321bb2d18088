"""A client that cannot use its server is told so early, and in terms of what it configured."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
import torch
from configured import configured
from servers import start_server

import djinn
from djinn.testing import open_connections
from djinn_client.runtime import client
from djinn_client.runtime.connecting import servers
from djinn_client.runtime.connecting.servers import AVAILABLE_SECONDS, ask_servers
from djinn_core.settings import Settings
from djinn_core.wire.messages import Status
from tests.shared.executors import only_executor

DEVICE = "remote_accelerator:0"
TOKEN = "a token of more than sixteen characters"


@pytest.fixture
def closed_address():
    """Return an address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def mute_address():
    """Return an address that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def plain_server(python, plain_environment, tmp_path_factory):
    """Yield a server without leases and journals."""
    options = [
        "--threads",
        "1",
        "--lease-seconds",
        "0",
        "--journal-gib",
        "0",
        "--store-gib",
        "0",
        "--drain-seconds",
        "0",
    ]
    server = start_server(python.start, tmp_path_factory.mktemp("plain"), *options, env=plain_environment)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def under_tls(python, plain_environment, tmp_path_factory):
    options = ["--threads", "1", "--tls-self-signed", "--store-gib", "0", "--drain-seconds", "0"]
    server = start_server(python.start, tmp_path_factory.mktemp("tls"), *options, env=plain_environment)
    yield server
    server.stop()


def test_unreachable_server_raises_at_first_op(closed_address, caplog):
    with configured(servers=[closed_address], token=TOKEN):
        assert not torch.accelerator.is_available()
        assert not torch.remote_accelerator.is_available()
        assert f"no server answers at {closed_address}" in caplog.text
        for _ in range(2):
            with pytest.raises(djinn.errors.TransportError, match=closed_address):
                torch.ones(2, device=DEVICE)
        with djinn.capture() as captured:  # needs none
            torch.ones(2) + 1
        assert captured.graph.by_op["add"]
        with pytest.raises(djinn.errors.TransportError, match=closed_address):
            torch.ones(2, device=DEVICE)


def test_missing_or_wrong_token_raises_at_once(closed_address, plain_server, caplog):
    with configured(servers=[closed_address]):
        assert not torch.accelerator.is_available()
        assert f"no token for {closed_address}" in caplog.text
        with pytest.raises(djinn.errors.ConfigurationError, match="no token for"):
            torch.ones(2, device=DEVICE)
    with configured(servers=[plain_server.url("tcp")], token=TOKEN):
        assert not torch.accelerator.is_available()
        assert "token" in caplog.text
        with pytest.raises(djinn.errors.AccessRefused):
            torch.zeros(3, device=DEVICE)


def test_availability_check_is_bounded(mute_address, caplog):
    with configured(servers=[mute_address], token=TOKEN, connect_timeout=3600):
        found = []
        asking = threading.Thread(target=lambda: found.append(torch.accelerator.is_available()))
        asking.start()
        asking.join(AVAILABLE_SECONDS + 60)
        assert found == [False]
        assert f"within {AVAILABLE_SECONDS:g} s" in caplog.text


def test_availability_check_opens_no_session(plain_server):
    with configured(servers=[plain_server.url("tcp")], token=plain_server.token):
        assert torch.accelerator.is_available()
        assert not djinn.compat.is_initialized()
        assert torch.ones(2, device=DEVICE).sum().item() == 2
    assert torch.accelerator.is_available(), "an executor of the program's own needs no server"
    assert not djinn.compat.is_initialized()


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_wrong_scheme_names_tls_address(under_tls, scheme):
    right = under_tls.url(f"{scheme}s")
    wrong = f"{scheme}{right.removeprefix(f'{scheme}s')}"
    with configured(servers=[wrong], token=under_tls.token, connect_timeout=60):
        with pytest.raises(djinn.errors.TransportError, match=f"its address is {right}"):
            djinn.init()
        (answer,) = ask_servers(Settings(servers=(wrong,), token=under_tls.token)).values()
        assert f"If that server uses TLS, its address is {right}" in str(answer)


def test_unknown_transport_is_named_before_token():
    with configured(servers=["foo://x"]), pytest.raises(djinn.errors.PluginError, match="no transport for foo://"):
        djinn.init()
    with pytest.raises(djinn.errors.PluginError, match="no transport for foo://"):
        ask_servers(Settings(servers=("foo://x",)))


def test_servers_with_equal_process_numbers_are_distinct(monkeypatch):
    """The servers' processes have equal numbers. Only addresses of one server share an answer."""
    said = {
        url: Status("26.11.0", 1, 1.0, (), instance=instance)
        for url, instance in [("tcp://a", "x"), ("tcp://b", "y"), ("http://a", "x")]
    }
    monkeypatch.setattr(servers, "ask_status", lambda server: said[server.urls[0]])
    assert list(ask_servers(Settings(servers=tuple(said), token="t" * 16))) == ["tcp://a", "tcp://b"]
    monkeypatch.setattr(servers, "ask_status", lambda *_: Status("26.10.0", 1, 1.0, ()))
    assert list(ask_servers(Settings(servers=tuple(said), token="t" * 16))) == ["tcp://a"]


def test_errors_name_configured_address(plain_server):
    url = plain_server.url("tcp")
    with configured(servers=[url], token=plain_server.token):
        matrix = torch.ones(700, 700, device=DEVICE)
        assert matrix.sum().item() == 490_000
        reached = open_connections()[0].url
        assert reached.startswith("unix://"), "the fastest way on one machine"
        with pytest.raises(djinn.errors.DeadlineExceeded, match=f"^{url} did not answer"), djinn.deadline(0.2):
            long = matrix
            for _ in range(300):
                long = long @ matrix
            long.sum().item()
        del long
        os.kill(client.executor_process(), signal.SIGKILL)
        with pytest.raises(djinn.errors.SessionLost, match=f"the session with {url} is lost") as caught:
            (matrix + 1).sum().item()
        assert "unix://" not in str(caught.value)


def test_own_executor_has_no_address():
    with configured(threads=1):
        djinn.init()
        assert only_executor().link.name == "this program's own executor"


def test_taken_port_is_named_before_executors_start(python, plain_environment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "connection.json"
        serve = ["-m", "djinn_core.cli", "serve", "--device", "cpu", "--port", port, "--connection-file", file]
        done = python.run(*serve, env=plain_environment)
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "cannot listen" in told
    assert str(port) in told
    assert "Choose another port" in done.stderr.replace("\n", " ")
    assert "executor is ready" not in done.stderr
