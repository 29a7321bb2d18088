"""`djinn kill`: a session that its owner or the operator ends is stopped at once, and its program hears by whom."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
import torch
from click.testing import CliRunner
from servers import start_server

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.connecting.handshake import Server
from djinn_client.runtime.connecting.killing import ask_to_kill
from djinn_core.cli import main
from djinn_core.errors import AccessRefused, SessionLost
from djinn_core.protocol.connection_file import read_connection_file
from tests.shared.executors import only_executor

DEVICE = "remote_accelerator:0"


@pytest.fixture
def run_kill(serving):
    """Return a function that runs `djinn kill` as the operator of the shared server."""
    environ = {"DJINN_SERVERS": serving.urls[0], "DJINN_TOKEN": serving.token}
    return lambda *arguments: CliRunner().invoke(main, ["kill", *arguments], env=environ)


def test_kill_ends_computing_session_with_reason(connect, url_of, run_kill):
    with connect(url_of("tcp")):
        matrix = torch.full((500, 500), 0.001, device=DEVICE)
        djinn.synchronize()
        name, found = client.session_name(), []

        def wait():
            product = matrix
            for _ in range(6000):
                product = product @ matrix
            try:
                found.append(product.sum().item())
            except SessionLost as error:
                found.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        while not only_executor().replies.pending:
            time.sleep(0.01)
        ended = run_kill(name[:8])
        assert ended.exit_code == 0, ended.output
        assert f"ended session {name}" in ended.output
        thread.join()
        assert "ended by the operator of the server, with `djinn kill`" in found[0]
        with pytest.raises(SessionLost):
            matrix.sum().item()
        djinn.init()
        assert torch.ones(2, device=DEVICE).sum().item() == 2.0, "the executor lives on"


def test_unknown_or_ambiguous_name_kills_nothing(connect, url_of, run_kill):
    with connect(url_of("tcp")):
        x = torch.ones(2, device=DEVICE)
        refused = run_kill("nothing-begins-like-this")
        assert refused.exit_code == 1
        assert "no session name begins with 'nothing-begins-like-this'" in refused.output
        assert run_kill("").exit_code != 0
        assert x.sum().item() == 2.0


def test_tenants_kill_own_sessions_only(start_python, plain_environment, tmp_path, registry):
    tokens, audit = tmp_path / "tokens.json", tmp_path / "audit.log"
    token = {}
    for who, extra in (("alice", ()), ("bob", ()), ("watcher", ("--monitor",))):
        made = CliRunner().invoke(main, ["token", "create", who, "--file", str(tokens), *extra])
        token[who] = made.stdout.strip()
    options = ["--threads", "1", "--token-file", str(tokens), "--audit-log", str(audit), "--drain-seconds", "1"]
    (tmp_path / "server").mkdir()
    server = start_server(start_python, tmp_path / "server", *options, env=plain_environment)
    try:
        url = next(u for u in read_connection_file(server.file).urls if u.startswith("tcp"))
        transports = registry.transports
        djinn.configure(servers=[url], token=token["alice"], disable=("local",))
        x = torch.ones(2, device=DEVICE)
        assert x.sum().item() == 2.0
        name = client.session_name()
        for who, why in (("bob", "no session"), ("watcher", "watching the server only")):
            with pytest.raises(AccessRefused, match=why):
                ask_to_kill(Server((url,), token[who], transports, 300.0), name)
        assert x.sum().item() == 2.0
        assert ask_to_kill(Server((url,), token["alice"], transports, 300.0), name).session == name
        with pytest.raises(SessionLost, match="ended by its owner alice"):
            while True:
                with contextlib.suppress(djinn.errors.ProgramStopped):  # what ran at that moment
                    x.sum().item()
    finally:
        server.stop()
        djinn.shut_down()
        djinn.configure()
    killed = [line for line in map(json.loads, audit.read_text().splitlines()) if line["audit"] == "killed"]
    assert [(line["tenant"], line["session"]) for line in killed] == [("alice", name)]
