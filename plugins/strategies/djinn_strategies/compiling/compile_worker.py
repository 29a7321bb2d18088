"""Run compilers in a process of low priority. A long compilation in the executor would hold Python's global lock.

    python -m djinn_strategies.compiling.compile_worker NICE IDLE_SECONDS DESCRIPTOR

The process reads calls from a socket, one at a time: first the name of a function, then its argument. It answers with
a flag for success, then with the result. Imported modules stay loaded for later calls. The process ends with its
parent, or after IDLE_SECONDS without a call.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from multiprocessing.connection import Connection
from typing import IO, Final

from djinn_core.errors import UnsupportedOperation
from djinn_core.system.limits import lower_priority

_OUTPUT_LIMIT: Final = 2000  # characters of a failed process's output to show
NICE: Final = 10  # below all sessions, but not starved on a busy machine
IDLE_SECONDS: Final = 60.0  # an idle process holds hundreds of megabytes
_SUCCEEDED: Final = b"1"


class CompileProcess:
    """Call functions in a compile process, one call at a time. A call starts the process if it does not run.

    The process ends when this object is closed or deleted, or after `idle_seconds`.

    Args:
        nice: how much to increase the niceness of the process, as in `os.nice`.
        idle_seconds: the process ends after this many seconds without a call.
    """

    def __init__(self, nice: int = NICE, idle_seconds: float = IDLE_SECONDS) -> None:
        self._arguments = str(nice), str(idle_seconds)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: Connection | None = None
        self._output: IO[bytes] | None = None
        self._ending: weakref.finalize[..., CompileProcess] | None = None

    def call(self, function: str, data: bytes, seconds: float) -> bytes:
        """Call `function` (`module:name`) in the process with `data`, and return the result. Wait at most `seconds`.

        Raises:
            UnsupportedOperation: the function raised, the process died, or the call took longer than `seconds`.
        """
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                with contextlib.suppress(EOFError):  # it has ended after all
                    return self._exchange(process, function, data, seconds)
            process = self._start()
            try:
                return self._exchange(process, function, data, seconds)
            except EOFError:
                output = self._output_tail() or f"exit status {process.wait()}"
                raise UnsupportedOperation(f"{function} failed: {output}") from None

    def close(self) -> None:
        """End the process. A later call starts a new process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        from djinn_server.launch.command import executor_environment

        self._end()
        own_end, worker_end = socket.socketpair()
        self._calls = Connection(own_end.detach())
        command = [sys.executable, "-P", "-m", __name__, *self._arguments, str(worker_end.fileno())]
        self._output = output = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 - closed by `_end`
        with worker_end:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(worker_end.fileno(),),
                env=executor_environment(),
            )
        self._ending = weakref.finalize(self, _end, self._process, self._calls, output)
        return self._process

    def _end(self) -> None:
        self._process = None
        if self._ending is not None:
            self._ending()  # once

    def _exchange(self, process: subprocess.Popen[bytes], function: str, data: bytes, seconds: float) -> bytes:
        """Send a call to the process, and return its result.

        Raises:
            EOFError: the process ended.
        """
        calls = self._calls
        assert calls is not None
        try:
            calls.send_bytes(function.encode())
            calls.send_bytes(data)
            if not calls.poll(seconds):
                process.kill()
                process.wait()
                raise UnsupportedOperation(f"{function} took more than {seconds:g} s")
            succeeded, reply = calls.recv_bytes() == _SUCCEEDED, calls.recv_bytes()
        except OSError as error:
            raise EOFError from error
        if not succeeded:
            raise UnsupportedOperation(f"{function} failed: {reply.decode(errors='replace')}")
        return reply

    def _output_tail(self) -> str:
        assert self._output is not None
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()[-_OUTPUT_LIMIT:]


def _end(process: subprocess.Popen[bytes], calls: Connection, output: IO[bytes]) -> None:
    process.kill()
    process.wait()
    calls.close()
    output.close()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer_calls(calls: Connection) -> None:
    function, data = calls.recv_bytes().decode(), calls.recv_bytes()
    module, _, name = function.partition(":")
    try:
        reply, succeeded = getattr(importlib.import_module(module), name)(data), _SUCCEEDED
    except Exception:
        reply, succeeded = traceback.format_exc().strip()[-_OUTPUT_LIMIT:].encode(), b""
    calls.send_bytes(succeeded)
    calls.send_bytes(reply)


def main() -> None:
    """Run the worker process."""
    from djinn_core.system.role import become_server

    become_server("executor")
    lower_priority(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    idle, calls = float(sys.argv[2]), Connection(int(sys.argv[3]))
    with contextlib.suppress(EOFError, OSError):
        while calls.poll(idle):
            _answer_calls(calls)


if __name__ == "__main__":
    main()
