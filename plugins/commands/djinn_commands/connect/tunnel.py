"""Start, query and end the keeper of a tunnel, from commands."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Final

import filelock

from djinn_commands.connect.records import Record, TunnelState, record_path, tunnel_state

_TIMEOUT: Final = 60.0  # timeout in seconds, for steps that usually take less than one


def is_kept(name: str) -> bool:
    """Return True if the keeper of the server `name` runs."""
    lock = filelock.FileLock(record_path(name, ".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    lock.release()
    return False


def free_port() -> int:
    """Return a TCP port that is free on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_keeper(record: Record) -> TunnelState:
    """Start the keeper of the record's tunnel, instead of a running keeper. Return its state after the first attempt."""
    stop_keeper(record.name)
    with contextlib.suppress(FileNotFoundError):
        record_path(record.name, ".tunnel").unlink()
    with record_path(record.name, ".keeper.log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "djinn_commands.connect.keeper", record.name]
        begun = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd="/", check=False, text=True
        )
    process = int(begun.stdout or 0)
    deadline = time.monotonic() + _TIMEOUT
    while process and _is_running(process) and time.monotonic() < deadline:
        if (state := tunnel_state(record.name)) is not None and state.process == process:
            return state
        time.sleep(0.02)
    if (state := tunnel_state(record.name)) is not None and state.process == process:
        return state  # it has just ended by itself
    log_text = record_path(record.name, ".keeper.log").read_text(errors="replace").strip()
    return TunnelState(process, reason=log_text or "the process that keeps the tunnel open wrote no state", ended=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def stop_keeper(name: str) -> bool:
    """End the keeper of the server `name` and its connection. Return False if no keeper was running."""
    deadline = time.monotonic() + _TIMEOUT
    was_there = False
    while is_kept(name) and time.monotonic() < deadline:
        # The lock shows that the process lives, so the id is its own. It writes the id after its first attempt.
        if not was_there and (state := tunnel_state(name)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.process, signal.SIGTERM)
            was_there = True
        time.sleep(0.02)
    return was_there
