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
    """Executor of a server. Sizes are in bytes.

    Attributes:
        device: id of its device.
        process: number of its process on the server's machine.
        state: `ready`, `starting`, `restarting` or `silent`.
        sessions: number of its sessions.
        held: bytes of these sessions.
        load: share of recent seconds in which it ran programs, plus one for each session about to begin.
        memory: the device's memory; 0 if unknown.
        memory_free: free memory; None if unknown.
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
        error: why it did not answer; empty if it answered, and the other fields are valid.
        policy: name of its assignment policy.
        load: load of its least loaded device over all tenants, by which clients choose a server.
        executors: executors of this client's tenant.
    """

    url: str
    error: str = ""
    policy: str = ""
    load: float = 0.0
    executors: tuple[ExecutorView, ...] = ()


@attrs.frozen
class Coordinator:
    """Servers of this client at one moment; empty with an embedded executor."""

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
        """Return the total load of all servers, in devices."""
        return sum(executor.load for executor in self.executors)


@for_users
def coordinator() -> Coordinator:
    """Return a report of the configured servers: executors, sessions, load, memory and assignment policy.

    Begins no session.

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
