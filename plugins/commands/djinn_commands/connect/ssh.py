"""OpenSSH's client: its command lines, and scripts that run on the remote machine over one connection.

ssh authenticates one connection as a master of `ControlMaster`. Later commands use the master's socket and read no configuration.
A script is sent on standard input, before its data, because other users can see command lines and the remote login shell is unknown.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import IO, Final, Protocol

import attrs

from djinn_commands.connect.terminal_escapes import one_line

# Seconds without a reply after which a connection counts as broken: interval times count.
_KEEPALIVE_OPTIONS: Final = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
_MASTER_OPTIONS: Final = (
    "-o",
    "ConnectTimeout=20",
    "-o",
    "ControlPersist=no",
    "-o",
    "ExitOnForwardFailure=no",
    "-o",
    "RemoteCommand=none",
    "-o",
    "ForwardAgent=no",
    "-o",
    "ForwardX11=no",
    "-o",
    "ClearAllForwardings=yes",
)
# Only through the socket: a new connection would have to be authenticated again.
_SOCKET_OPTIONS: Final = (
    "-F",
    "/dev/null",
    "-o",
    "ControlMaster=no",
    "-o",
    "ProxyCommand=false",
    "-o",
    "BatchMode=yes",
)
BROKEN: Final = 255  # exit status of ssh's own errors


@attrs.frozen
class Destination:
    """A remote machine, as ssh addresses it.

    Attributes:
        host: destination in ssh's command line, such as `alice@gpu-box`.
        options: options for ssh, such as `-p 2222`.
    """

    host: str
    options: tuple[str, ...] = ()


@attrs.frozen
class Script:
    """A script for POSIX sh.

    Attributes:
        names: files of `scripts/` to join after `common.sh`, without their suffix.
        values: shell variables that are set before these files run.
    """

    names: tuple[str, ...]
    values: Mapping[str, str] = attrs.field(factory=dict)

    def text(self, end_of_login_output: str = "") -> str:
        """Return the whole script. If `end_of_login_output` is not empty, the script prints this line first."""
        assignments = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.values.items())]
        folder = files("djinn_commands.connect").joinpath("scripts")
        common, *parts = [folder.joinpath(f"{name}.sh").read_text() for name in ("common", *self.names)]
        return "\n".join([*assignments, common, f"echo {end_of_login_output}" if end_of_login_output else "", *parts])


@attrs.frozen
class ScriptResult:
    """The result of a script.

    Attributes:
        code: exit status of ssh, which is the script's own status unless the connection broke.
        output: standard output of the script.
        errors: standard error of the script and of ssh.
    """

    code: int
    output: str
    errors: str

    @property
    def broken(self) -> bool:
        """Return True if ssh failed: the connection broke or did not exist."""
        return self.code == BROKEN

    @property
    def error_tail(self) -> str:
        """Return the last 8 lines of the error output, escaped for a terminal."""
        lines = [one_line(line) for line in self.errors.replace("\r", "\n").splitlines() if line.strip()]
        return "\n".join(lines[-8:])


def open_command(destination: Destination, control: Path, *, asks: bool) -> list[str]:
    """Return the command that authenticates and leaves a master connection in the background.

    Args:
        destination: the remote machine.
        control: path of the control socket that the command creates.
        asks: True if ssh may ask for a password or about an unknown host key.
    """
    quiet = () if asks else ("-o", "BatchMode=yes")
    return [
        "ssh",
        *destination.options,
        *_KEEPALIVE_OPTIONS,
        *_MASTER_OPTIONS,
        *quiet,
        "-M",
        "-S",
        str(control),
        "-f",
        "-N",
        "--",
        destination.host,
    ]


def control_command(destination: Destination, control: Path, order: str, *arguments: str) -> list[str]:
    """Return the command that sends an order to the master connection: `check`, `forward`, `cancel` or `exit`."""
    return ["ssh", "-F", "/dev/null", "-S", str(control), "-O", order, *arguments, "--", destination.host]


def forward_arguments(local: int, remote: int) -> tuple[str, str]:
    """Return ssh's arguments to forward a local loopback port to a remote port."""
    return "-L", f"127.0.0.1:{local}:127.0.0.1:{remote}"


