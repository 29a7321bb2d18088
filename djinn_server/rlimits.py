"""Resource limits of the processes of a server."""

from __future__ import annotations

from djinn_core.logs import get_logger
from djinn_core.system import limits

_log = get_logger("djinn.server")


def limit_memory(total: int) -> None:
    """Limit the private memory of this process to `total` bytes. If the system refuses, log a warning.

    Linux grants more memory than it has, and kills processes when it runs out. With this limit, an op that requests too
    much memory fails with PyTorch's error, which the client receives.
    """
    try:
        limits.limit_data(total)
    except OSError as error:
        _log.warning("cannot limit the memory of this process", error=str(error))


def allow_many_files() -> None:
    """Raise the soft limit on open files to the hard limit. Each connection takes a descriptor."""
    try:
        limits.allow_open_files()
    except OSError as error:
        _log.warning("cannot raise the limit of open files", error=str(error))


def disable_core_dumps() -> None:
    """Disable core dumps, which would contain tokens, keys and data. Executors inherit this setting."""
    limits.leave_no_cores()
