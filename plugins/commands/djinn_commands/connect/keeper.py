"""The keeper: a process that keeps the tunnel to one server open.

It runs until `djinn disconnect` or the end of the user's login session. It takes over the connection that `djinn connect`
opened. If the connection breaks, it reconnects with exponential backoff. It imports neither Djinn nor PyTorch.
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

_FIRST_PAUSE: Final = 0.5  # seconds between two attempts
_MAX_PAUSE: Final = 60.0
# Errors that a retry does not fix; the remote side would take retries for password guessing.
_FINAL_ERRORS: Final = re.compile(
    r"Permission denied|Host key verification failed|REMOTE HOST IDENTIFICATION|Too many authentication failures"
)


def is_final(reason: str) -> bool:
    """Return True if a retry cannot fix this error of ssh, for example a refused key."""
    return _FINAL_ERRORS.search(reason) is not None


def next_pause(pause: float, connected_seconds: float) -> float:
    """Return the seconds to wait before the next attempt to connect.

    Args:
        pause: seconds of the previous wait.
        connected_seconds: seconds that the last attempt and its connection lasted.
    """
    return _FIRST_PAUSE if connected_seconds > _MAX_PAUSE else min(pause * 2, _MAX_PAUSE)


def keep(record: Record) -> None:
    """Keep the tunnel open. Return when an error occurs that a retry cannot fix."""
    connection = SshConnection(record.destination, control_path(record.name))
    pause = _FIRST_PAUSE
    while True:
        begun = time.monotonic()
        reason = connection.open(asks=False) or connection.forward(record.local, record.remote)
        if not reason:
            _report(record, is_open=True)
            with _connection_holder(connection) as holder:
                holder.wait()
            reason = "the connection broke"
        else:
            connection.close()
        _report(record, reason=reason, has_ended=is_final(reason))
        if is_final(reason):
            return
        pause = next_pause(pause, time.monotonic() - begun)
        time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - not about secrets


@contextlib.contextmanager
def _connection_holder(connection: SshConnection) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that ends when the connection breaks. Kill it at the end of the block."""
    process = subprocess.Popen(
        hold_command(connection), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _report(record: Record, *, is_open: bool = False, reason: str = "", has_ended: bool = False) -> None:
    save_tunnel_state(record.name, TunnelState(os.getpid(), record.local, record.remote, is_open, reason, has_ended))


def _exit(*_: object) -> None:
    raise SystemExit(0)


def _detached() -> int:
    """Fork a child in its own session, which survives its terminal. Return 0 in the child, its process id in the parent."""
    if sys.platform != "win32":
        if child := os.fork():
            return child
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return 0


def main(name: str) -> None:
    """Start the keeper of the record `name` as a detached process and print its process id. A record has at most one keeper."""
    if child := _detached():
        sys.stdout.write(f"{child}\n")
        return
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, sys.stdout.fileno())  # so that the reader of the id does not wait
    signal.signal(signal.SIGTERM, _exit)
    record = find_record(name)
    if record is None:
        raise SystemExit(f"there is no record of a server {name!r}: repeat `djinn connect`")
    try:
        with filelock.FileLock(record_path(name, ".lock"), timeout=0):
            try:
                keep(record)
            finally:
                SshConnection(record.destination, control_path(name)).close()
    except filelock.Timeout:
        raise SystemExit(
            f"another process keeps the tunnel to {name!r} open: end it with `djinn disconnect {name}`"
        ) from None


if __name__ == "__main__":
    main(sys.argv[1])
