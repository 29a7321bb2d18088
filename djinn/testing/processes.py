"""Find executor processes on this machine, which may be in their own PID namespace."""

from __future__ import annotations

import psutil

from djinn_core.errors import DjinnError
from djinn_core.system.processes import innermost_pid


def executor_process(number: int) -> psutil.Process:
    """Return the process of an executor.

    `number`: process id that the executor reports, possibly in its own PID namespace.

    Raises:
        DjinnError: no process on this machine matches, or several processes do.
    """
    executors = [child for child in psutil.Process().children(recursive=True) if innermost_pid(child.pid) == number]
    if not executors and psutil.pid_exists(number) and _is_djinn(psutil.Process(number)):
        executors = [psutil.Process(number)]  # started by an engine, so no child of this process
    if len(executors) != 1:
        raise DjinnError(
            f"{len(executors) or 'no'} processes on this machine match the executor with the process id {number}. If your "
            "executors run on other machines, define the fixture `kill`"
        )
    return executors[0]


def _is_djinn(process: psutil.Process) -> bool:
    try:
        return any("djinn" in word for word in process.cmdline())
    except psutil.Error:
        return False
