"""Held executor: handle, in the process that launched it, of an executor on another machine; its calls go to an `ExecutorHolder` there."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from djinn_core.errors import StartupError
from djinn_core.hookspecs.executors import NO_TENANT, TICKET_SECONDS, Badge
from djinn_core.logs import get_logger
from djinn_core.wire.executor_reports import Ready, Sessions

_REPLY_SECONDS: Final = 10.0  # that a call may take beside the time for which its method waits
_CLOSE_SECONDS: Final = 30.0  # the same for the last call: files that it has not removed by then stay
_FULL_SECONDS: Final = 1.0  # after which `full` asks again
# Made at the import: msgspec crashes where two threads have it inspect a class for the first time together.
_ready: msgspec.json.Decoder[Ready] = msgspec.json.Decoder(Ready)
_sessions: msgspec.json.Decoder[Sessions] = msgspec.json.Decoder(Sessions)
_log = get_logger("djinn.launch")


class HolderCalls(Protocol):
    """Calls of an `ExecutorHolder` that an engine runs. Methods may be called from several threads."""

    def wait_placed(self) -> None:
        """Wait until the holder runs, for as long as the engine needs to find a machine for it.

        Raises:
            StartupError: it found none, or the holder could not be made.
        """

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Result of a method of the holder, which answers after its executor has ended, too: `close` removes the journals then.

        Raises:
            StartupError: it does not answer within `timeout` seconds, the holder has ended, or the method raised this error.
        """

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the holder without waiting; if the holder has ended, nothing happens."""

    def wait(self) -> tuple[int, str]:
        """Wait until the executor or its holder has ended; `ExecutorHolder.wait`, or -9 and how the engine lost the holder."""

    @property
    def ended(self) -> bool:
        """True once `wait` would return at once."""

    def end(self) -> None:
        """End the holder, and give its resources back to the engine. Calling it again does nothing."""

    def again(self) -> HolderCalls:
        """End the holder, and have another one made in its place; may be called after `end`. Returns at once.

        Raises:
            StartupError: the engine cannot be asked.
        """


@runtime_checkable
class NoticedCalls(Protocol):
    """`HolderCalls` of an engine that gives notice before it takes a holder's resources away."""

    def notice(self) -> str:
        """As `NoticedLaunched.notice`."""


class HeldExecutor:
    """A `Launched` over the calls of its holder, which an engine runs."""

    def __init__(self, calls: HolderCalls, *, follows: bool = False) -> None:
        """`follows`: True if it takes the place of another executor, whose journals it recovers."""
        self._calls = calls
        self._follows = follows
        self._ready: Ready | None = None
        self._fingerprint = self._place = self._tenant = ""
        self._reading = threading.Lock()
        self._full, self._full_asked_at = "", 0.0
        self._closed = False
        self._owner = os.getpid()

    @property
    def process_id(self) -> int:
        """As `Launched.process_id`."""
        return 0 if self._ready is None else self._ready.process

    @property
    def place(self) -> str:
        """As `Launched.place`: the name of the host; empty before it is ready."""
        return self._place

    @property
    def fingerprint(self) -> str:
        """As `Launched.fingerprint`; empty before it is ready."""
        return self._fingerprint

    @property
    def tenant(self) -> str:
        """As `Launched.tenant`."""
        return self._tenant

    @property
    def alive(self) -> bool:
        """As `Launched.alive`."""
        return not self._closed and not self._calls.ended

    @property
    def ready(self) -> Ready:
        """As `Launched.ready`."""
        if self._ready is None:
            raise StartupError("the executor is not ready")
        return self._ready

    def wait_ready(self, timeout: float) -> Ready:
        """As `Launched.wait_ready`."""
        with self._reading:
            if self._ready is None:
                try:
                    self._calls.wait_placed()
                    report, self._fingerprint, self._place = self._calls.call(
                        "wait_ready", timeout, timeout=timeout + _REPLY_SECONDS
                    )
                except StartupError:
                    self._end(0.0, for_good=not self._follows)  # the journals stay for the next one, which may start
                    raise
                self._ready = _ready.decode(report)
            return self._ready

    def wait(self) -> int:
        """As `Launched.wait`."""
        return self._calls.wait()[0]

    def ending(self) -> str:
        """As `Launched.ending`."""
        return self._calls.wait()[1]

    def issue_ticket(self, client: str = "", lifetime: float = TICKET_SECONDS, badge: Badge = NO_TENANT) -> str:
        """As `Launched.issue_ticket`."""
        self._tenant = badge.tenant
        arguments = (client, lifetime, msgspec.json.encode(badge))
        return str(self._calls.call("issue_ticket", *arguments, timeout=_REPLY_SECONDS))

    def status(self, timeout: float = 5.0) -> Sessions:
        """As `Launched.status`."""
        return _sessions.decode(self._calls.call("status", timeout, timeout=timeout))

    def full(self) -> str:
        """As `Launched.full`; the result is up to a second old."""
        now = time.monotonic()
        if now - self._full_asked_at > _FULL_SECONDS and not self._closed:
            self._full_asked_at = now
            threading.Thread(target=self._ask_full, name="djinn-full", daemon=True).start()
        return self._full

    def _ask_full(self) -> None:
        try:
            self._full = str(self._calls.call("full", timeout=_REPLY_SECONDS))
        except StartupError as error:
            _log.debug("an executor does not answer", reason=str(error))

    def notice(self) -> str:
        """As `NoticedLaunched.notice`; empty where the engine does not say."""
        return self._calls.notice() if isinstance(self._calls, NoticedCalls) and self.alive else ""

    def evict(self, tokens: tuple[str, ...]) -> None:
        """As `Launched.evict`."""
        self._calls.tell("evict", tokens)

    def end(self, session: str, reason: str) -> None:
        """As `Launched.end`."""
        self._calls.tell("end", session, reason)

    def drain(self, seconds: float) -> None:
        """As `Launched.drain`."""
        self._calls.tell("drain", seconds)

    def close(self, drain_seconds: float = 5.0) -> None:
        """As `Launched.close`."""
        self._end(drain_seconds, for_good=True)

    def _end(self, drain_seconds: float, *, for_good: bool) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        with contextlib.suppress(StartupError):  # it has ended, or its machine does not answer
            self._calls.call("close", drain_seconds, for_good, timeout=drain_seconds + _CLOSE_SECONDS)
        self._calls.end()

    def again(self) -> HeldExecutor:
        """As `Launched.again`."""
        if not self._closed:
            with contextlib.suppress(StartupError):
                self._calls.call("close", 0.0, False, timeout=_REPLY_SECONDS)
        self._closed = False  # if the next line raises, this one has to be closed again
        calls = self._calls.again()
        self._closed = True
        return HeldExecutor(calls, follows=True)
