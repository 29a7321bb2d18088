"""Start an executor process, and control it from its parent: status, tickets, drain, termination."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, Protocol, Self

from djinn_core.errors import ConfigurationError, StartupError
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import SOCKET_NAME
from djinn_core.registry.embedded_executors import check_platform
from djinn_core.system.private_directories import make_run_directory
from djinn_core.wire.executor_reports import Ready, Sessions
from djinn_server.hookspecs.executors import LaunchedExecutor
from djinn_server.launch.as_user import prepare_for_user
from djinn_server.launch.command import EXECUTOR_MODULE, executor_command, executor_environment
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.executor_log import log_output
from djinn_server.launch.orders import (
    FULL_SECONDS,
    AssignTenant,
    Drain,
    Failed,
    Full,
    Order,
    Report,
    ReportSessions,
    Start,
    read_report,
    to_line,
)
from djinn_server.launch.pipe_lines import LineReader, write_line
from djinn_server.launch.tickets import NO_TENANT, TICKET_SECONDS, Badge, issue_ticket, new_key
from djinn_server.system.private_files import stable_socket_path

_log = get_logger("djinn.launch")
_TERMINATE_SECONDS = 2.0


class ChildProcess(Protocol):
    """Process of an executor: the functions that its parent calls. `subprocess.Popen` implements this interface."""

    stdin: IO[bytes] | None
    pid: int

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait at most `timeout` seconds for the end of the process, and return the exit status."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkServer(Protocol):
    """Client of a fork server: a process that forks executors, which is faster than starting interpreters."""

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> ChildProcess | None:
        """Fork an executor that inherits `descriptors`. Return None if the fork server does not run or answer."""

    def start_server(self, environment: Mapping[str, str]) -> None:
        """Start a fork server for later executors, and return at once."""


class ExecutorProcess(LaunchedExecutor):
    """An executor process, controlled by its parent.

    The process ends when this object is closed or garbage-collected, or when the parent process ends. Methods may be
    called from several threads. In a forked child, `close` does nothing.
    """

    place = ""
    fingerprint = ""  # of the executor's own certificate; empty: the executor shows the configured certificate

    def __init__(
        self, config: ExecutorConfig, without: Collection[str] = (), fork_server: ForkServer | None = None
    ) -> None:
        """Start the process and return at once; `wait_ready` waits for it.

        Args:
            config: configuration of the executor.
            without: environment variables to remove.
            fork_server: forks the executor. If it is None or does not run, a new interpreter starts.

        Raises:
            StartupError: the process cannot be started.
        """
        check_platform()
        self.config = config
        self._without = frozenset(without)
        self._fork_server = fork_server
        self._key = new_key()
        self._ready: Ready | None = None
        self._last_number = 0
        self._full = "", 0.0
        self._failure = ""
        self._tenant = NO_TENANT.tenant
        self._report_lock = threading.Lock()
        self._order_lock = threading.Lock()
        self._owner = os.getpid()
        self._directory, lock = make_run_directory()
        receiving, sending = os.pipe()
        self._report_lines = LineReader(receiving)
        try:
            if config.user is not None:
                config, self.fingerprint = prepare_for_user(config, config.user, self._directory)
            self._process = _spawn(config, sending, lock, self._without, fork_server)
        except (OSError, StartupError, ConfigurationError) as error:
            os.close(receiving)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise StartupError(f"cannot start an executor process: {error}") from error
        finally:
            os.close(sending)
            os.close(lock)  # the executor has its own copy
        self._end = weakref.finalize(self, _end, self._process, receiving, self._directory, self._owner)
        self.send(Start(self._directory, self._key, config.sendable()))  # `wait_ready` reports a dead process

    def wait_ready(self, timeout: float) -> Ready:
        """Wait until the executor listens, and return its report. If the start fails, end the process.

        Raises:
            StartupError: the executor failed, died, or took longer than `timeout` seconds.
        """
        with self._report_lock:
            if self._ready is not None:
                return self._ready
            try:
                self._ready = self._await_ready(timeout)
            except StartupError:
                self._end()
                raise
        if self._fork_server is not None and isinstance(self._process, subprocess.Popen):
            # Only now, so that the fork server's start does not slow down this executor's start.
            self._fork_server.start_server(executor_environment(self._without))
        return self._ready

    @property
    def ready(self) -> Ready:
        """The executor's `Ready` report.

        Raises:
            StartupError: `wait_ready` has not succeeded.
        """
        if self._ready is None:
            raise StartupError(f"executor process {self.process_id} is not ready: call `wait_ready` first")
        return self._ready

    @contextlib.contextmanager
    def relay_address(self) -> Iterator[str]:
        """Yield the URL of the executor's socket in the directory that this process created. Ignore its reported URLs.

        Raises:
            OSError: the executor has a user of its own, and its socket was replaced by a link or by a socket of another user.
        """
        path, user = f"{self._directory}/{SOCKET_NAME}", self.config.user
        with contextlib.nullcontext(path) if user is None else stable_socket_path(path, user.uid) as stable_path:
            yield f"unix://{stable_path}"

    @property
    def process_id(self) -> int:
        """The process id of the executor."""
        return self._process.pid

    @property
    def tenant(self) -> str:
        """The tenant of the executor; empty before the first ticket for a tenant."""
        return self._tenant

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until the process has ended. Return its exit status; a negative number is a signal."""
        return self._process.wait()

    def ending(self) -> str:
        """Return how the process ended, such as "ended with exit status 1", and the reason if it reported one."""
        ending = _ending(self._process)
        self.full()  # reads the last reports
        return f"{ending}: {self._failure}" if self._failure else ending

    def issue_ticket(self, client: str = "", lifetime: float = TICKET_SECONDS, badge: Badge = NO_TENANT) -> str:
        """Return a ticket that admits one connection within `lifetime` seconds. `client`: name of the client, for messages."""
        if badge.tenant != self._tenant:
            self._tenant = badge.tenant
            self.send(AssignTenant(badge.tenant))
        return issue_ticket(self._key, client, lifetime, badge)

    def status(self, timeout: float = 5.0) -> Sessions:
        """Return the executor's report on its sessions and its device's memory.

        Raises:
            StartupError: the process has ended or does not answer.
        """
        with self._report_lock:
            self._last_number += 1
            try:
                self._write_order(ReportSessions(self._last_number))
                report = self._await_sessions(timeout, self._last_number)
            except OSError as error:  # TimeoutError included
                raise StartupError(f"executor process {self.process_id} does not answer: {error!r}") from error
            if report is None:
                raise StartupError(f"executor process {self.process_id} {_ending(self._process)}")
            return report

    def full(self) -> str:
        """Return the latest reported reason why the executor refuses all clients, or "" if it accepts clients."""
        if self._report_lock.acquire(blocking=False):
            try:
                with contextlib.suppress(TimeoutError):  # no further report has arrived
                    while (line := self._report_lines.read_line(0.0)) is not None:
                        self._note_report(read_report(line))
            except (OSError, StartupError) as error:
                _log.debug("an executor does not answer", process=self.process_id, reason=str(error))
            finally:
                self._report_lock.release()
        reason, at = self._full
        return reason if time.monotonic() - at < FULL_SECONDS else ""

    def _note_report(self, report: Report) -> None:
        if isinstance(report, Failed):
            self._failure = report.reason
        elif isinstance(report, Full):
            self._full = report.reason, time.monotonic()

    def notice(self) -> str:
        """Return "", because no engine reclaims this machine."""
        return ""

    def send(self, order: Order) -> None:
        """Send an order without waiting for its effect. Do nothing if the process has ended."""
        with contextlib.suppress(OSError):
            self._write_order(order)

    def close(self, drain_seconds: float = 5.0) -> None:
        """Wait at most `drain_seconds` for sessions to end. Then terminate the process, and kill it if necessary."""
        if self._end.alive and os.getpid() == self._owner:
            self.send(Drain(drain_seconds))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(drain_seconds + _TERMINATE_SECONDS)
        self._end()

    def restart(self) -> ExecutorProcess:
        """Start a replacement for this process, which must have ended.

        Raises:
            StartupError: the process cannot be started.
        """
        self.close(0.0)
        return ExecutorProcess(self.config, self._without, self._fork_server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0.0)

    def _write_order(self, order: Order) -> None:
        stdin = self._process.stdin
        with self._order_lock:
            if stdin is None or stdin.closed:
                raise BrokenPipeError("cannot send an order: the executor process was closed")
            write_line(stdin.fileno(), to_line(order))

    def _await_ready(self, timeout: float) -> Ready:
        try:
            line = self._report_lines.read_line(timeout)
        except TimeoutError:
            raise StartupError(
                f"the executor process {self.process_id} was not ready after {timeout:g} s: increase the timeout with "
                "djinn.configure(start_timeout=...) or DJINN_START_TIMEOUT"
            ) from None
        report: Report | None = None if line is None else read_report(line)
        if isinstance(report, Ready):
            return report
        if isinstance(report, Failed):
            raise StartupError(report.reason)
        raise StartupError(
            f"the executor process {self.process_id} {_ending(self._process)} before it was ready; its messages are on "
            "standard error. `djinn doctor` checks the installation"
        )

    def _await_sessions(self, timeout: float, number: int) -> Sessions | None:
        deadline = time.monotonic() + timeout
        while (line := self._report_lines.read_line(max(0.0, deadline - time.monotonic()))) is not None:
            report = read_report(line)
            self._note_report(report)
            if isinstance(report, Sessions) and report.number == number:
                return report  # earlier reports answer requests that timed out
        return None


