"""Servers and executors for test programs, and functions that kill them at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from configured import configured
from free_ports import free_port

import djinn
from djinn.testing import executor_processes, open_connections
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from evaluation.served import SECONDS, Server, served, start_server

TOKEN = "the same for all of these servers, and long enough for it"
EXCHANGING = {
    "placement_policy": "round_robin",
    "disable": ("local", "recomputation"),
}  # settings under which nearly every value is transferred


def kill(processes: Iterable[int]) -> None:
    """Kill processes with SIGKILL."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def using(**settings: object) -> Iterator[None]:
    """Use these settings for `remote_accelerator`."""
    with configured(threads=1, **settings):
        djinn.init()
        yield


@contextlib.contextmanager
def one_server(folder: Path, *options: str, device: str = "cpu", **settings: object) -> Iterator[Server]:
    """Use a server whose state, weight store and sockets of `fakegpu` are in `folder`."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "DJINN_PLUGIN_FAKEGPU_CONTROL": str(folder)}
    state_options = ("--state-dir", str(folder / "state"), "--store", str(folder / "store"))
    with served(*state_options, *options, folder=folder, device=device, environment=environment) as server:
        arguments = {"servers": [server.tcp], "token": server.token, "disable": ("local",)}
        with using(**(arguments | settings)):
            yield server


@contextlib.contextmanager
def two_devices(folder: Path) -> Iterator[None]:
    """Use two executors of one server, which exchange values."""
    with one_server(folder, "--device", "all", **EXCHANGING):
        yield


@contextlib.contextmanager
def two_servers(folder: Path) -> Iterator[None]:
    """Use executors of two servers, which exchange values."""
    with contextlib.ExitStack() as stack:
        urls = []
        for place in (folder / "first", folder / "second"):
            state_options = ("--state-dir", str(place / "state"), "--store", str(place / "store"))
            urls.append(
                stack.enter_context(served(*state_options, folder=place, environment={"DJINN_TOKEN": TOKEN})).tcp
            )
        stack.enter_context(using(servers=urls, token=TOKEN, **EXCHANGING))
        yield


def executors() -> list[int]:
    """Return the process ids of this program's executors, once they are ready."""
    while True:
        results = [status for status in ask_servers(client.settings()).values() if not isinstance(status, Exception)]
        ready = {executor.process for status in results for executor in status.executors if executor.state == "ready"}
        if len(ready) >= len(open_connections()):
            return sorted(ready)
        time.sleep(0.05)


def any_of(processes: Sequence[int], chance: random.Random) -> list[int]:
    """Return a random choice: one of the processes, or all of them."""
    return chance.choice([*([process] for process in processes), [*processes]])


def an_executor(chance: random.Random) -> Callable[[], object]:
    """Return a function that kills one random executor of the servers in use, or all of them."""
    choice = any_of(executors(), chance)
    return lambda: kill(choice)


def an_executor_of_its_own(chance: random.Random) -> Callable[[], object]:
    """Return a function that kills one random executor that this program started, or all of them."""
    choice = any_of(executor_processes(), chance)
    return lambda: kill(choice)


