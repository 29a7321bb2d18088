"""Control an executor that an engine started, by calls to the executor's parent process (holder)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from djinn_core.errors import PluginError, StartupError
from djinn_core.logs import get_logger
from djinn_core.wire.executor_reports import Ready, Sessions
from djinn_server.hookspecs.executors import ExecutorEngine, ExecutorHandle
from djinn_server.launch.orders import Order, to_line
from djinn_server.launch.tickets import NO_TENANT, TICKET_SECONDS, Badge

_REPLY_SECONDS: Final = 10.0  # extra time for a call beyond its method's timeout
_CLOSE_SECONDS: Final = 30.0  # extra time for the last call, which removes files
_FULL_SECONDS: Final = 1.0  # after which `full` queries the executor again
# Created at import: msgspec crashes if two threads let it inspect a class for the first time at the same time.
_ready: msgspec.json.Decoder[Ready] = msgspec.json.Decoder(Ready)
_sessions: msgspec.json.Decoder[Sessions] = msgspec.json.Decoder(Sessions)
_log = get_logger("djinn.launch")


def checked_handle(result: object, plugin: ExecutorEngine | ExecutorHandle, method: str) -> ExecutorHandle:
    """Return `result` if it is an `ExecutorHandle`. `method`: method of the plugin that returned it.

    Raises:
        PluginError: it has another type. The message names the plugin's class, its method and a remedy.
    """
    if isinstance(result, ExecutorHandle):
        return result
    source, kind = type(plugin), result if isinstance(result, type) else type(result)
    package = source.__module__.partition(".")[0]
    raise PluginError(
        f"the plugin of {package} started no executor: {source.__module__}.{source.__qualname__}.{method} returned "
        f"{'the class' if kind is result else 'an instance of'} {kind.__qualname__}, but must return an instance of a subclass "
        f"of djinn.hooks.ExecutorHandle. Install another version of {package}, or choose another engine (setting `engine`)"
    )


class HeldExecutor:
    """An executor whose parent process is a holder that an engine started, for example on a cluster.

    Methods may be called from several threads. The executor ends when this object is closed or this process ends. In a
    forked child, `close` does nothing.
    """

    def __init__(self, handle: ExecutorHandle, *, is_replacement: bool = False) -> None:
        """`is_replacement`: True if the executor replaces an executor, whose journals it recovers."""
        self._handle = handle
        self._is_replacement = is_replacement
        self._ready: Ready | None = None
        self._fingerprint = self._place = self._tenant = ""
        self._ready_lock = threading.Lock()
        self._full, self._full_queried_at = "", 0.0
        self._closed = False
        self._owner = os.getpid()

    @property
    def process_id(self) -> int:
        """Process id of the executor on its machine, in its PID namespace; 0 before it is ready."""
        return 0 if self._ready is None else self._ready.process

    @property
    def place(self) -> str:
        """Name of the executor's machine; empty before it is ready."""
        return self._place

    @property
    def fingerprint(self) -> str:
        """Fingerprint (`sha256:...`) of the certificate that only this executor shows; empty before it is ready."""
        return self._fingerprint

    @property
    def tenant(self) -> str:
        """The tenant of the latest ticket; empty before the first ticket."""
        return self._tenant

    @property
    def alive(self) -> bool:
        """False once the executor has ended. While the engine does not answer, the executor counts as alive."""
        return not self._closed and not self._handle.ended

    @property
    def ready(self) -> Ready:
        """The `Ready` report of the executor.

        Raises:
            StartupError: `wait_ready` has not succeeded.
        """
        if self._ready is None:
            raise StartupError("the executor is not ready: call `wait_ready` first")
        return self._ready

    @contextlib.contextmanager
    def relay_address(self) -> Iterator[str]:
        """Yield the executor's first URL, for the gateway's relay. The executor's holder has checked its address."""
        yield self.ready.urls[0]

    def wait_ready(self, timeout: float) -> Ready:
        """Wait until the executor listens, and return its report. If the start fails, end the executor.

        `timeout`: seconds from the moment at which the engine has found a machine.

        Raises:
            StartupError: the executor did not start, or the engine found no machine. The message has the reason and a remedy.
        """
        with self._ready_lock:
            if self._ready is None:
                try:
                    self._handle.wait_placed()
                    report, self._fingerprint, self._place = self._handle.call(
                        "wait_ready", timeout, timeout=timeout + _REPLY_SECONDS
                    )
                except StartupError:
                    self._end(0.0, for_good=not self._is_replacement)  # the next replacement needs the journals
                    raise
                self._ready = _ready.decode(report)
            return self._ready

    def wait(self) -> int:
        """Wait until the executor has ended. Return its exit status; a negative number is a signal."""
        return self._handle.wait()[0]

    def ending(self) -> str:
        """Return how the executor ended, as the predicate of a sentence, such as `was killed by SIGKILL`."""
        return self._handle.wait()[1]

    def issue_ticket(self, client: str = "", lifetime: float = TICKET_SECONDS, badge: Badge = NO_TENANT) -> str:
        """Return a ticket that admits one connection within `lifetime` seconds.

        The executor's machine measures the time.

        Raises:
            StartupError: the executor's machine does not answer.
        """
        self._tenant = badge.tenant
        arguments = (client, lifetime, msgspec.json.encode(badge))
        return str(self._handle.call("issue_ticket", *arguments, timeout=_REPLY_SECONDS))

    def status(self, timeout: float = 5.0) -> Sessions:
        """Return the executor's report on its sessions and its device's memory.

        Raises:
            StartupError: the executor has ended or does not answer within `timeout` seconds.
        """
        return _sessions.decode(self._handle.call("status", timeout, timeout=timeout))

    def full(self) -> str:
        """Return the reason why the executor refuses all clients now, or "" if it accepts clients.

        The call does not block. The result may be a second old.
        """
        now = time.monotonic()
        if now - self._full_queried_at > _FULL_SECONDS and not self._closed:
            self._full_queried_at = now
            threading.Thread(target=self._query_full, name="djinn-full", daemon=True).start()
        return self._full

    def _query_full(self) -> None:
        try:
            self._full = str(self._handle.call("full", timeout=_REPLY_SECONDS))
        except StartupError as error:
            _log.debug("an executor does not answer", reason=str(error))

    def notice(self) -> str:
        """Return the engine's notice, as `ExecutorHandle.notice` does, or "" if the executor has ended."""
        return self._handle.notice() if self.alive else ""

    def send(self, order: Order) -> None:
        """Send an order without waiting for its effect. Do nothing if the executor has ended."""
        self._handle.send("send", to_line(order))

    def close(self, drain_seconds: float = 5.0) -> None:
        """Wait at most `drain_seconds` for sessions to end. Then end the executor, and free its resources."""
        self._end(drain_seconds, for_good=True)

    def _end(self, drain_seconds: float, *, for_good: bool) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        with contextlib.suppress(StartupError):  # the executor has ended, or its machine does not answer
            self._handle.call("close", drain_seconds, for_good, timeout=drain_seconds + _CLOSE_SECONDS)
        self._handle.end()

    def restart(self) -> HeldExecutor:
        """Start a replacement for this executor, which has ended, and return at once.

        The new executor recovers the sessions from the journals. After an error, the call may be repeated.

        Raises:
            StartupError: the replacement cannot be started.
            PluginError: the engine returned no `ExecutorHandle`.
        """
        if not self._closed:
            with contextlib.suppress(StartupError):
                self._handle.call("close", 0.0, False, timeout=_REPLY_SECONDS)
        self._closed = False  # if the next line raises, this object must be closed again
        handle = checked_handle(self._handle.restart(), self._handle, "restart")
        self._closed = True
        return HeldExecutor(handle, is_replacement=True)
