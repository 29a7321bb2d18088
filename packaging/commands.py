"""Commands that build and try a release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class StepError(RuntimeError):
    """A command failed, or its result is wrong. The message has the command's output."""


def run(*command: object, umask: int = -1, cwd: Path | None = None, seconds: float = 3600.0, **environment: str) -> str:
    """Run a command, and return its output.

    Args:
        command: the program and its arguments.
        umask: file mode mask of the command. -1 keeps the mask of this process.
        cwd: working directory of the command. None selects the current one.
        seconds: timeout, after which the command is killed.
        environment: environment variables, in addition to those of this process.

    Raises:
        StepError: the command failed, or exceeded the timeout.
    """
    command_line = f"$ {' '.join(map(str, command))}"
    try:
        process = subprocess.run(
            [*map(str, command)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=os.environ | environment,
            timeout=seconds,
            umask=umask,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")  # bytes here, also with `text`
        raise StepError(f"{command_line}\ndid not end in {seconds:g} s. It printed: {printed[-2000:]}") from error
    if process.returncode:
        raise StepError(f"{command_line}\n{process.stdout[-5000:]}")
    return process.stdout
