"""Control pipe of an executor: read its parent's orders, send reports, and end with the parent."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.executor_reports import Sessions
from djinn_server.launch.orders import (
    AssignTenant,
    Drain,
    End,
    Evict,
    Report,
    ReportSessions,
    Start,
    read_order,
    to_line,
)
from djinn_server.launch.pipe_lines import LineReader, write_line

START_SECONDS = 30.0
DRAIN_SECONDS = 10.0  # if SIGTERM reaches the executor directly, without a limit from its parent
_WATCH_SECONDS = 1.0
_DRAIN_STEP_SECONDS = 0.02
_log = get_logger("djinn.server")


class ControlledExecutor(Protocol):
    """The functions of an executor that its parent's orders call."""

    def sessions(self, number: int) -> Sessions:
        """Return a report of the sessions. `number`: number of the order, which the report repeats."""

    def stop_accepting(self) -> None:
        """Admit no further clients."""

    def evict(self, tokens: Collection[str]) -> None:
        """End the sessions of clients that were admitted with one of `tokens`, which are ids of tokens."""

    def end(self, session: str, reason: str) -> None:
        """End a session and its running submission for this reason."""

    def assign_tenant(self, tenant: str) -> None:
        """Assign the executor to a tenant."""

    def tick(self) -> None:
        """Do periodic work. Called at least once a second."""

    @property
    def idle(self) -> bool:
        """Return True if there are no sessions."""


class Control:
    """Reads orders on the main thread, and writes reports."""

    def __init__(self, orders: int, reports: int) -> None:  # file descriptors of the pipes
        self._orders = LineReader(orders)
        self._reports = reports
        self._report_lock = threading.Lock()
        self._parent = os.getppid()
        self._wake_receive, self._wake_send = os.pipe()
        self._deadline: float | None = None
        self._unused_until: float | None = None
        self.orphaned = False  # True if the parent ended without an order to drain

    def catch_signals(self) -> None:
        """Drain on SIGTERM. Ignore SIGINT, because the parent handles it and sends orders."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt_mask.ignore()
        signal.signal(signal.SIGTERM, lambda *_: os.write(self._wake_send, b"t"))

    def read_start(self) -> Start:
        """Read the first order, which must be `Start`.

        Raises:
            StartupError: the order is not `Start`, or none arrived.
        """
        try:
            line = self._orders.read_line(START_SECONDS)
        except TimeoutError:
            line = None
        order = None if line is None else read_order(line)
        if not isinstance(order, Start):
            raise StartupError(
                "this is an internal command, which a parent process starts and controls: run `djinn serve` instead"
            )
        return order

    def report(self, report: Report) -> None:
        """Send a report to the parent. If the parent is gone, do nothing, because `run` will end."""
        try:
            with self._report_lock:  # keeps lines of several threads apart
                write_line(self._reports, to_line(report))
        except OSError as error:
            _log.info("cannot send a report: the parent process closed the pipe", error=str(error))

    def run(self, executor: ControlledExecutor, unused_seconds: float = 0.0) -> None:
        """Follow orders until the executor is drained or the parent is gone.

        `unused_seconds`: also end if no session has begun after this time; 0: no limit.
        """
        self._unused_until = time.monotonic() + unused_seconds if unused_seconds else None
        self._follow_lines(executor)  # orders that arrived together with `Start`
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders.descriptor, selectors.EVENT_READ, lambda: self._follow(executor))
            selector.register(self._wake_receive, selectors.EVENT_READ, lambda: self._terminate(executor))
            while not self._must_end(executor):
                for key, _ in selector.select(_WATCH_SECONDS if self._deadline is None else _DRAIN_STEP_SECONDS):
                    action: Callable[[], bool] = key.data
                    if not action():
                        return
                executor.tick()

    def _must_end(self, executor: ControlledExecutor) -> bool:
        # The pipe alone is not enough: a forked child of the parent may hold its other end open.
        if os.getppid() != self._parent:
            _log.info("executor ends: the parent process is gone")
            self.orphaned = self._deadline is None
            return True
        if self._unused_until is not None:
            if not executor.idle:
                self._unused_until = None
            elif time.monotonic() >= self._unused_until:
                _log.info("executor ends: no session has begun in time")
                return True
        return self._deadline is not None and (executor.idle or time.monotonic() >= self._deadline)

    def _follow(self, executor: ControlledExecutor) -> bool:
        is_open = self._orders.fill()
        self._follow_lines(executor)
        self.orphaned = not is_open and self._deadline is None
        return is_open

    def _follow_lines(self, executor: ControlledExecutor) -> None:
        while (line := self._orders.next_line()) is not None:
            order = read_order(line)
            if isinstance(order, ReportSessions):
                self.report(executor.sessions(order.number))
            elif isinstance(order, Evict):
                executor.evict(order.tokens)
            elif isinstance(order, End):
                executor.end(order.session, order.reason)
            elif isinstance(order, AssignTenant):
                executor.assign_tenant(order.tenant)
            elif isinstance(order, Drain):
                self._drain(executor, order.seconds)

    def _terminate(self, executor: ControlledExecutor) -> bool:
        os.read(self._wake_receive, 64)
        self._drain(executor, DRAIN_SECONDS)
        return True

    def _drain(self, executor: ControlledExecutor, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        executor.stop_accepting()
