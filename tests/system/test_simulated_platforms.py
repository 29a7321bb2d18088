"""Clients, and an executor of a program's own, where nothing is that only Linux has: see `evaluation/simulated`.

No Mac and no Windows has run this. `python -m evaluation simulated darwin` and `python -m evaluation simulated windows` run a large part of the suite in such processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import start_server

SIMULATED = Path(__file__).parents[2] / "evaluation" / "simulated"
SECONDS = 300
# Programs one after the other, in one process.
RUN = "import runpy, sys; programs = sys.argv.pop(1).split(); [runpy.run_path(program) for program in programs]"


@pytest.fixture(scope="module")
def tls_server(python, plain_environment, tmp_path_factory):
    """Yield a server under TLS on Linux."""
    folder = tmp_path_factory.mktemp("secure")
    environment = plain_environment | {"XDG_STATE_HOME": str(folder / "state")}
    options = ["--tls-self-signed", "--threads", "1", "--drain-seconds", "1", "--store-gib", "0"]
    server = start_server(python.start, folder, *options, env=environment)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def run_on(plain_environment):
    """Return a function that runs programs as on a platform and returns their output."""

    def run(platform, programs, *arguments):
        path = os.pathsep.join([str(SIMULATED), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = plain_environment | {
            "SIMULATED_PLATFORM": platform,
            "PYTHONPATH": path,
            "DJINN_START_TIMEOUT": str(SECONDS),
        }
        command = [
            sys.executable,
            "-c",
            RUN,
            " ".join(str(SIMULATED / name) for name in programs),
            *map(str, arguments),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.long  # `python -m evaluation simulated` has executors of its own, too
def test_client_works_on_simulated_macos(run_on, tls_server):
    said = run_on("darwin", ["client_program.py", "macos_answers.py"], tls_server.file, "here", "tcp")
    assert "unix://" in said
    assert "urls ['https://" in said
    assert said.endswith("trained, generated\nanswered\n")


def test_client_works_on_simulated_windows(run_on, tls_server):
    said = run_on("win32", ["client_program.py", "windows_answers.py"], tls_server.file, "http", "tcp")
    assert "urls ['tcps://" in said
    assert "urls ['https://" in said
    assert said.endswith("trained, generated\nanswered\n")
