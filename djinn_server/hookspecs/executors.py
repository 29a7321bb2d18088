"""`djinn_register_executors`: start executor processes in other places, such as on a cluster."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec


class ExecutorOptions(abc.ABC):
    """Configuration of an executor. The core makes it, and an engine passes `encode()` on to the holder."""

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
        """True if sessions survive the executor's death, by journals."""

    @abc.abstractmethod
    def encode(self) -> bytes:
        """Return the configuration as JSON, which an `ExecutorHolder` on another machine reads."""


@attrs.frozen
class LaunchRequest:
    """Request of a client or a gateway for one of the executors that it starts together.

    Attributes:
        number: number of the executor among the executors of its client or gateway, from 0. Executors that join a running
            session continue the numbers.
        count: number of executors that are started together.
        group: name of these executors, unique among all that are started anywhere.
        address: address of the engine (setting `engine_address`); empty: the engine finds it.
        resources: resources of each executor by name, as the engine counts them, such as `{"GPU": 1.0}`.
        runtime_env: environment of their processes in the form of the engine: packages, variables.
        placement_group: reservation of the engine for the executors: an object of the engine or its name; None: none.
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
        """The argument `name` of `ExecutorHolder`: unique for this executor and kept by executors that replace it."""
        return f"{self.group}-{self.number}"


class LaunchedExecutor:
    """What an engine returns for an executor that it has started: an `ExecutorHandle`, or the result of `LocalEngine.launch`."""


class ExecutorHandle(LaunchedExecutor, abc.ABC):
    """Handle of an executor that an engine has started: it carries calls to the executor's holder.

    The holder (`djinn.hooks.ExecutorHolder`) is the parent process of the executor, on the executor's machine. The core
    does the rest over these calls: tickets, status, eviction, draining and recovery. Clients and gateways call the methods, from
    several threads. `wait_placed` comes first. `end` comes after `call("close", ...)`, or at once if the start failed.

    The holder and its executor must end when the process that holds this handle ends in any way, `kill -9` included.
    A `StartupError` tells the user why there is no executor. Any other exception is a bug of the plugin.
    """

    @abc.abstractmethod
    def wait_placed(self) -> None:
        """Wait until the holder runs, for as long as the engine needs to find a machine for it.

        Raises:
            StartupError: the engine found no machine, or the holder cannot run. The message says why, and what to do.
        """

    @abc.abstractmethod
    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Return the result of a method of the holder. Arguments and results are bytes, text, numbers and lists of these.

        Several calls run at a time: some take minutes. The holder answers after its executor has ended, too: `close` then removes
        the journals.

        Raises:
            StartupError: the method raised this error, the holder does not answer within `timeout` seconds, or it has ended.
        """

    @abc.abstractmethod
    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the holder without waiting. Do nothing if the holder has ended."""

    @abc.abstractmethod
    def wait(self) -> tuple[int, str]:
        """Wait until the executor or its holder has ended.

        Returns:
            The result of `ExecutorHolder.wait`: the exit status, and the predicate of a sentence such as `was killed by SIGKILL`. If
            the engine lost the holder: -9, and how.
        """

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True once `wait` would return at once. An engine that does not answer for a while is no end."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the holder, and return its resources to the engine. Do nothing if that was done before."""

    @abc.abstractmethod
    def restart(self) -> ExecutorHandle:
        """End the holder, and start another one with the same arguments. May be called after `end`. Return at once.

        The next executor finds the journals, so the holder runs on the same machine or shares its folder `base`.

        Raises:
            StartupError: the engine cannot be asked. The core may call this again.
        """

    def notice(self) -> str:
        """Return why the engine is going to end the executor, such as that it drains its node; empty: it is not.

        Called every two seconds; returns at once. The client then moves its session to another executor.
        """
        return ""


class ExecutorEngine(abc.ABC):
    """Start executors of a client or a gateway in another place or in another way than Djinn does.

    Attributes:
        name: name in the setting `engine` and in `djinn serve --engine`; `local`, processes on this machine, is taken.
    """

    name: str

    @abc.abstractmethod
    def launch(self, options: ExecutorOptions, request: LaunchRequest) -> LaunchedExecutor:
        """Start an executor and return at once; `ExecutorHandle.wait_placed` waits for it.

        Called for each executor of a client, or of a gateway's pool, in the order of their numbers.

        Raises:
            StartupError: it cannot be started. The message tells the user why, and what to do.
        """


@hookspec
def djinn_register_executors(settings: Any) -> Iterable[ExecutorEngine]:
    """Return the engines of this plugin.

    Called once in each client and gateway process. The setting `engine` chooses one engine; `local`, processes on this
    machine, is built in and used before plugins are loaded. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
