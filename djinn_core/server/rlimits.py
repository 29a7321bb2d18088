"""Resource limits of the processes of a server."""

from __future__ import annotations

import resource

from djinn_core.logs import get_logger

_log = get_logger("djinn.server")


def confine(total: int) -> None:
    """Let this process have at most `total` bytes of memory of its own.

    Linux promises memory that it does not have, and ends some process when it is used. With this an op that asks for more than there is
    fails with PyTorch's own error, which its client is told of.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (min([total, *allowed]), hard))
    except (ValueError, OSError) as error:
        _log.warning("the memory of this process has no limit", error=str(error))


def allow_many_files() -> None:
    """Each connection takes a file descriptor; what a process may have at first is often a quarter of what it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave_no_cores() -> None:
    """Disable core dumps, which would contain tokens, keys and data; executors inherit this."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
