"""An executor of a client program. The program starts it, and replaces it after a crash."""

from __future__ import annotations

import threading

import attrs

from djinn_core.errors import StartupError
from djinn_core.hookspecs.transports import Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.tls_transports import transports_trusting
from djinn_core.wire.executor_reports import Ready
from djinn_server.hookspecs.executors import ExecutorEngine, LaunchRequest
from djinn_server.launch.engines import StartedExecutor, start_executor
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.own_journals import JOURNAL_BYTES, OwnJournals, journal_space

LEASE_SECONDS = 30.0  # for which a session waits for a client whose connection broke
_log = get_logger("djinn.launch")


class OwnExecutor:
    """An executor of a client program, which is replaced if it dies. Methods may be called from several threads.

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
            config: configuration of the executor.
            engine: starts the process and its replacements.
            request: request to the engine.
            journals: directory for journals on this machine, which `close` removes; None: no journals on this machine.

        Raises:
            StartupError: the executor cannot be started.
        """
        self._journals = journals
        if journals is not None:
            limit = min(JOURNAL_BYTES, journal_space(journals.path) // request.count)
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
        """Seconds for which a session waits for a disconnected client."""
        return LEASE_SECONDS

    @property
    def recoverable(self) -> bool:
        """True if a new process can recover the sessions of a dead process."""
        return self._config.recoverable and (self._journals is None or not self._journals.empty)

    @property
    def alive(self) -> bool:
        """True while the executor's process runs."""
        return self._process.alive

    @property
    def process_id(self) -> int:
        """Process id of the current process."""
        return self._process.process_id

    @property
    def ending(self) -> str:
        """How the current process ended, as the predicate of a sentence."""
        return self._process.ending()

    def notice(self) -> str:
        """Return the engine's notice, as `ExecutorHandle.notice` does."""
        return self._process.notice()

    def wait_ready(self, timeout: float) -> Ready:
        """Wait until the executor listens, as `HeldExecutor.wait_ready` does."""
        return self._process.wait_ready(timeout)

    def issue_ticket(self, client: str) -> str:
        """Return a ticket for one connection, as `HeldExecutor.issue_ticket` does."""
        return self._process.issue_ticket(client)

    def trusted(self, transports: tuple[Transport, ...]) -> tuple[Transport, ...]:
        """Return the transports to the executor. If the executor has its own certificate, they accept only that."""
        return transports_trusting(transports, self._process.fingerprint)

    def start_again(self) -> None:
        """Start a replacement of the process if it has ended.

        Raises:
            StartupError: the process cannot be started, or this object was closed.
        """
        with self._lock:
            if self._closed:
                raise StartupError("the executor was closed")
            if self._process.alive:
                return
            _log.warning("an executor died: its replacement recovers its sessions", how=self.ending)
            self._process = self._process.restart()

    def close(self, drain_seconds: float = 5.0) -> None:
        """End the process as `HeldExecutor.close` does, and start no replacement."""
        with self._lock:
            self._closed = True
            self._process.close(drain_seconds)
        if self._journals is not None:
            self._journals.close()
