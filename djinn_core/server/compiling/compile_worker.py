"""Worker process for compilers, at a low priority: a long compilation must not hold the global interpreter lock of the sessions.

    python -m djinn_core.server.compiling.compile_worker MODULE:FUNCTION NICE

calls the function with the bytes of the standard input and writes the result to the standard output.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from typing import Final

from djinn_core.errors import UnsupportedOperation
from djinn_core.system.limits import lower_priority

_TOLD: Final = 2000  # characters of what a failed process said
NICE: Final = 10  # behind all sessions, and yet not starved by a busy machine


def run_apart(function: str, data: bytes, seconds: float, nice: int = NICE) -> bytes:
    """Run `function` (`module:name`) on `data` in a process that ends with this one, and return its result.

    Args:
        function: what is called there.
        data: its argument.
        seconds: time that it may take.
        nice: by how much its priority is lower than that of this process, as for `os.nice`.

    Raises:
        UnsupportedOperation: it raised, died, or took longer than `seconds`.
    """
    from djinn_core.launch.command import executor_environment

    command = [sys.executable, "-P", "-m", __name__, function, str(nice)]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, env=executor_environment(), timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedOperation(f"{function} took more than {seconds:g} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-_TOLD:]
        raise UnsupportedOperation(f"{function} failed: {said or f'exit status {done.returncode}'}")
    return done.stdout


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Be such a process."""
    from djinn_core.role import become_server

    become_server("executor")
    lower_priority(int(sys.argv[2]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    result = os.dup(1)
    os.dup2(2, 1)  # printed text is not part of the result
    module, _, name = sys.argv[1].partition(":")
    made = getattr(importlib.import_module(module), name)(sys.stdin.buffer.read())
    with os.fdopen(result, "wb") as output:
        output.write(made)


if __name__ == "__main__":
    main()
