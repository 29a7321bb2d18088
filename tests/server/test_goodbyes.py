"""The end of a program ends its session at once, even during a computation, after requested files are written."""

from __future__ import annotations

import time

import pytest
from safetensors.torch import load_file
from servers import start_server, wait_for

# Sessions wait ten minutes for clients that are gone: in the tests only a goodbye ends one sooner.
OPTIONS = ("--threads", "1", "--drain-seconds", "1", "--lease-seconds", "600", "--most-sessions", "1")

# A minute or more of matrix products, of which nothing is read.
BUSY = """
import sys, threading, time, torch, djinn
djinn.configure(checkpoint_instructions=100)
d = "remote_accelerator:0"
x = torch.full((1500, 1500), 0.001, device=d)
print(x[0, 0].item(), flush=True)
for _ in range(400):
    x = (x @ x) * 0.001
"""
ENDS = {
    "return": "",
    "exception": "raise ValueError('the end')",
    "shut_down": "djinn.shut_down()",
    "waiting thread": "threading.Thread(target=lambda: x.sum().item(), daemon=True).start(); time.sleep(0.3)",
}
SUCCESSOR = "import torch, djinn; print(torch.arange(4.0, device='remote_accelerator:0').sum().item())"

# Saves a file that depends on running work, and ends by Ctrl-C before the executor replies.
SAVING = """
import signal, threading, time, torch, djinn
from djinn_client.runtime.client import context
d, s = "remote_accelerator:{device}", "remote_accelerator:{saver}"
x = torch.full((700, 700), 2.0, device=d)
print(x[0, 0].item(), flush=True)
for _ in range(25):
    x = (x @ x) * 0 + 2
saved = x[:2, :3].clone().to(s)
def interrupt():
    while not context.session.changes_files:
        time.sleep(0.005)
    signal.raise_signal(signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    djinn.save_weights({{"w": saved}}, "file:last.safetensors")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


def client_of(server, scheme):
    return {
        "DJINN_SERVERS": server.url(scheme),
        "DJINN_TOKEN": server.token,
        "DJINN_DISABLE": "local",
        "DJINN_CALIBRATE": "0",
    }


@pytest.fixture(scope="module")
def run_client(python, plain_environment, tmp_path_factory, folder):
    """Return a function that runs a client program of a server for one session. `server`: that server."""
    options = [*OPTIONS, "--save-weights", str(folder)]
    server = start_server(python.start, tmp_path_factory.mktemp("server"), *options, env=plain_environment)

    def run(program, scheme="tcp"):
        return python.run("-c", program, env=plain_environment | client_of(server, scheme))

    run.server = server
    yield run
    server.stop()


@pytest.mark.parametrize(
    ("scheme", "end"),
    [("tcp", "return"), ("http", "exception"), ("http", "waiting thread"), ("tcp", "shut_down")],
)
def test_busy_session_ends_with_its_program(run_client, scheme, end):
    before = run_client.server.log.read_text().count("a program was stopped")
    first = run_client(BUSY + ENDS[end], scheme)
    assert first.stdout.startswith("0.001"), first.stderr
    second = run_client(SUCCESSOR, scheme)
    assert second.stdout == "6.0\n", second.stderr
    assert run_client.server.log.read_text().count("a program was stopped") == before + 1


@pytest.mark.parametrize("options", [("--lease-seconds", "0"), ("--tls-self-signed",)], ids=["no lease", "tls"])
def test_busy_session_ends_without_lease_and_under_tls(options, own_server, python, plain_environment):
    server = own_server(*OPTIONS, *options)
    scheme = "tcps" if "--tls-self-signed" in options else "tcp"
    client = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file), "DJINN_DISABLE": "local,http"}
    assert server.url(scheme)
    first = python.run("-c", BUSY, env=client)
    assert first.returncode == 0, first.stderr
    assert python.run("-c", SUCCESSOR, env=client).stdout == "6.0\n"
    assert "a program was stopped" in server.log.read_text()


def test_interrupted_save_is_written_after_the_program_ends(run_client, folder):
    ended = run_client(SAVING.format(device=0, saver=0))
    assert "interrupted" in ended.stdout, ended.stderr
    assert run_client(SUCCESSOR).stdout == "6.0\n"
    assert load_file(folder / "default" / "last.safetensors")["w"].tolist() == [[2.0] * 3] * 2


def test_pool_session_ends_immediately_or_after_requested_file(own_server, python, plain_environment, tmp_path):
    server = own_server("--device", "all", *OPTIONS, "--save-weights", str(tmp_path))
    client = plain_environment | client_of(server, "tcp")
    for program in (BUSY.replace("accelerator:0", "accelerator:1"), SAVING.format(device=1, saver=2)):
        ended = python.run("-c", program, env=client)
        assert ended.returncode == 0, ended.stderr
        assert python.run("-c", SUCCESSOR, env=client).stdout == "6.0\n"
    assert load_file(tmp_path / "default" / "last.safetensors")["w"].tolist() == [[2.0] * 3] * 2


def test_own_executor_writes_a_requested_file_before_it_ends(python, plain_environment, tmp_path):
    program = SAVING.format(device=0, saver=0).replace("file:last", f"file:{tmp_path}/last")
    ended = python.run("-c", program, env=plain_environment)
    assert "interrupted" in ended.stdout, ended.stderr
    assert load_file(tmp_path / "last.safetensors")["w"].tolist() == [[2.0] * 3] * 2


def test_client_of_a_full_server_logs_its_wait_once(run_client, python, plain_environment, tmp_path):
    environment = plain_environment | client_of(run_client.server, "tcp")
    log, holding = tmp_path / "stderr", BUSY.split("for", maxsplit=1)[0] + "input()"
    before = run_client.server.log.read_text().count("why=busy")
    with (
        python.start_talking("-c", holding, env=environment) as holder,
        log.open("w") as stderr,
        (tmp_path / "stdout").open("w+") as stdout,
    ):
        assert holder.stdout.readline()
        waiting = python.start("-c", SUCCESSOR, env=environment, stderr=stderr, stdout=stdout)
        wait_for(lambda: "waiting up to 30 s" in log.read_text(), "the client's line")
        wait_for(lambda: run_client.server.log.read_text().count("why=busy") > before, "the server's line")
        time.sleep(1.0)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert waiting.wait(300) == 0
        stdout.seek(0)
        assert stdout.read() == "6.0\n"
    (line,) = log.read_text().splitlines()
    assert "1 of at most 1 sessions" in line
    assert run_client.server.log.read_text().count("why=busy") == before + 1


def test_refusal_of_a_full_server_names_the_remaining_lease(own_server, python, plain_environment):
    server = own_server("--threads", "1", "--lease-seconds", "600", "--most-sessions", "1")
    environment = plain_environment | client_of(server, "tcp") | {"DJINN_CONNECT_TIMEOUT": "1"}
    killed = python.run("-c", BUSY.split("for", maxsplit=1)[0] + "import os; os._exit(0)", env=environment)
    assert killed.returncode == 0
    wait_for(lambda: "its session waits" in server.log.read_text(), "the lease")
    refused = python.run("-c", SUCCESSOR, env=environment)
    assert "a session of a disconnected client ends in" in refused.stderr
