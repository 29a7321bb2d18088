"""An executor that is wrong in known ways, see `wrong_executor.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 60.0


@pytest.fixture(scope="session")
def wrong(plain_environment, tmp_path_factory):
    """A server whose executor has wrong kernels; its connection file."""
    folder = tmp_path_factory.mktemp("wrong")
    file, log = folder / "connection.json", folder / "log"
    command = [sys.executable, str(Path(__file__).with_name("wrong_executor.py")), "serve", str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=plain_environment)
    deadline = time.monotonic() + SECONDS
    while not file.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    yield file
    process.terminate()
    process.wait(SECONDS)


@pytest.fixture
def on_wrong_executor(wrong, monkeypatch):
    """The device, on that executor; gives its name."""
    import djinn

    for name in [name for name in os.environ if name.startswith("DJINN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DJINN_CONFIG", os.devnull)
    djinn.configure(connection_file=wrong)
    yield "remote_accelerator:0"
    djinn.configure()
