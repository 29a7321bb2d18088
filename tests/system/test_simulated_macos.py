"""A client and an executor of its own where nothing is that only Linux has: see `tests/simulated/sitecustomize.py`.

No Mac has run this. `make test-darwin-simulated` runs a large part of the suite in such a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import start_server

SIMULATED = Path(__file__).parents[1] / "simulated"
SECONDS = 300


@pytest.fixture(scope="module")
def secure(python, plain_environment, tmp_path_factory):
    """A server under TLS, on Linux."""
    folder = tmp_path_factory.mktemp("secure")
    environment = plain_environment | {"XDG_STATE_HOME": str(folder / "state")}
    options = ["--tls-self-signed", "--threads", "1", "--drain-seconds", "1", "--store-gib", "0"]
    server = start_server(python.start, folder, *options, env=environment)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def on_macos(plain_environment):
    """Run a program as on macOS; gives what it printed."""

    def run(*arguments):
        path = os.pathsep.join([str(SIMULATED), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = plain_environment | {"SIMULATED_PLATFORM": "darwin", "PYTHONPATH": path}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_an_executor_of_its_own(on_macos):
    said = on_macos(SIMULATED / "client_program.py")
    assert "trained, generated" in said
    assert "unix://" in said


def test_a_server_under_tls(on_macos, secure):
    said = on_macos(SIMULATED / "client_program.py", secure.file, "tcp")
    assert "urls ['https://" in said
    assert "trained, generated" in said


def test_what_the_platform_does_not_tell(on_macos):
    said = on_macos(SIMULATED / "platform_answers.py")
    assert said.split() == ["answered"]
