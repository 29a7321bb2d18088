"""A server process that lives as long as the demo."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from djinn.errors import StartupError

_log = logging.getLogger("djinn_commands.demo")

START_SECONDS = 300.0  # enough for a machine with one slow core, which first compiles all modules
STOP_SECONDS = 15.0


@contextlib.contextmanager
def running_server(device: str, threads: int) -> Iterator[Path]:
    """Start `djinn serve` on this machine and yield its connection file. Stop the server at the end of the block.

    Args:
        device: device of the executor.
        threads: torch threads of the executor.

    Raises:
        StartupError: the server ended or did not become ready. The message has its output.
    """
    with tempfile.TemporaryDirectory(prefix="djinn-demo-") as folder:
        connection, log = Path(folder, "connection.json"), Path(folder, "server.log")
        command = [*_djinn(), "serve", "--port", "0", "--store-gib", "0"]
        command += ["--device", device, "--threads", str(threads), "--connection-file", str(connection)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _wait(process, connection, log)
            yield connection
        finally:
            _stop(process)


def _djinn() -> list[str]:
    """Return the command line of this installation's `djinn`: its script, or `python -m djinn` if the script is missing."""
    script = Path(sysconfig.get_path("scripts"), "djinn")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "djinn"]


def _wait(process: subprocess.Popen[bytes], connection: Path, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not connection.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            log_text = log.read_text(errors="replace").strip() or "nothing"
            what = "did not get ready" if process.poll() is None else f"ended with code {process.returncode}"
            raise StartupError(f"The demo's server {what}. Its log:\n{log_text}\nTry `djinn serve` and `djinn doctor`.")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _log.warning("the demo's server did not stop within %s seconds and is killed", STOP_SECONDS)
        process.kill()
        process.wait()
