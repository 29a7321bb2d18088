"""`djinn serve`, as a process of its own: who gets in, what it survives, how it ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from djinn_client.runtime.connecting.handshake import Server
from djinn_client.runtime.connecting.open import open_connections
from djinn_client.runtime.connecting.servers import ask_status
from djinn_commands.servers.status_commands import status as status_command
from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.wire.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    ProtocolClose,
    Refused,
    StatsReply,
    StatsRequest,
    Status,
    StatusRequest,
    Welcome,
    decode,
    encode,
)

SECONDS = 300.0


def hello(token: str, protocol: int = PROTOCOL_VERSION, device: str = "") -> Hello:
    return Hello(protocol, token, "26.11.0", "2.13.0", device, "laptop")


@pytest.fixture
def healthy_client(server, registry, ask):
    """Yield a client that other clients must not affect. Check it at the end."""
    (opened,) = open_connections(server.settings(), registry)
    yield opened
    assert isinstance(ask(opened.connection, StatsRequest()), StatsReply), "the healthy client was harmed"
    opened.connection.send(Frame(encode(Goodbye())))
    opened.connection.close()


def test_connection_file_is_private(server):
    assert server.file.stat().st_mode & 0o777 == 0o600
    content = json.loads(server.file.read_text())
    assert set(content) == {"urls", "token"}
    assert any(url.startswith("tcp://127.0.0.1:") for url in content["urls"])
    assert [path.name for path in server.file.parent.iterdir() if "connection" in path.name] == ["connection.json"]


def test_token_is_in_no_log_or_process_list(server, registry, ask, dial):
    assert isinstance(ask(dial(server.url("tcp")), hello(server.token)), Welcome)
    status = ask_status(Server((server.url("tcp"),), server.token, registry.transports, SECONDS))
    for process in (server.process.pid, *(executor.process for executor in status.executors)):
        assert server.token.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        assert server.token.encode() not in Path(f"/proc/{process}/environ").read_bytes()
    log = server.log.read_text()
    assert server.url("tcp") in log
    assert str(server.file) in log
    assert server.token not in log


@pytest.mark.parametrize("token", ["", "x", "wrong" * 20, "é"])
def test_wrong_token_gets_only_refusal(server, dial, ask, healthy_client, token):
    connection = dial(server.url("tcp"))
    answer = ask(connection, hello(token))
    assert isinstance(answer, Refused)
    assert "token" in answer.reason
    with pytest.raises(TransportError):
        connection.receive(SECONDS)
    assert "refused" in server.log.read_text()


def test_status_needs_token(server, dial, ask):
    assert isinstance(ask(dial(server.url("tcp")), StatusRequest(PROTOCOL_VERSION, "wrong")), Refused)
    assert isinstance(ask(dial(server.url("tcp")), StatusRequest(PROTOCOL_VERSION, server.token)), Status)


def test_refusal_names_both_protocol_versions(server, dial, ask):
    answer = ask(dial(server.url("tcp")), hello(server.token, protocol=PROTOCOL_VERSION + 1))
    assert isinstance(answer, Refused)
    assert f"version {PROTOCOL_VERSION + 1}" in answer.reason
    assert f"version {PROTOCOL_VERSION} " in answer.reason


def test_refusal_of_unknown_device_lists_devices(server, dial, ask):
    answer = ask(dial(server.url("tcp")), hello(server.token, device="cuda:7"))
    assert isinstance(answer, Refused)
    assert "'cuda:7'" in answer.reason
    assert "cpu:0" in answer.reason
    assert isinstance(ask(dial(server.url("tcp")), hello(server.token, device="cpu")), Welcome)


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(4096),
    "huge": b"DJNF\x01\x00\x00\x00" + b"\xff" * 16,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_invalid_frame_closes_only_its_connection(server, healthy_client, wait_for, data):
    before = server.log.read_text().count("closed a connection after a protocol error")
    parts = urlsplit(server.url("tcp"))
    with socket.create_connection((parts.hostname, parts.port), SECONDS) as client:
        client.settimeout(SECONDS)
        client.sendall(data)
        while True:
            try:
                if not client.recv(4096):
                    break
            except ConnectionResetError:
                break
    wait_for(
        lambda: server.log.read_text().count("closed a connection after a protocol error") > before, "a line in the log"
    )


def test_invalid_message_is_answered_and_closes_connection(server, dial, healthy_client):
    connection = dial(server.url("tcp"))
    connection.send(Frame(b"\x93\x01\x02\x03"))
    assert isinstance(decode(connection.receive(SECONDS).head), ProtocolClose)
    with pytest.raises(TransportError):
        connection.receive(SECONDS)


def test_unauthenticated_client_is_limited(server, dial, healthy_client):
    connection = dial(server.url("tcp"))
    with pytest.raises(TransportError):  # by `send` where the server hangs up before it has everything
        connection.send(Frame(b"x", [bytes(1 << 20)]))
        connection.receive(SECONDS)


def test_message_after_welcome_must_be_attach(server, dial, ask, healthy_client):
    connection = dial(server.url("tcp"))
    assert isinstance(ask(connection, hello(server.token)), Welcome)
    answer = ask(connection, StatsRequest())
    assert isinstance(answer, ProtocolClose)
    assert "expected Attach" in answer.reason


def test_status_shows_sessions_executors_and_memory_by_owner(server, healthy_client):
    result = CliRunner().invoke(status_command, ["--json", "--connection-file", str(server.file)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.output)
    assert row["process"] == server.process.pid
    assert row["error"] is None
    (executor,) = row["executors"]
    assert executor["process"] == healthy_client.attached.process
    assert executor["state"] == "ready"
    assert executor["device"]["memory"] > 0
    sessions = {session["session"]: session for session in executor["sessions"]}
    owner = sessions[healthy_client.attached.session]["client"]
    assert f"process {os.getpid()}" in owner
    assert row["memory_by_owner"][owner] == 0


def test_status_command_prints_text(server, healthy_client):
    result = CliRunner().invoke(status_command, ["--connection-file", str(server.file)])
    assert "cpu:0" in result.output
    assert str(healthy_client.attached.process) in result.output
    assert healthy_client.attached.session[:8] in result.output


def test_dead_executor_is_replaced(own_server, registry, wait_for, exists):
    server = own_server("--journal-gib", "0")
    (opened,) = open_connections(server.settings(), registry)
    os.kill(opened.attached.process, signal.SIGKILL)
    with pytest.raises(TransportError):
        opened.connection.receive(SECONDS)
    wait_for(lambda: "was restarted" in server.log.read_text(), "a new executor")
    (again,) = open_connections(server.settings(), registry)
    assert again.attached.process != opened.attached.process
    assert "died" in server.log.read_text()
    again.connection.close()
    server.process.kill()  # nothing survives a gateway that is killed
    server.process.wait()
    wait_for(lambda: not exists(again.attached.process), "the end of the executor")


def test_sigterm_lets_sessions_end_first(own_server, registry, ask, wait_for, exists):
    server = own_server()
    (opened,) = open_connections(server.settings(), registry)
    url = server.url("tcp")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not server.file.exists(), "the removal of the connection file")
    assert isinstance(ask(opened.connection, StatsRequest()), StatsReply)
    assert server.process.poll() is None
    with pytest.raises(TransportError):
        ask_status(Server((url,), "token", registry.transports, 2.0))
    opened.connection.send(Frame(encode(Goodbye())))
    opened.connection.close()
    assert server.process.wait(SECONDS) == 0
    assert not exists(opened.attached.process)
    assert not Path(opened.url.removeprefix("unix://")).parent.exists()


def test_sigterm_wait_is_bounded(own_server, registry, exists):
    server = own_server("--drain-seconds", "0.2")
    (opened,) = open_connections(server.settings(), registry)
    assert server.stop(signal.SIGINT) == 0
    assert not exists(opened.attached.process)
    assert decode(opened.connection.receive(SECONDS).head) == ProtocolClose("the server was stopped", stopped=True)
    opened.connection.close()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--host", "0.0.0.0"], ["0.0.0.0", "--token-file", "--tls-cert", "ssh -L", "--insecure-plaintext-on-network"]),
        (["--tls-cert", "cert.pem"], ["cert.pem", "PEM"]),
        (["--token-file", "no/such/file"], ["no/such/file"]),
    ],
    ids=["network", "tls", "token"],
)
def test_unsafe_serve_options_are_refused_with_advice(tmp_path, python, plain_environment, arguments, advice):
    command = ["-m", "djinn_core.cli", "serve", "--connection-file", tmp_path / "file", *arguments]
    result = python.run(*command, env=plain_environment)
    assert result.returncode == 1
    assert all(text in result.stderr for text in advice), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "file").exists()


def test_signal_in_other_thread_stops_server(own_server):
    """The kernel chooses the thread. Python's handlers run in the main thread, which must notice."""
    server = own_server("--drain-seconds", "0.2")
    threads = {int(thread.name) for thread in Path(f"/proc/{server.process.pid}/task").iterdir()} - {server.process.pid}
    assert ctypes.CDLL(None).tgkill(server.process.pid, min(threads), signal.SIGTERM) == 0
    assert server.process.wait(SECONDS) == 0


LOST = """
import os, signal, sys
from djinn_core.cli import main
from djinn_server.gateway import gateway

class Garbage:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

gateway.freeze_startup_objects = Garbage
main()
"""


def test_signal_lost_in_finalizer_stops_server(python, plain_environment, tmp_path):
    done = python.run(
        "-c", LOST, "serve", "--connection-file", tmp_path / "file", env=plain_environment, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" in done.stderr
    assert not (tmp_path / "file").exists()
