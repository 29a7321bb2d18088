"""Log the standard error of an executor that runs as a tenant's system user."""

from __future__ import annotations

import io
import threading
import time
from typing import IO, Final

from djinn_core.logs import get_logger

_LINE_BYTES: Final = 4 << 10
_LINES_A_SECOND: Final = 100  # a limit, because a tenant could fill the disk
_log = get_logger("djinn.launch")


def log_output(output: IO[bytes], tenant: str, process: int, level: str) -> None:
    """Log each line of `output` in a thread, until its end. The thread closes `output`.

    `level`: the log level of the executor, at which the lines are logged.
    """
    arguments = io.BufferedReader(output), tenant, process, level  # type: ignore[type-var] # an unbuffered pipe
    threading.Thread(target=_log_lines, args=arguments, name="djinn-executor-log", daemon=True).start()


def _log_lines(output: IO[bytes], tenant: str, process: int, level: str) -> None:
    write, second, count = getattr(_log, level), 0.0, 0
    with output:
        while line := output.readline(_LINE_BYTES):
            if time.monotonic() - second >= 1.0:
                second, count = time.monotonic(), 0
            count += 1
            if count <= _LINES_A_SECOND:
                write("an executor wrote", tenant=tenant, process=process, text=line.decode(errors="replace").strip())
            elif count == _LINES_A_SECOND + 1:
                _log.warning("an executor writes too much: further lines of this second are dropped", tenant=tenant)
