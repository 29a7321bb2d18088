"""Executors that a program starts for itself: the interface between clients and the package djinn-server.

A client imports one module of that package, `STARTER`, and nothing else. The module is not a plugin of the kind
`executors`, because executors start before plugins are loaded. The module starts the executors of all engines, whatever
plugins are selected.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from djinn_core.errors import DjinnError, StartupError, install_hint
from djinn_core.system.processes import CLIENT_ONLY

if TYPE_CHECKING:
    from djinn_core.hookspecs.transports import Connection, Transport
    from djinn_core.settings import Settings
    from djinn_core.wire.executor_reports import Ready

STARTER: Final = "djinn_server.launch.embedded"  # the module is an `ExecutorStarter`
INSTALL_SERVER: Final = f"Install it: {install_hint('djinn_server')}."
LOCAL: Final = "local"  # the engine that starts processes on this machine


class EmbeddedExecutor(Protocol):
    """An executor process that the program started, or its replacement. Methods may be called from several threads."""

    @property
    def number(self) -> int:
        """Number of the executor, as in `LaunchRequest`."""

    @property
    def lease_seconds(self) -> float:
        """Seconds for which the executor keeps a session after its connection broke."""

    @property
    def recoverable(self) -> bool:
        """True if a new process can recover the sessions of a dead process."""

    @property
    def alive(self) -> bool:
        """True while a process runs."""

    @property
    def process_id(self) -> int:
        """Process id of the current process."""

    @property
    def ending(self) -> str:
        """Description of how the current process has ended."""

    def notice(self) -> str:
        """Return the reason why the engine will end the executor; empty if it will not."""

    def wait_ready(self, timeout: float) -> Ready:
        """Wait until the executor listens. Return its addresses and its device. After a timeout, end the executor.

        `timeout` is in seconds, and begins when the engine has found resources for the executor.

        Raises:
            StartupError: the executor did not start, or the engine lacks resources; the message names cause and remedy.
        """

    def issue_ticket(self, client: str) -> str:
        """Return a ticket for one connection of `client`, a name for messages.

        Raises:
            StartupError: the executor's machine does not answer.
        """

    def trusted(self, transports: tuple[Transport, ...]) -> tuple[Transport, ...]:
        """Return the transports that reach the executor.

        If it has its own certificate, they accept no other certificate.
        """

    def start_again(self) -> None:
        """Start a replacement if the process has ended. Do nothing while it runs.

        Raises:
            StartupError: the process cannot be started, or this object was closed.
        """

    def close(self, drain_seconds: float = 5.0) -> None:
        """Drain the executor's sessions for at most `drain_seconds`, then end the process. It is not replaced."""


class ExecutorStarter(Protocol):
    """Interface of the package djinn-server for clients."""

    def start(
        self,
        settings: Settings,
        engines: Sequence[Any],
        joining: tuple[int, int] | None = None,
        unused_seconds: float = 0.0,
    ) -> tuple[EmbeddedExecutor, ...]:
        """Start the executors that the settings describe. Return at once, before they are ready.

        Args:
            settings: number of executors, engine, device, memory and so on; `plugins` are names that executors can
                import.
            engines: engines of plugins (`ExecutorEngine`), of which `settings.engine` may name one.
            joining: number of the first executor, and count, if the executors join a session; otherwise None.
            unused_seconds: seconds without a session after which an executor ends; 0 for no limit.

        Raises:
            PluginError: no engine has the name that the settings give.
            StartupError: a process cannot be started. Executors that have already started are closed.
        """

    def begin_inline(self, settings: Settings, client: str) -> tuple[Connection, str]:
        """Start an executor as a thread of this process. Return a connection to it, and the ticket to present.

        Raises:
            StartupError: the device in the settings does not exist.
        """


def find_starter() -> ExecutorStarter:
    """Return the starter of the installed server package.

    Raises:
        StartupError: the system runs clients only, or the package is not installed, or cannot be imported. The message says what to do.
    """
    check_platform()
    if _is_installed():
        return _load()
    raise StartupError(
        "this program has no server, and the package djinn-server, which runs programs on this machine, is not installed. "
        f"{INSTALL_SERVER} Or name a server: djinn.configure(servers=[...])"
    )


def check_starter() -> None:
    """Raise `StartupError` if a server package is installed and cannot start executors."""
    if _is_installed():
        _load()


def _is_installed() -> bool:
    return find_spec(STARTER.partition(".")[0]) is not None


def _load() -> ExecutorStarter:
    try:
        return cast("ExecutorStarter", importlib.import_module(STARTER))
    except DjinnError:
        raise
    except Exception as error:
        raise StartupError(
            "the package djinn-server, which runs programs on this machine, cannot be imported "
            f"({type(error).__name__}: {error}): install it again, or uninstall it and name a server. {INSTALL_SERVER}"
        ) from error


def check_platform() -> None:
    """Raise `StartupError` on a platform that supports clients only."""
    if CLIENT_ONLY:
        raise StartupError(
            "Windows supports clients only, no executors or servers: name a server (`djinn login`, or the "
            "setting `servers`), or run this in WSL, which is Linux (`wsl --install`; docs/versions.md)"
        )
