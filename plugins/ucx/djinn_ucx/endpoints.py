"""UCX workers and endpoints, and a process that tests addresses.

UCX aborts the process that uses an invalid address, and addresses come from the other end. Run as a script, this module is
the test process: it imports only ucxx, and tests each address in a fork, which may be aborted.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

# UCX reads addresses without knowing their length. These end marks make reads past the end equal in all processes.
_BEHIND: Final = b"\xff" * (64 << 10)
_TRIAL_SECONDS: Final = 30
_START_SECONDS: Final = 60
_QUESTION: Final = struct.Struct(
    "<?H"
)  # the argument `local` of `open_worker`, and the length of the address that follows
_FINE: Final = b"\x00"
_REFUSED: Final = b"\x01"


def open_worker(api: Any, local: bool) -> tuple[Any, Any]:
    """Return a UCX context and a worker.

    Args:
        api: module of ucxx.
        local: True to listen on the loopback interface only, if `UCX_NET_DEVICES` is not set.
    """
    only = {"NET_DEVICES": "lo"} if local and "UCX_NET_DEVICES" not in os.environ else {}
    context = api.UCXContext(only, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))
    worker = api.UCXWorker(context)
    worker.init_blocking_progress_mode()
    return context, worker


def open_endpoint(api: Any, worker: Any, address: bytes) -> Any:
    """Return an endpoint from `worker` to the worker at `address`. `api`: module of ucxx."""
    read = api.UCXAddress.create_from_buffer(memoryview(bytearray(address + _BEHIND)))
    # With error handling: otherwise a killed peer would abort this process.
    return api.UCXEndpoint.create_from_worker_address(worker, read, True)


class AddressTrials:
    """Tests addresses in another process, which ends with this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: Callable[[], object] = lambda: None

    def reason_against(self, address: bytes, local: bool) -> str:
        """Test an address. Return why this process must not use it, or an empty string if it may.

        `local`: True if the other end is on this machine.
        """
        with self._lock:
            try:
                return self._ask(address, local)
            except (OSError, ValueError) as error:  # ValueError: this process is ending and has closed the pipes
                self._end()
                self._process = None
                return f"the process that tests addresses failed: {error}"

    def _ask(self, address: bytes, local: bool) -> str:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_QUESTION.pack(local, len(address)) + address)
        if not select.select([process.stdout], [], [], _START_SECONDS + _TRIAL_SECONDS)[0]:
            raise TimeoutError("the process does not answer")
        answer = process.stdout.read(1)
        if not answer:
            raise BrokenPipeError("the process has ended")
        return "" if answer == _FINE else "a process of its own could not use it"

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the test process. Start a new one if none runs, or if this process was forked after the start."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._end()
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                bufsize=0,
                process_group=0,
            )
            self._end = weakref.finalize(self, _end, self._process, self._owner)
        return self._process


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the pipes of a process, and end it if the process `owner`, which started it, is this process."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of the test process: this process's import path, and no variables of Djinn, such as tokens."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return variables | {"PYTHONPATH": path, "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_HANDLE_ERRORS": "none"}


def _try_addresses() -> None:
    """Test addresses until the parent process has ended."""
    if sys.platform != "win32":  # Windows has no UCX
        import resource

        from ucxx._lib import libucxx

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        questions, answers = sys.stdin.buffer, os.dup(1)
        os.dup2(2, 1)  # UCX writes to standard output
        while head := questions.read(_QUESTION.size):
            local, length = _QUESTION.unpack(head)
            address = questions.read(length)
            fork = os.fork()
            if not fork:
                _try_one(libucxx, address, local)
            os.write(answers, _FINE if _wait_for_success(fork) else _REFUSED)


def _try_one(api: Any, address: bytes, local: bool) -> None:
    """Connect to an address as the parent process would, then exit with status 0 if it succeeded."""
    if sys.platform != "win32":
        signal.alarm(_TRIAL_SECONDS)
        status = 1
        with suppress(Exception):
            _, worker = open_worker(api, local)
            endpoint = open_endpoint(api, worker, address)
            until = time.monotonic() + 0.005
            while time.monotonic() < until:
                worker.progress()
            status = 0 if endpoint.alive else 1
        os._exit(status)


def _wait_for_success(process_id: int) -> bool:
    return os.waitpid(process_id, 0)[1] == 0


if __name__ == "__main__":
    _try_addresses()
