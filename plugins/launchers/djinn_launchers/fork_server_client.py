"""Client of the fork server (`djinn_launchers.fork_server`): executors are forked from a process that has imported PyTorch.

The import is most of an executor's start: two processor seconds. The fork server outlives the programs that use it, so a later run of
a program finds it. It holds no device and no tensors, and ends after some time without executors.
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
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.logs import get_logger
from djinn_core.registry.version import djinn_version
from djinn_core.system.files import user_id
from djinn_core.system.private_directories import private_directory
from djinn_server.launch.executor_config import ExecutorConfig

_MODULE: Final = "djinn_launchers.fork_server"
_REPLY_SECONDS: Final = 10.0
_KILLED: Final = -9
# Prefixes of variables that differ between executors, and that no import reads.
_OF_ONE_EXECUTOR: Final = (
    *("RAY_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("DBUS_SESSION_", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL", "SSH_", "TERM_", "WINDOWID", "XDG_SESSION_"),
)
_log = get_logger("djinn.launch")


class ForkedExecutor:
    """A forked executor, as a `ChildProcess`. The fork server sends its process id and its exit status."""

    def __init__(self, server: socket.socket, stdin: IO[bytes]) -> None:
        """Wait for the process id of the executor.

        Args:
            server: connection to the fork server, over which the request was sent.
            stdin: the executor's standard input.

        Raises:
            OSError: the fork server sends no process id.
        """
        self.stdin: IO[bytes] | None = stdin
        self._server = server
        self._lock = threading.Lock()
        self._status: int | None = None
        if not select.select([server], [], [], _REPLY_SECONDS)[0]:
            raise TimeoutError(f"the fork server did not answer in {_REPLY_SECONDS:g} s")
        self.pid = self._number()

    def _number(self) -> int:
        """Receive the next line from the fork server, a process id or an exit status, as an integer."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._server.recv(1)
            if not byte:
                raise BrokenPipeError("the fork server has ended")
            line += byte
        return int(line)

    def poll(self) -> int | None:
        """Return the exit status, as `ChildProcess.poll` does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status, as `ChildProcess.wait` does.

        If the fork server ends first, return the status of a killed process.
        """
        if self._status is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("executor", timeout or 0.0)
        with self._lock:
            if self._status is None:
                try:
                    self._status = self._number()
                except OSError:
                    self._status = _KILLED
                self._server.close()
            return self._status

    def _has_ended(self, timeout: float | None) -> bool:
        try:
            return bool(select.select([self._server], [], [], timeout)[0])
        except (OSError, ValueError):  # another thread has read the status and closed the connection
            return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(getattr(signal, "SIGKILL", signal.SIGTERM))

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@attrs.frozen
class ForkServerClient:
    """Starts fork servers on this machine, and requests executors from them.

    Attributes:
        folder: folder of the servers' sockets, which only this user can enter.
        seconds: seconds without executors after which a fork server ends.
        plugins: encoded `ExecutorConfig` with only the plugins that fork servers import.
    """

    folder: Path
    seconds: float
    plugins: bytes = attrs.field(repr=False)  # settings of plugins may be secrets

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> ForkedExecutor | None:
        """Fork an executor and return it. Return None if no fork server runs or answers.

        Args:
            arguments: arguments of the executor's command, without `--report-fd`, which the fork server adds.
            environment: environment variables of the executor.
            descriptors: descriptor for the executor's reports, then descriptors that the executor inherits.
        """
        if sys.platform == "win32":
            return None
        else:  # noqa: RET505 - mypy looks at one platform at a time
            server = socket.socket(socket.AF_UNIX)
            reading, writing = os.pipe()
            stdin = os.fdopen(writing, "wb", 0)
            try:
                server.settimeout(_REPLY_SECONDS)
                server.connect(str(self._socket(environment)))
                order = json.dumps(
                    {"arguments": [*arguments], "environment": {**environment}, "folder": str(Path.cwd())}
                ).encode()
                socket.send_fds(server, [len(order).to_bytes(4, "little")], [reading, 2, *descriptors])
                server.sendall(order)
                server.settimeout(None)
                return ForkedExecutor(server, stdin)
            except (OSError, ValueError) as error:
                _log.debug("no fork server answered, starting an executor without it", reason=str(error))
                stdin.close()
                server.close()
                return None
            finally:
                os.close(reading)

    def start_server(self, environment: Mapping[str, str]) -> None:
        """Start a fork server for later executors, and return at once. If one already runs, the new one ends."""
        variables = _read_by_imports(environment)
        socket_path, seconds = str(self._socket(environment)), str(self.seconds)
        command = [sys.executable, "-P", "-m", _MODULE, "--socket", socket_path, "--seconds", seconds]
        try:
            # In a separate session and not a child of this process: an engine may end a process with its children.
            subprocess.run(
                ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command],
                env=variables,
                input=self.plugins,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_REPLY_SECONDS,
                check=True,
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("the fork server cannot be started, executors will start without it", reason=str(error))

    def _socket(self, environment: Mapping[str, str]) -> Path:
        """Return the path of the socket of the fork server for executors with this environment."""
        variables = sorted(_read_by_imports(environment).items())
        facts = json.dumps([sys.executable, djinn_version(), variables]).encode() + self.plugins
        return self.folder / f"prepared-{hashlib.sha256(facts).hexdigest()[:12]}"


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that an executor's imports may read, without `_`, which shells set per command."""
    return {n: value for n, value in environment.items() if n != "_" and not n.startswith(_OF_ONE_EXECUTOR)}


def own_fork_server(seconds: float, config: ExecutorConfig) -> ForkServerClient | None:
    """Return a client of this user's fork servers, or None if a fork server cannot run on this machine.

    Args:
        seconds: seconds without executors after which a fork server ends.
        config: configuration of executors. Its plugins are imported in advance.
    """
    try:  # the path of a socket is short
        folder = private_directory(Path(tempfile.gettempdir()) / f"djinn-prepared-{user_id()}", "prepared executors")
    except (OSError, ConfigurationError) as error:
        _log.warning(
            "the fork server has no private folder for its socket, executors will start without it", error=str(error)
        )
        return None
    return ForkServerClient(folder, seconds, ExecutorConfig(plugins=config.plugins).encode())
