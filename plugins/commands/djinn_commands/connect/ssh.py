"""OpenSSH's client: its command lines, and scripts that are run on the remote machine over one connection.

One connection, a master of ssh's `ControlMaster`, is authenticated once; whatever is run afterwards goes through its socket and reads no
configuration. A script travels on standard input, before the data that it reads: command lines can be seen by other users, and the login
shell there may be any.
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

from djinn_commands.connect.shown import one_line

# Seconds without a reply after which a connection counts as broken: interval times count.
_ALIVE: Final = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
_OPEN: Final = (
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
# Through the socket or not at all: a connection of its own would have to be authenticated again.
_SHARED: Final = ("-F", "/dev/null", "-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes")
BROKEN: Final = 255  # exit status of ssh where it is not that of the remote command


@attrs.frozen
class Destination:
    """`host`: as on ssh's command line, such as `alice@gpu-box`. `options`: further options for ssh, such as `-p 2222`."""

    host: str
    options: tuple[str, ...] = ()


@attrs.frozen
class Script:
    """Files of `scripts/` in their order, for POSIX sh, and the variables that they are given."""

    names: tuple[str, ...]
    values: Mapping[str, str] = attrs.field(factory=dict)

    def text(self, mark: str = "") -> str:
        """The whole script; what it prints for Djinn begins after the line `mark`."""
        given = [f"{key}={shlex.quote(value)}" for key, value in sorted(self.values.items())]
        folder = files("djinn_commands.connect").joinpath("scripts")
        common, *parts = [folder.joinpath(f"{name}.sh").read_text() for name in ("common", *self.names)]
        return "\n".join([*given, common, f"echo {mark}" if mark else "", *parts])


@attrs.frozen
class Done:
    """The end of a script. `output`: what it printed; `errors`: its standard error."""

    code: int
    output: str
    errors: str

    @property
    def broken(self) -> bool:
        """True where the connection broke, or there was none."""
        return self.code == BROKEN

    @property
    def last_words(self) -> str:
        """The end of what it printed about its mistakes, fit for a terminal."""
        lines = [one_line(line) for line in self.errors.replace("\r", "\n").splitlines() if line.strip()]
        return "\n".join(lines[-8:])


def open_command(destination: Destination, control: Path, *, asks: bool) -> list[str]:
    """Command that authenticates and leaves a connection in the background. `asks`: it may ask the user for a password."""
    quiet = () if asks else ("-o", "BatchMode=yes")
    return [
        "ssh",
        *destination.options,
        *_ALIVE,
        *_OPEN,
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
    """Command for the connection itself: `check`, `forward`, `cancel` or `exit`."""
    return ["ssh", "-F", "/dev/null", "-S", str(control), "-O", order, *arguments, "--", destination.host]


def forward_arguments(local: int, remote: int) -> tuple[str, str]:
    """A port of this machine's loopback that leads to one of the remote machine's."""
    return "-L", f"127.0.0.1:{local}:127.0.0.1:{remote}"


def run_command(destination: Destination, control: Path, size: int) -> list[str]:
    """Command that runs a script of `size` bytes, which it reads from its standard input; in quotes that every login shell reads alike."""
    remote = f"exec sh -c 'eval \"$(dd bs=1 count={size} 2>/dev/null)\"'"
    return ["ssh", *_SHARED, "-S", str(control), "-T", "--", destination.host, remote]


class Source(Protocol):
    """Data for the standard input of a script."""

    def __call__(self, to: IO[bytes]) -> None:
        """Write all of it."""
        ...


class SshConnection:
    """A connection to a remote machine that is open, or is opened by `open`."""

    def __init__(self, destination: Destination, control: Path) -> None:
        self.destination = destination
        self.control = control

    def is_open(self) -> bool:
        """True if there is a connection, which may be about to break."""
        return self.control.exists() and self._order("check").returncode == 0

    def open(self, *, asks: bool) -> str:
        """Open it unless it is open; an empty text, or why it cannot be.

        Passwords and unknown host keys are asked for on the terminal, if the user `asks` for it.
        """
        if shutil.which("ssh") is None:
            return "there is no ssh on this machine: install OpenSSH's client"
        if self.is_open():
            return ""
        with contextlib.suppress(FileNotFoundError):
            self.control.unlink()  # of a connection that was killed
        with tempfile.TemporaryFile() as said:
            # A pipe would stay open as long as the connection, which is in the background then.
            done = subprocess.run(
                open_command(self.destination, self.control, asks=asks),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                check=False,
            )
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
        return "" if done.returncode == 0 else text or f"ssh ended with code {done.returncode}"

    def close(self) -> None:
        """End it, with everything that goes through it."""
        self._order("exit")

    def forward(self, local: int, remote: int) -> str:
        """Have a local port lead to a remote one; an empty text, or why it does not."""
        done = self._order("forward", *forward_arguments(local, remote))
        return "" if done.returncode == 0 else done.stderr.strip() or f"ssh ended with code {done.returncode}"

    def run(self, script: Script, data: Source | None = None) -> Done:
        """Run a script to its end; `data` is what it reads."""
        mark = _mark()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._start(script, mark, output, errors)
            assert process.stdin is not None
            try:
                # It may end before it has read everything; how it ended says more than that.
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
            _, _, rest = printed.partition(f"{mark}\n")
            return Done(code, rest, errors.read().decode(errors="replace"))

    @contextlib.contextmanager
    def running(self, script: Script) -> Iterator[subprocess.Popen[bytes]]:
        """A script that runs, with what it prints as it comes; the process is killed at the end of the block.

        Its standard error goes where ours does.
        """
        mark = _mark()
        process = self._start(script, mark, subprocess.PIPE, None)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            while (line := process.stdout.readline()) and line.strip() != mark.encode():
                pass  # said by files of the login shell
            yield process
        finally:
            process.kill()
            process.stdout.close()
            process.wait()

    def _start(
        self, script: Script, mark: str, output: IO[bytes] | int, errors: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        text = script.text(mark).encode()
        command = run_command(self.destination, self.control, len(text))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=errors)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text)
            process.stdin.flush()
        return process

    def _order(self, order: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = control_command(self.destination, self.control, order, *arguments)
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _mark() -> str:
    return f"djinn-{secrets.token_hex(8)}"


def hold_command(connection: SshConnection) -> list[str]:
    """Command that runs as long as the connection lives and its own standard input is open."""
    return [*run_command(connection.destination, connection.control, 0)[:-1], "exec cat >/dev/null"]


def has_terminal() -> bool:
    """True where ssh can ask the user."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True
