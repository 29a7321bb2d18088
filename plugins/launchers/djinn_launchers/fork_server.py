"""Fork server: imports the modules of executors once, and forks executors on request over a socket.

Its client is `djinn_launchers.fork_server_client`. The server has one thread and uses no device. It outlives the process
that started it, and ends after some time without executors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from djinn_core.system.files import CLOEXEC
from djinn_core.system.processes import lock_file
from djinn_core.system.role import become_server
from djinn_server.launch.executor_config import ExecutorConfig, decode_config

assert sys.platform == "linux", "elsewhere each executor is started anew"
_MAX_BYTES = 8 << 20  # largest request
_ORDER_SECONDS = 10.0


class ForkServer:
    """Forks executors for the clients of a socket, and sends each client the exit status of its executor."""

    def __init__(self, place: Path, seconds: float) -> None:
        """Listen at the socket `place`. `serve` returns after `seconds` without an executor.

        Raises:
            OSError: the socket cannot be bound.
        """
        self._seconds = seconds
        place.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(place))
        self._listening.listen(64)
        self._running: dict[int, tuple[int, socket.socket]] = {}  # process id and client's connection, by pidfd
        self._events = select.poll()
        self._events.register(self._listening, select.POLLIN)

    def serve(self) -> list[str] | None:
        """Fork executors until none has run for `seconds`.

        Return None in the server process. In each forked child, return the command arguments of its executor.
        """
        while True:
            events = self._events.poll(None if self._running else self._seconds * 1000)
            if not events and not self._running:
                return None
            for ready, _ in events:
                if ready in self._running:
                    self._send_exit_status(ready)
                elif (arguments := self._take_order()) is not None:
                    return arguments

    def _send_exit_status(self, ready: int) -> None:
        process, pipe = self._running.pop(ready)
        self._events.unregister(ready)
        os.close(ready)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with pipe, contextlib.suppress(OSError):  # its parent is gone
            pipe.sendall(b"%d\n" % status)

    def _take_order(self) -> list[str] | None:
        """Accept a connection, read its request, and fork. Return the executor's arguments in the child, None in the server."""
        connection, _ = self._listening.accept()
        connection.settimeout(_ORDER_SECONDS)
        descriptors: list[int] = []
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 8)
            order = json.loads(_receive_request(connection, int.from_bytes(head, "little")))
            process = os.fork()
            if not process:
                received_descriptors, descriptors = (
                    descriptors,
                    [],
                )  # `_become` closes these descriptors and may reuse their numbers
                return self._begin(order, received_descriptors, connection)
            descriptor = os.pidfd_open(process)
            self._running[descriptor] = process, connection
            self._events.register(descriptor, select.POLLIN)
            with contextlib.suppress(OSError):  # the parent is gone: the executor notices and ends
                connection.sendall(b"%d\n" % process)
        except (OSError, ValueError):
            connection.close()
        finally:
            _close(descriptors)
        return None

    def _begin(self, order: dict[str, Any], descriptors: list[int], client: socket.socket) -> list[str]:
        """Make the forked child the executor's process, and return the executor's arguments. On an error, end the child.

        Args:
            order: the client's request.
            descriptors: descriptors from the client.
            client: connection to the client, which only the server keeps.
        """
        try:
            client.close()
            self._listening.close()
            for descriptor, (_, connection) in self._running.items():
                os.close(descriptor)
                connection.close()
            return self._become(order, descriptors)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _become(self, order: dict[str, Any], descriptors: list[int]) -> list[str]:
        """Take over the client's streams, descriptors, folder and environment. Return the executor's arguments."""
        stdin, stderr, *passed_descriptors = descriptors
        os.dup2(stdin, 0)
        os.dup2(stderr, 2)
        passed_descriptors = [os.dup(number) for number in passed_descriptors]
        _close(descriptors)
        os.setpgid(0, 0)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        time.tzset()
        return [*order["arguments"], "--report-fd", str(passed_descriptors[0])]


def _close(descriptors: list[int]) -> None:
    for number in descriptors:
        os.close(number)


def _receive_request(client: socket.socket, length: int) -> bytes:
    """Receive `length` bytes from a client, or fewer if the client closes the connection early.

    Raises:
        OSError: the connection fails.
        ValueError: `length` is 0 or too large.
    """
    if not 0 < length <= _MAX_BYTES:
        raise ValueError(f"a request has {length} bytes; allowed are 1 to {_MAX_BYTES}")
    with client.makefile("rb") as file:
        return file.read(length)


def main() -> None:
    """Import the modules of executors and serve. In forked children, run an executor."""
    parser = argparse.ArgumentParser(prog="djinn prepared", description="Started by djinn itself.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    lock = os.open(f"{options.socket}.lock", os.O_RDWR | os.O_CREAT | CLOEXEC, 0o600)
    try:
        lock_file(lock)
    except BlockingIOError:
        sys.exit(0)  # another fork server runs
    config = decode_config(sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(options.socket, options.seconds, lock, config)


def _serve(place: Path, seconds: float, lock: int, config: ExecutorConfig) -> NoReturn:
    gc.disable()  # as in the entry of an executor process
    become_server("executor")
    importlib.import_module("structlog.dev")
    executor = importlib.import_module("djinn_server.executor")
    executor.load_plugins(config)
    executor.operators_digest()  # forks inherit the list
    gc.freeze()  # a collection in a fork would copy all of it
    arguments = ForkServer(place, seconds).serve()
    if arguments is None:
        place.unlink(missing_ok=True)
        os._exit(0)
    os.close(lock)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    executor.main(arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
