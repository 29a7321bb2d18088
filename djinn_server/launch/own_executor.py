"""Embedded executor of a program: started by its client, and started again when it dies."""

from __future__ import annotations

import threading

import attrs

from djinn_core.errors import StartupError
from djinn_core.hookspecs.executors import ExecutorEngine, LaunchRequest
from djinn_core.hookspecs.transports import Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.tls_transports import trusting
from djinn_core.wire.executor_reports import Ready
from djinn_server.launch.engines import StartedExecutor, start_executor
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.own_journals import JOURNAL_BYTES, OwnJournals, room_for_journals

LEASE_SECONDS = 30.0  # for a broken connection; the executor ends with the program
_log = get_logger("djinn.launch")


class OwnExecutor:
    """An executor process, or the one in its place, with the same journals. Methods may be called from several threads.

    Attributes:
        number: as in `LaunchRequest`.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        engine: ExecutorEngine,
        request: LaunchRequest,
        journals: OwnJournals | None = None,
    ) -> None:
        """Start the first process and return at once.

        Args:
            config: its configuration.
            engine: starts the processes.
            request: where the engine starts them.
            journals: the directory for the journals of sessions on this machine, from which the next process recovers them;
                None: there are none, or the engine has a place for them. It is closed with this object.

        Raises:
            StartupError: it cannot be started.
        """
        self._journals = journals
        if journals is not None:
            limit = min(JOURNAL_BYTES, room_for_journals(journals.path) // request.count)
            recovery = attrs.evolve(
                config.recovery, lease_seconds=LEASE_SECONDS, journals=journals.path, journal_limit=limit
            )
            config = attrs.evolve(config, recovery=recovery)
        self.number = request.number
        self._config = config
        self._closed = False
        self._lock = threading.RLock()
        self._process: StartedExecutor = start_executor(engine, config, request)

    @property
    def lease_seconds(self) -> float:
        """As `EmbeddedExecutor.lease_seconds`."""
        return LEASE_SECONDS

    @property
    def recoverable(self) -> bool:
        """True if a new process can recover the sessions of one that died."""
        return self._config.recoverable and (self._journals is None or not self._journals.empty)

    @property
    def alive(self) -> bool:
        """True while a process runs."""
        return self._process.alive

    @property
    def process_id(self) -> int:
        """Process id of the present process."""
        return self._process.process_id

    @property
    def ending(self) -> str:
        """Description of how the present process has ended."""
        return self._process.ending()

    def notice(self) -> str:
        """As `ExecutorHandle.notice`."""
        return self._process.notice()

    def wait_ready(self, timeout: float) -> Ready:
        """As `HeldExecutor.wait_ready`."""
        return self._process.wait_ready(timeout)

    def issue_ticket(self, client: str) -> str:
        """As `HeldExecutor.issue_ticket`."""
        return self._process.issue_ticket(client)

    def trusted(self, transports: tuple[Transport, ...]) -> tuple[Transport, ...]:
        """The transports that reach it; where it has a certificate of its own, they accept no other."""
        return trusting(transports, self._process.fingerprint)

    def start_again(self) -> None:
        """Start a process in the place of the one that has ended; where it runs, do nothing.

        Raises:
            StartupError: it cannot be started, or this was closed.
        """
        with self._lock:
            if self._closed:
                raise StartupError("the executor was closed")
            if self._process.alive:
                return
            _log.warning("an executor died; another one goes on with what it did", how=self.ending)
            self._process = self._process.restart()

    def close(self, drain_seconds: float = 5.0) -> None:
        """End the process as `HeldExecutor.close` does; no other is started."""
        with self._lock:
            self._closed = True
            self._process.close(drain_seconds)
        if self._journals is not None:
            self._journals.close()