@attrs.define
class RestartedServer:
    """`djinn serve` at a fixed port that can be killed and restarted with the same arguments.

    Attributes:
        options: further options of `djinn serve`.
        environment: its environment variables.
        starter: function that starts a process, as the argument `start` of `served.start_server`.
        prefix: command prefix of the server.
        starts: number of starts so far.
    """

    folder: Path
    options: Sequence[str] = ()
    environment: dict[str, str] = attrs.field(factory=dict)
    starter: Callable[..., Any] | None = None
    prefix: Sequence[str] = ()
    port: int = attrs.field(factory=free_port)
    starts: int = 0
    server: Server | None = None
    _starting: threading.Thread | None = None

    @property
    def state(self) -> Path:
        """Return the server's state folder."""
        return self.folder / "state"

    def start(self) -> Server:
        """Start the server, and wait until clients can connect."""
        options = ["--port", str(self.port), "--without-transport", "http", "--drain-seconds", "0"]
        options += ["--state-dir", str(self.state), "--store", str(self.folder / "store"), *self.options]
        environment = {"XDG_CACHE_HOME": str(self.folder / "cache")} | self.environment
        self.server = start_server(
            self.folder, *options, environment=environment, start=self.starter, prefix=self.prefix
        )
        self.starts += 1
        return self.server

    def kill(self, *others: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal `number` to the gateway and to the processes `others`. Wait for the end of the gateway."""
        assert self.server is not None
        for process in (self.server.process.pid, *others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        self.server.process.wait(SECONDS)

    def restart(self, *others: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the gateway and the processes `others`, then restart the server in a thread. Return after the kill."""
        self.join()
        self.kill(*others, number=number)
        self._starting = threading.Thread(target=self.start, daemon=True)
        self._starting.start()

    def join(self) -> None:
        """Wait until a restart has finished."""
        if self._starting is not None:
            self._starting.join()
            self._starting = None

    def stop(self) -> None:
        """Stop the server."""
        self.join()
        if self.server is not None:
            self.server.stop()

    def gateway(self, _: random.Random) -> Callable[[], object]:
        """Return a function that kills and restarts the gateway."""
        self.join()
        return self.restart

    def gateway_and_executors(self, _: random.Random) -> Callable[[], object]:
        """Return a function that kills the gateway and all executors, and restarts the gateway."""
        self.join()
        others = executors()
        return lambda: self.restart(*others)


@contextlib.contextmanager
def restartable(folder: Path, *options: str, **settings: object) -> Iterator[RestartedServer]:
    """Use a server with `options` that can be restarted. `settings`: further settings of this program."""
    # On a busy machine, a server takes minutes to start.
    server = RestartedServer(folder, ("--lease-seconds", "600", *options))
    running = server.start()
    try:
        arguments = {"servers": [running.tcp], "token": running.token, "disable": ("local",)}
        with using(**(arguments | settings)):
            yield server
    finally:
        server.stop()


@attrs.define
class Pair:
    """Two servers without persistent state, by URL. One server has the session, and the other stands by."""

    servers: dict[str, RestartedServer]

    def the_one_in_use(self, _: random.Random) -> Callable[[], object]:
        """Return a function that kills the server with the session, and its executor, while both servers run."""
        for server in self.servers.values():
            assert server.server is not None
            if server.server.process.poll() is not None:
                server.start()
        (only,) = open_connections()
        active = self.servers[only.connection.server]
        return lambda: active.kill(only.process)


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Use a server, and another server as its standby."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in ("first", "second"):
            server = RestartedServer(folder / name, ("--store-gib", "0"), {"DJINN_TOKEN": TOKEN})
            stack.callback(server.stop)
            servers[server.start().tcp] = server
        first, second = servers
        options = {"servers": [first], "standby": [second], "standby_seconds": 1, "token": TOKEN, "disable": ("local",)}
        stack.enter_context(using(**options))
        yield Pair(servers)


@attrs.define
class Tally:
    """Outcomes of disturbed runs of a program.

    Attributes:
        kills: number of runs, each with one kill.
        different: runs whose result differs from that of an undisturbed run. raised: runs that raised an exception.
        resumed: runs in which the session with every executor resumed over a new connection.
        recovery: seconds that each run took longer than an undisturbed run.
    """

    kills: int = 0
    different: int = 0
    raised: int = 0
    resumed: int = 0
    recovery: list[float] = attrs.field(factory=list)

    def figures(self) -> dict[str, float]:
        """Return all counts, and the median recovery time."""
        counts = {name: float(getattr(self, name)) for name in ("kills", "different", "raised", "resumed")}
        return counts | {"recovery_s": round(statistics.median(self.recovery), 2)}

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.different} results differed, {self.raised} raised, {self.resumed} resumed, "
            f"{statistics.median(self.recovery):.1f} s longer than undisturbed (at most {max(self.recovery):.1f})"
        )


def resume_count() -> int:
    """Return how often the session resumed over new connections. With several executors, return the minimum.

    Connections with a standby server do not count resumptions, and give 0.
    """
    return min((getattr(connection.connection, "resumed", 0) for connection in open_connections()), default=0)


def disturb(
    program: Callable[[], object],
    kills: int,
    chance: random.Random,
    choose: Callable[[random.Random], Callable[[], object]],
) -> Tally:
    """Run a program `kills` times, and return the outcomes.

    At a random moment of each run, call the function that `choose` returned before the run.
    """
    program()  # sends its templates again, so that the next run takes the usual time
    start = time.monotonic()
    expected = program()
    usual = time.monotonic() - start
    tally = Tally()
    for _ in range(kills):
        strike, before = choose(chance), resume_count()
        timer = threading.Timer(chance.uniform(0.0, usual), strike)
        start = time.monotonic()
        timer.start()
        try:
            tally.different += program() != expected
        except Exception as error:
            tally.raised += 1
            traceback.print_exception(error)
            djinn.shut_down()
            djinn.init()
        tally.recovery.append(time.monotonic() - start - usual)
        timer.join()
        tally.kills += 1
        djinn.synchronize()
        tally.resumed += resume_count() > before
    return tally
