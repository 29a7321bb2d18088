"""The methods of a holder that need only its executor process.

Clients import this early: it imports neither TLS nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from djinn_core.registry.version import djinn_version
from djinn_server.launch.process import ExecutorProcess
from djinn_server.launch.tickets import Badge

# Made at the import: msgspec crashes where two threads have it inspect a class for the first time together.
_badges: msgspec.json.Decoder[Badge] = msgspec.json.Decoder(Badge)


class ProcessHolder:
    """The calls that an engine carries to the parent of an executor process. Methods may be called from several threads."""

    def __init__(self, process: ExecutorProcess) -> None:
        self._process = process

    def version(self) -> str:
        """Return the version of Djinn on this machine."""
        return djinn_version()

    def wait_ready(self, timeout: float) -> tuple[bytes, str, str]:
        """Return the `Ready` report as JSON, the fingerprint, and the machine's name; both are empty for this machine.

        Raises:
            StartupError: as `ExecutorProcess.wait_ready`.
        """
        return msgspec.json.encode(self._process.wait_ready(timeout)), "", ""

    def issue_ticket(self, client: str, lifetime: float, badge: bytes) -> str:
        """Return a ticket for one connection, which expires by the clock of this machine. `badge`: as JSON."""
        return self._process.issue_ticket(client, lifetime, _badges.decode(badge))

    def status(self, timeout: float) -> bytes:
        """Return the executor's `Sessions` report as JSON.

        Raises:
            StartupError: it does not answer.
        """
        return msgspec.json.encode(self._process.status(timeout))

    def full(self) -> str:
        """Return why the executor refuses clients, as `ExecutorProcess.full` does."""
        return self._process.full()

    def evict(self, tokens: Collection[str]) -> None:
        """End the sessions of invalid tokens, as `ExecutorProcess.evict` does."""
        self._process.evict(tuple(tokens))

    def end(self, session: str, reason: str) -> None:
        """End a session, as `ExecutorProcess.end` does."""
        self._process.end(session, reason)

    def drain(self, seconds: float) -> None:
        """Accept no further session, as `ExecutorProcess.drain` does."""
        self._process.drain(seconds)

    def wait(self) -> tuple[int, str]:
        """Wait until the executor has ended. Return its exit status, and `ExecutorProcess.ending`."""
        status = self._process.wait()
        return status, self._process.ending()

    def close(self, drain_seconds: float, for_good: bool) -> None:  # noqa: ARG002 - it keeps nothing on disk
        """End the executor. `for_good`: True if no executor replaces it, so that its journals are removed."""
        self._process.close(drain_seconds)
