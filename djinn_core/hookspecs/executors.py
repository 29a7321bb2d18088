"""`djinn_register_executors`: where and how the processes of executors are started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import attrs
import msgspec

from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.quotas import Quota
from djinn_core.wire.executor_reports import Ready, Sessions

TICKET_SECONDS: Final = 60.0  # a client dials several addresses, each of which may time out


class Badge(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Identity of a client that a gateway lets in: its tenant, the id of its token, and the tenant's quota."""

    tenant: str = ""
    token: str = ""
    quota: Quota = Quota()


NO_TENANT: Final = Badge()  # in particular: the process that started the executor


class ExecutorOptions(Protocol):
    """Configuration of an executor, which an engine passes on."""

    @property
    def device(self) -> str:
        """Device that it is to compute on, such as `cuda:0`; empty: the best of the machine that it is started on."""

    @property
    def threads(self) -> int | None:
        """Torch threads; None: torch's default."""

    @property
    def recoverable(self) -> bool:
        """True if sessions are to outlive the executor, by journals."""

    def encode(self) -> bytes:
        """All of it as JSON, which an `ExecutorHolder` on another machine reads."""


@attrs.frozen
class LaunchWish:
    """Wish of a client or a gateway for one of the executors that it starts together.

    Attributes:
        number: number of the executor among those of its client or gateway, from 0; numbers of those that join a running session
            go on. count: how many are started together.
        group: name of these executors, unique among all that are started anywhere.
        address: address of the engine that starts them (setting `engine_address`); empty: the engine finds it.
        resources: resources of each executor by name, as the engine counts them, such as `{"GPU": 1.0}`.
        runtime_env: environment of their processes in the form of the engine: packages, variables.
        placement_group: reservation of the engine that they go into: an object of the engine or its name; None: none.
        notify: takes a line about what is waited for, to be shown to a person.
    """

    number: int = 0
    count: int = 1
    group: str = ""
    address: str = ""
    resources: Mapping[str, float] = attrs.field(factory=dict)
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict)
    placement_group: Any = None
    notify: Callable[[str], None] = attrs.field(default=lambda _: None, eq=False)


@runtime_checkable
class Launched(Protocol):
    """An executor that was started, and those that were started in its place. Methods may be called from several threads.

    It ends when it is closed, and when the process that launched it ends in any way. In a forked child it is inert.
    """

    @property
    def process_id(self) -> int:
        """Process id of the executor on its machine; 0 if it is not known yet."""

    @property
    def place(self) -> str:
        """Name of the machine, as the engine calls it; empty for this machine."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint (`sha256:...`) of the certificate that only this executor shows; empty if it has none of its own."""

    @property
    def tenant(self) -> str:
        """The tenant that it works for, by its latest ticket; empty if none has come."""

    @property
    def alive(self) -> bool:
        """False once the executor has ended; an engine that does not answer for a while is no end."""

    def wait_ready(self, timeout: float) -> Ready:
        """Wait until the executor listens; its addresses and its device. It is ended if it does not.

        `timeout`: seconds from when there is a place for it. An engine waits for the place itself as long as it is configured.

        Raises:
            StartupError: it did not start, or there was no place; the message says why, and what to do.
        """

    @property
    def ready(self) -> Ready:
        """The `Ready` report of the present process.

        Raises:
            StartupError: `wait_ready` has not succeeded.
        """

    def wait(self) -> int:
        """Wait until the executor has ended; its exit status, negative for a signal."""

    def ending(self) -> str:
        """Predicate of a sentence about how it ended, such as `was killed by SIGKILL`."""

    def issue_ticket(self, client: str = "", lifetime: float = TICKET_SECONDS, badge: Badge = NO_TENANT) -> str:
        """A ticket that lets one connection in, within `lifetime` seconds by the clock of the executor's machine.

        Raises:
            StartupError: the executor's machine does not answer.
        """

    def status(self, timeout: float = 5.0) -> Sessions:
        """Its sessions and its device's memory.

        Raises:
            StartupError: it has ended or does not answer within `timeout` seconds.
        """

    def full(self) -> str:
        """Reason why it refuses all clients for now, by its latest report; empty: it accepts them. Does not block."""

    def evict(self, tokens: tuple[str, ...]) -> None:
        """Have the sessions of tokens that are not good any more ended; returns at once."""

    def end(self, session: str, reason: str) -> None:
        """Have a session ended, if it is there; returns at once."""

    def drain(self, seconds: float) -> None:
        """Have it take no new sessions, and end when the last has ended or after `seconds`; returns at once."""

    def close(self, drain_seconds: float = 5.0) -> None:
        """End it: let its sessions end for at most `drain_seconds`, then end the process, and give back its place."""

    def again(self) -> Launched:
        """Another executor in the place of this one, which has ended; returns at once, as `ExecutorEngine.launch` does.

        It finds the journals of this one wherever the place has them. May be called again where it raised.

        Raises:
            StartupError: it cannot be started.
        """


@runtime_checkable
class NoticedLaunched(Protocol):
    """A `Launched` whose engine says beforehand that it takes a place away, as where it drains a node."""

    def notice(self) -> str:
        """Reason why the executor's place is going to be taken away; empty: it stays. Asked every few seconds."""


@runtime_checkable
class ExecutorEngine(Protocol):
    """Starts executors. `name` is what the setting `engine` names it by; `local` is taken."""

    name: str

    def launch(self, options: ExecutorOptions, wish: LaunchWish) -> Launched:
        """Start an executor and return at once; `Launched.wait_ready` waits for it.

        Called for each executor of a client, or of a gateway's pool, in the order of their numbers.

        Raises:
            StartupError: it cannot be started; the message says why, and what to do.
        """


@hookspec
def djinn_register_executors(settings: Any) -> Iterable[ExecutorEngine]:
    """Return the engines that this plugin offers.

    Called once in each client and gateway process. The setting `engine` names the one that is used; `local`, processes on this
    machine, is built in and used before plugins are loaded. An exception disables the plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
