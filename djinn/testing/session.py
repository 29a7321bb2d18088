"""Access to the open session for tests: its values, submissions and connections, and functions that break connections.

Use these functions in tests instead of private attributes, which may change in any version.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from djinn.testing.processes import executor_process
from djinn_client.hookspecs.channels import WrappedChannel
from djinn_client.interception.recording.recorder import current
from djinn_client.runtime import client
from djinn_client.runtime.connecting.open import OpenSession
from djinn_client.runtime.context import context
from djinn_client.runtime.session import Session
from djinn_core.errors import DjinnError
from djinn_core.protocol.delivery.reliable_connection import ReliableConnection
from djinn_core.wire.messages import StatsReply, StatsRequest

session_name = client.session_name


def open_session() -> Session:
    """Return the open session. Other versions of Djinn may have a session with other methods.

    Raises:
        DjinnError: no session is open.
    """
    if context.session is None:
        raise DjinnError("no session is open: djinn.init() or the first use of the device begins one")
    return context.session


def open_connections() -> tuple[OpenSession, ...]:
    """Return the connections of the open session, one for each executor.

    Each has a URL and the executor's first reply.
    """
    return context.opened


def executor_figures(device: int = 0) -> Mapping[str, int]:
    """Return an executor's counters of the session by name, such as `values` and `memory`. Takes one round trip.

    `device`: index of the logical device.
    """
    return open_session().router.ask(StatsRequest(), StatsReply, device).values


def executor_processes() -> tuple[int, ...]:
    """Return the process id of each executor, as it is on the executor's machine and in its PID namespace."""
    return tuple(opened.process for opened in context.opened)


def plans_made() -> int:
    """Return the number of plans of programs since the counters were last reset."""
    return context.stats.plans_made


def unsent_instructions() -> int:
    """Return the number of instructions that this thread has recorded and not yet sent."""
    return len(current().entries)


def break_connection(number: int = 0) -> None:
    """Break connection `number` of the session, as a network failure does.

    If the server allows it, the session resumes.

    Raises:
        DjinnError: the connection does not exist, or the session could not continue afterwards.
    """
    if number >= len(context.opened):
        raise DjinnError(f"the session has no connection {number}; there are {len(context.opened)}")
    channel = context.opened[number].connection
    while isinstance(channel, WrappedChannel):
        channel = channel._inner  # noqa: SLF001 - wrappers do not show what they wrap
    if not isinstance(channel, ReliableConnection):
        raise DjinnError("only a connection to a server can break and be restored: connect the session to a server")
    channel._inner.close()  # noqa: SLF001 - the only part of it that a network breaks


def kill_executor(number: int = 0) -> None:
    """Kill executor `number` on this machine, as the kernel does if memory is short.

    Raises:
        DjinnError: the executor runs on another machine.
    """
    executor_process(executor_processes()[number]).kill()
