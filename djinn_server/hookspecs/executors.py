"""`djinn_register_executors`: start executor processes elsewhere, such as on a cluster."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec


class ExecutorOptions(abc.ABC):
    """Configuration of an executor. Djinn creates it, and an engine passes the result of `encode` to the holder."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Device to compute on, such as `cuda:0`. Empty: the best device of the machine."""

    @property
    @abc.abstractmethod
    def threads(self) -> int | None:
        """Torch threads; None: torch's default."""

    @property
    @abc.abstractmethod
    def recoverable(self) -> bool:
        """True if journals let sessions survive the death of the executor."""

    @abc.abstractmethod
    def encode(self) -> bytes:
        """Encode the configuration as JSON, which an `ExecutorHolder` on another machine decodes."""


@attrs.frozen
class LaunchRequest:
    """Request for one executor, from a client or gateway to an engine.

    Attributes:
        number: number of the executor among those of its client or gateway, from 0. Executors that join a running
            session get the next numbers.
        count: number of executors that are started together.
        group: globally unique name of the executors that are started together.
        address: address of the engine's service (setting `engine_address`); empty: the engine finds its service.
        resources: resources of each executor by the engine's names, such as `{"GPU": 1.0}`.
        runtime_env: packages and variables of the processes, in the engine's format.
        placement_group: the engine's reservation for the executors, as its object or its name; None: no reservation.
        notify: shows a line to a person, such as the reason for a wait.
    """

    number: int = 0
    count: int = 1
    group: str = ""
    address: str = ""
    resources: Mapping[str, float] = attrs.field(factory=dict)
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict)
    placement_group: Any = None
    notify: Callable[[str], None] = attrs.field(default=lambda _: None, eq=False)

    @property
    def place(self) -> str:
        """Name of the executor's holder: the argument `name` of `ExecutorHolder`.

        It is unique for this executor. An executor that replaces this one has the same name.
        """
        return f"{self.group}-{self.number}"


class LaunchedExecutor:
    """A started executor: an `ExecutorHandle`, or the process that the engine `local` started."""


class ExecutorHandle(LaunchedExecutor, abc.ABC):
    """Handle of an executor that an engine has started. It carries calls to the executor's holder.

    The holder (`djinn.hooks.ExecutorHolder`) is the parent process of the executor, on the executor's machine. The core
    implements tickets, status, eviction, draining and recovery by these calls. Clients and gateways call the
    methods from several threads. `wait_placed` is called first. `end` is called after `call("close", ...)`, or at once
    if the start failed.

    The holder and its executor must end when the process with this handle ends, even by `kill -9`. A `StartupError`
    tells the user why there is no executor. Any other exception is a bug of the plugin.
    """

    @abc.abstractmethod
    def wait_placed(self) -> None:
        """Wait until the holder runs, for as long as the engine needs to find a machine for it.

        Raises:
            StartupError: the engine found no machine, or the holder cannot run. The message says why, and what to do.
        """

    @abc.abstractmethod
    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the holder and return its result. Arguments and results are bytes, strings, numbers and lists.

        Several calls may run at the same time, and some take minutes. The holder also answers after its executor has
        ended: `close` then removes the journals.

        Raises:
            StartupError: the method raised this error, or the holder has ended or does not answer within `timeout` seconds.
        """

    @abc.abstractmethod
    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the holder without waiting. Do nothing if the holder has ended."""

    @abc.abstractmethod
    def wait(self) -> tuple[int, str]:
        """Wait until the executor or its holder has ended. Return exit status and description.

        Returns:
            The result of `ExecutorHolder.wait`: the exit status, and the predicate of a sentence such as `was killed by
            SIGKILL`. If the engine lost the holder: -9 and a predicate with the reason.
        """

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True if `wait` would return at once. An engine that does not answer for a while has not ended."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the holder, and return its resources to the engine. Further calls do nothing."""

    @abc.abstractmethod
    def restart(self) -> ExecutorHandle:
        """End the holder, and return the handle of a new holder with the same arguments. May be called after `end`.

        The new holder must find the journals: run it on the same machine, or share its folder `base`.

        Raises:
            StartupError: the engine does not answer. Djinn may call this method again.
        """

    def notice(self) -> str:
        """Return the reason why the engine is about to end the executor, such as a drained node, or "" if it is not.

        Called every two seconds, so return at once. After a notice, the client moves its session to another executor.
        """
        return ""


class ExecutorEngine(abc.ABC):
    """Start executors of a client or a gateway elsewhere, such as on a cluster.

    Attributes:
        name: name in the setting `engine` and in `djinn serve --engine`. The name `local` is taken.
    """

    name: str

    @abc.abstractmethod
    def launch(self, options: ExecutorOptions, request: LaunchRequest) -> LaunchedExecutor:
        """Start an executor and return at once; `ExecutorHandle.wait_placed` waits for it.

        Called for each executor of a client or of a gateway's pool, in the order of the executors' numbers.

        Raises:
            StartupError: the executor cannot be started. The message tells the user the reason and a remedy.
        """


@hookspec
def djinn_register_executors(settings: Any) -> Iterable[ExecutorEngine]:
    """Return the engines of this plugin.

    Called once in each client and gateway process. The setting `engine` chooses one engine; `local`, processes on this
    machine, is built in and used before plugins are loaded. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