def _spawn(
    config: ExecutorConfig, report: int, lock: int, without: Collection[str], fork_server: ForkServer | None
) -> ChildProcess:
    environment, user = executor_environment(without), config.user
    if fork_server is not None and config.module == EXECUTOR_MODULE and user is None:
        fork = fork_server.fork(["--device", config.device], environment, [report, lock])
        if fork is not None:
            return fork
    process = subprocess.Popen(
        executor_command(config.module, config.device, report, confined=user is not None),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None if user is None else subprocess.PIPE,  # the log of the gateway has lines about other tenants
        pass_fds=(report, lock),
        env=environment if user is None else user.environment(environment, config.pass_variables),
        bufsize=0,
        process_group=0 if user is None else None,  # so that Ctrl-C reaches only the user's program
        start_new_session=user is not None,  # so that a tenant cannot type into the gateway's terminal
        cwd=None if user is None else user.folder,
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        extra_groups=None if user is None else (),
        umask=-1 if user is None else 0o077,
    )
    if user is not None and process.stderr is not None:
        log_output(process.stderr, user.folder.name, process.pid, config.log.level)
    return process


def _ending(process: ChildProcess) -> str:
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its report pipe"
    return how_ended(status)


def how_ended(status: int) -> str:
    """Return how a process with this exit status ended, as the predicate of a sentence. A negative status is a signal."""
    if status < 0:
        name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
        return f"was killed by {name}"
    return f"ended with exit status {status}"


def _end(process: ChildProcess, reports: int, directory: str, owner: int) -> None:
    """End the process, at last by SIGKILL, close `reports`, and remove `directory`. Only process `owner` does this."""
    if os.getpid() != owner:
        return
    if process.stdin is not None:
        process.stdin.close()  # an executor ends at the end of its orders
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        _log.warning("killing an executor that does not end", process=process.pid)
        process.kill()
        process.wait()
    os.close(reports)
    shutil.rmtree(directory, ignore_errors=True)
