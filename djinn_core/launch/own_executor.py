"""An executor that a program starts for itself, and starts again when it dies."""

from __future__ import annotations

import threading

import attrs

from djinn_core.errors import StartupError
from djinn_core.launch.executor_config import ExecutorConfig
from djinn_core.launch.orders import Ready
from djinn_core.launch.own_journals import LIMIT, OwnJournals
from djinn_core.launch.process import ExecutorProcess
from djinn_core.logs import get_logger

LEASE_SECONDS = 30.0  # for the connection: the executor itself ends with the program
_log = get_logger("djinn.launch")


class OwnExecutor:
    """One executor process after the other, with the same journals. Methods may be called from several threads."""

    def __init__(self, config: ExecutorConfig, journals: OwnJournals | None = None, share: int = 1) -> None:
        """Start the first process and return at once.

        Args:
            config: how to start it.
            journals: where sessions write what they take, so that the next process goes on with them; None: nowhere.
                Closed with this.
            share: how many executors share the room that there is for journals.

        Raises:
            StartupError: it cannot be started.
        """
        self._journals = journals
        if journals is not None:
            limit = min(LIMIT, journals.room() // share)
            recovery = attrs.evolve(
                config.recovery, lease_seconds=LEASE_SECONDS, journals=journals.path, journal_limit=limit
            )
            config = attrs.evolve(config, recovery=recovery)
        self._config = config
        self._closed = False
        self._lock = threading.RLock()
        self._process = ExecutorProcess(config)

    @property
    def recoverable(self) -> bool:
        """True if a new process can recover the sessions of one that died."""
        return self._journals is not None and not self._journals.empty

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

    def wait_ready(self, timeout: float) -> Ready:
        """As `ExecutorProcess.wait_ready`."""
        return self._process.wait_ready(timeout)

    def issue_ticket(self, client: str) -> str:
        """As `ExecutorProcess.issue_ticket`."""
        return self._process.issue_ticket(client)

    def start_again(self) -> None:
        """Start a process in the place of one that has ended; does nothing where it runs.

        Raises:
            StartupError: it cannot be started, or this was closed.
        """
        with self._lock:
            if self._closed:
                raise StartupError("the executor was closed")
            if self._process.alive:
                return
            _log.warning("an executor died; another one goes on with what it did", how=self.ending)
            self._process.close(0.0)
            self._process = ExecutorProcess(self._config)

    def close(self, drain_seconds: float = 5.0) -> None:
        """End it as `ExecutorProcess.close` does, and start no other."""
        with self._lock:
            self._closed = True
            self._process.close(drain_seconds)
        if self._journals is not None:
            self._journals.close()