def run_command(destination: Destination, control: Path, size: int) -> list[str]:
    """Return the command that reads a script of `size` bytes from its standard input and runs it, quoted for any login shell."""
    remote = f"exec sh -c 'eval \"$(dd bs=1 count={size} 2>/dev/null)\"'"
    return ["ssh", *_SOCKET_OPTIONS, "-S", str(control), "-T", "--", destination.host, remote]


class Source(Protocol):
    """A function that writes data to the standard input of a script."""

    def __call__(self, to: IO[bytes]) -> None:
        """Write all data to `to`."""
        ...


class SshConnection:
    """A master connection of ssh to a remote machine.

    Attributes:
        destination: the remote machine.
        control: path of the control socket.
    """

    def __init__(self, destination: Destination, control: Path) -> None:
        self.destination = destination
        self.control = control

    def is_open(self) -> bool:
        """Return True if the master process runs. Its network connection may already be broken."""
        return self.control.exists() and self._control("check").returncode == 0

    def open(self, *, asks: bool) -> str:
        """Open the connection if it is closed. Return the error message, or an empty string.

        `asks`: True if ssh may ask for passwords and about unknown host keys on the terminal.
        """
        if shutil.which("ssh") is None:
            return "this machine has no command `ssh`: install OpenSSH's client"
        if self.is_open():
            return ""
        with contextlib.suppress(FileNotFoundError):
            self.control.unlink()  # left by a killed connection
        with tempfile.TemporaryFile() as error_output:
            # A pipe would stay open as long as the background connection.
            process = subprocess.run(
                open_command(self.destination, self.control, asks=asks),
                stdin=subprocess.DEVNULL,
                stdout=error_output,
                stderr=error_output,
                check=False,
            )
            error_output.seek(0)
            text = error_output.read().decode(errors="replace").strip()
        return "" if process.returncode == 0 else text or f"ssh ended with code {process.returncode}"

    def close(self) -> None:
        """Close the connection, with all of its channels."""
        self._control("exit")

    def forward(self, local: int, remote: int) -> str:
        """Forward a local port to a remote port. Return the error message, or an empty string."""
        result = self._control("forward", *forward_arguments(local, remote))
        return "" if result.returncode == 0 else result.stderr.strip() or f"ssh ended with code {result.returncode}"

    def run(self, script: Script, data: Source | None = None) -> ScriptResult:
        """Run a script to its end and return its result. `data` writes the script's standard input."""
        end_of_login_output = _random_line()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._start(script, end_of_login_output, output, errors)
            assert process.stdin is not None
            try:
                # The script may end before it has read all input; its exit status is more useful than this error.
                with contextlib.suppress(BrokenPipeError), process.stdin as to:
                    if data is not None:
                        data(to)
                code = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            output.seek(0)
            errors.seek(0)
            printed = output.read().decode(errors="replace")
            _, _, script_output = printed.partition(f"{end_of_login_output}\n")
            return ScriptResult(code, script_output, errors.read().decode(errors="replace"))

    @contextlib.contextmanager
    def running(self, script: Script) -> Iterator[subprocess.Popen[bytes]]:
        """Start a script and yield its process, with the script's output at `stdout`. Kill the process at the end of the block.

        Standard error goes to the standard error of this process.
        """
        end_of_login_output = _random_line()
        process = self._start(script, end_of_login_output, subprocess.PIPE, None)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            while (line := process.stdout.readline()) and line.strip() != end_of_login_output.encode():
                pass  # output of the login shell's files
            yield process
        finally:
            process.kill()
            process.stdout.close()
            process.wait()

    def _start(
        self, script: Script, end_of_login_output: str, output: IO[bytes] | int, errors: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        text = script.text(end_of_login_output).encode()
        command = run_command(self.destination, self.control, len(text))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=errors)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text)
            process.stdin.flush()
        return process

    def _control(self, order: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = control_command(self.destination, self.control, order, *arguments)
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _random_line() -> str:
    return f"djinn-{secrets.token_hex(8)}"


def hold_command(connection: SshConnection) -> list[str]:
    """Return a command that ends when the connection breaks or its standard input is closed."""
    return [*run_command(connection.destination, connection.control, 0)[:-1], "exec cat >/dev/null"]


def has_terminal() -> bool:
    """Return True if this process has a terminal on which ssh can ask the user."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True
