"""Resource limits of the processes of a server."""

from __future__ import annotations

from djinn_core.logs import get_logger
from djinn_core.system import limits

_log = get_logger("djinn.server")


def confine(total: int) -> None:
    """Let this process have at most `total` bytes of memory of its own.

    Linux promises memory that it does not have, and ends some process when it is used. With this an op that asks for more than there is
    fails with PyTorch's own error, which its client is told of.
    """
    try:
        limits.limit_data(total)
    except OSError as error:
        _log.warning("the memory of this process has no limit", error=str(error))


def allow_many_files() -> None:
    """Each connection takes a file descriptor; what a process may have at first is often a quarter of what it may ask for."""
    try:
        limits.allow_open_files()
    except OSError as error:
        _log.warning("this process may open few files", error=str(error))


def leave_no_cores() -> None:
    """Disable core dumps, which would contain tokens, keys and data; executors inherit this."""
    limits.leave_no_cores()
