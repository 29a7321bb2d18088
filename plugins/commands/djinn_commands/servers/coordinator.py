"""`djinn.compat.coordinator()`: the configured servers with their executors, load, and assignment policy."""

from __future__ import annotations

import attrs

from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_client.tracebacks import for_users
from djinn_core.errors import DjinnError
from djinn_core.wire.messages import ExecutorStatus, Status


@attrs.frozen
class ExecutorView:
    """An executor of a server.

    Attributes:
        device: id of the executor's device.
        process: process id on the server's machine.
        state: `ready`, `starting`, `restarting` or `silent`.
        sessions: number of sessions of the executor.
        held: bytes of device memory that these sessions use.
        load: share of recent seconds in which the executor ran programs, plus one for each session about to begin.
        memory: bytes of device memory, or 0 if unknown.
        memory_free: bytes of free device memory, or None if unknown.
    """

    device: str
    process: int
    state: str
    sessions: int
    held: int
    load: float
    memory: int
    memory_free: int | None


@attrs.frozen
class ServerView:
    """A configured server.

    Attributes:
        url: the queried address.
        error: why the server did not answer. If it is empty, the server answered, and the other fields are valid.
        policy: name of the server's assignment policy.
        load: load of the server's least loaded device over all tenants, by which clients choose a server.
        executors: executors of this client's tenant.
    """

    url: str
    error: str = ""
    policy: str = ""
    load: float = 0.0
    executors: tuple[ExecutorView, ...] = ()


@attrs.frozen
class Coordinator:
    """The configured servers at the time of the query. `servers` is empty if the program uses an embedded executor."""

    servers: tuple[ServerView, ...]

    @property
    def executors(self) -> tuple[ExecutorView, ...]:
        """Return the executors of all servers."""
        return tuple(executor for server in self.servers for executor in server.executors)

    @property
    def sessions(self) -> int:
        """Return the number of sessions on all servers."""
        return sum(executor.sessions for executor in self.executors)

    @property
    def load(self) -> float:
        """Return the sum of the servers' loads. 1.0 stands for one busy device."""
        return sum(executor.load for executor in self.executors)


@for_users
def coordinator() -> Coordinator:
    """Return a report of the configured servers: executors, sessions, load, memory and assignment policy.

    The query begins no session.

    Raises:
        ConfigurationError: the connection file cannot be read, or the token is missing.
        PluginError: a requested plugin cannot be used.
    """
    return Coordinator(tuple(_server(url, reply) for url, reply in ask_servers(client.settings()).items()))


def _server(url: str, reply: Status | DjinnError) -> ServerView:
    if isinstance(reply, DjinnError):
        return ServerView(url, str(reply))
    return ServerView(url, "", reply.assignment, reply.load, tuple(map(_executor, reply.executors)))


def _executor(one: ExecutorStatus) -> ExecutorView:
    session_bytes = sum(session.memory for session in one.sessions)
    sessions, device = len(one.sessions), one.device
    return ExecutorView(
        device.id, one.process, one.state, sessions, session_bytes, one.load, device.memory, device.memory_free
    )
