"""Processes of executors that are forked from one that has imported PyTorch, which this machine keeps for a while.

An executor is mostly an import: two seconds of a processor. The process that is forked outlives the parents of its executors: a
program that ends and begins again finds it. It holds no device and no tensors, and ends by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

import attrs

from djinn_core.launch.command import PREPARED_MODULE
from djinn_core.launch.version import djinn_version
from djinn_core.logs import get_logger

_ANSWER_SECONDS: Final = 10.0
_KILLED: Final = -9
# Differ from one executor of a machine to the next, and matter to nothing that is imported.
_OWN: Final = ("RAY_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_log = get_logger("djinn.launch")


class ChildProcess(Protocol):
    """An executor's process as its parent needs it; `subprocess.Popen` is one."""

    stdin: IO[bytes] | None
    pid: int

    def poll(self) -> int | None:
        """Exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit status."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """As `ChildProcess`: a fork of another process, which tells how it ends."""

    def __init__(self, told: socket.socket, stdin: IO[bytes]) -> None:
        """`told`: where its process id has come, and its exit status will.

        Raises:
            OSError: no process id comes.
        """
        self.stdin: IO[bytes] | None = stdin
        self._told = told
        self._lock = threading.Lock()
        self._status: int | None = None
        if not select.select([told], [], [], _ANSWER_SECONDS)[0]:
            raise TimeoutError("no executor is forked")
        self.pid = self._number()

    def _number(self) -> int:
        """The next line. It is the process's own, whole once it has begun to come."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._told.recv(1)
            if not byte:
                raise BrokenPipeError("the process that forks executors has ended")
            line += byte
        return int(line)

    def poll(self) -> int | None:
        """As `ChildProcess.poll`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """As `ChildProcess.wait`. Where the process that forked it has been killed, it ends too."""
        if self._status is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("executor", timeout or 0.0)
        with self._lock:
            if self._status is None:
                try:
                    self._status = self._number()
                except OSError:
                    self._status = _KILLED
                self._told.close()
            return self._status

    def terminate(self) -> None:
        """As `ChildProcess.terminate`."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """As `ChildProcess.kill`."""
        self._send(getattr(signal, "SIGKILL", signal.SIGTERM))

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@attrs.frozen
class Preparation:
    """The process that executors of this machine are forked from.

    Attributes:
        folder: where it listens, which only this user can enter.
        seconds: how long it stays without executors.
        plugins: configuration of an executor that says which plugins it imports, and nothing else.
    """

    folder: Path
    seconds: float
    plugins: bytes = attrs.field(repr=False)  # settings of plugins may be secrets

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], given: Sequence[int]
    ) -> ForkedProcess | None:
        """An executor with these descriptors; None where there is nothing to fork it from.

        Args:
            arguments: of its command, without `--report-fd`, whose number is another one there.
            environment: all of it.
            given: the descriptor that it reports to, and those that it only keeps open.
        """
        if sys.platform == "win32":
            return None
        else:  # noqa: RET505 - mypy looks at one platform at a time
            told = socket.socket(socket.AF_UNIX)
            reading, writing = os.pipe()
            stdin = os.fdopen(writing, "wb", 0)
            try:
                told.settimeout(_ANSWER_SECONDS)
                told.connect(str(self._socket(environment)))
                order = json.dumps(
                    {"arguments": [*arguments], "environment": {**environment}, "folder": str(Path.cwd())}
                ).encode()
                socket.send_fds(told, [len(order).to_bytes(4, "little")], [reading, 2, *given])
                told.sendall(order)
                told.settimeout(None)
                return ForkedProcess(told, stdin)
            except (OSError, ValueError) as error:
                _log.debug("an executor is started anew", reason=str(error))
                stdin.close()
                told.close()
                return None
            finally:
                os.close(reading)

    def begin(self, environment: Mapping[str, str]) -> None:
        """Have the process started for the executors to come; returns at once. It ends where there is one already."""
        kept = {name: value for name, value in environment.items() if not name.startswith(_OWN)}
        place, seconds = str(self._socket(environment)), str(self.seconds)
        command = [sys.executable, "-P", "-m", PREPARED_MODULE, "--socket", place, "--seconds", seconds]
        try:
            # In a session of its own, and no child of this process, whose engine may end its children with it.
            subprocess.run(
                ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command],
                env=kept,
                input=self.plugins,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ANSWER_SECONDS,
                check=True,
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("no executors can be prepared on this machine", reason=str(error))

    def _socket(self, environment: Mapping[str, str]) -> Path:
        """Address of the process that has imported what an executor with this environment would."""
        kept = sorted((name, value) for name, value in environment.items() if not name.startswith(_OWN))
        facts = json.dumps([sys.executable, djinn_version(), kept]).encode() + self.plugins
        return self.folder / f"prepared-{hashlib.sha256(facts).hexdigest()[:12]}"
