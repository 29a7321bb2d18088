"""Commands that build and try a release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class StepError(RuntimeError):
    """A command failed, or what it made is not as it must be; the message has what it printed."""


def run(*command: object, umask: int = -1, cwd: Path | None = None, seconds: float = 3600.0, **environment: str) -> str:
    """What a command prints.

    Args:
        command: the program and its arguments.
        umask: -1: as it is.
        cwd: where it runs; None: here.
        seconds: after which it is ended.
        environment: variables besides those of this process.

    Raises:
        StepError: it failed, or took longer.
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
