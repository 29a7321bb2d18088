"""The process that keeps a tunnel open.

Each server has one such process, until `djinn disconnect` or the end of the user's login session. It takes over the
connection that `djinn connect` opened. If the connection breaks, it reconnects with exponential backoff. It imports
neither Djinn nor PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import filelock

from djinn_commands.connect.records import (
    Record,
    TunnelState,
    control_path,
    find_record,
    record_path,
    save_tunnel_state,
)
from djinn_commands.connect.ssh import SshConnection, hold_command

_FIRST: Final = 0.5  # seconds between two attempts
_LONGEST: Final = 60.0
# Errors that a retry does not fix; the remote side would take retries for password guessing.
_FINAL: Final = re.compile(
    r"Permission denied|Host key verification failed|REMOTE HOST IDENTIFICATION|Too many authentication failures"
)


def is_final(reason: str) -> bool:
    """Return True if only the user can fix the error of a connection."""
    return _FINAL.search(reason) is not None


def next_pause(pause: float, lasted: float) -> float:
    """Return the seconds until the next attempt, after a pause of `pause` and a tunnel that `lasted` this many seconds."""
    return _FIRST if lasted > _LONGEST else min(pause * 2, _LONGEST)


def keep(record: Record) -> None:
    """Keep the tunnel open until it fails for good or this process is ended."""
    connection = SshConnection(record.destination, control_path(record.name))
    pause = _FIRST
    while True:
        begun = time.monotonic()
        reason = connection.open(asks=False) or connection.forward(record.local, record.remote)
        if not reason:
            _say(record, is_open=True)
            with _held(connection) as holder:
                holder.wait()
            reason = "the connection broke"
        else:
            connection.close()
        _say(record, reason=reason, ended=is_final(reason))
        if is_final(reason):
            return
        pause = next_pause(pause, time.monotonic() - begun)
        time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - not about secrets


@contextlib.contextmanager
def _held(connection: SshConnection) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager with a process that ends with the connection."""
    process = subprocess.Popen(
        hold_command(connection), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _say(record: Record, *, is_open: bool = False, reason: str = "", ended: bool = False) -> None:
    save_tunnel_state(record.name, TunnelState(os.getpid(), record.local, record.remote, is_open, reason, ended))


def _end(*_: object) -> None:
    raise SystemExit(0)


def _detached() -> int:
    """Fork a child that no terminal ends. Return 0 in the child, and the child's process id in this process."""
    if sys.platform != "win32":
        if child := os.fork():
            return child
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return 0


def main(name: str) -> None:
    """Keep the tunnel of a record in a detached process, and print its id. Only one process per record can run."""
    if child := _detached():
        sys.stdout.write(f"{child}\n")
        return
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, sys.stdout.fileno())  # so that the reader of the id does not wait
    signal.signal(signal.SIGTERM, _end)
    record = find_record(name)
    if record is None:
        raise SystemExit(f"there is no record {name!r}")
    try:
        with filelock.FileLock(record_path(name, ".lock"), timeout=0):
            try:
                keep(record)
            finally:
                SshConnection(record.destination, control_path(name)).close()
    except filelock.Timeout:
        raise SystemExit("another process keeps this tunnel open") from None


if __name__ == "__main__":
    main(sys.argv[1])
