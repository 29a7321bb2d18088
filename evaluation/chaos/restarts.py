"""A server that is killed and started again with the same arguments, and programs that compare all of their state by hashes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch
from configured import configured
from free_ports import free_port
from prepared_python import Forks, PreparedPython
from servers import Server, start_server

import djinn
from djinn.testing import open_connections
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers

REMOTE = "remote_accelerator:0"
GONE_SECONDS = 600.0  # on a busy machine
Program = Callable[[Callable[[int], object]], object]


@attrs.define
class RestartedServer:
    """`djinn serve` at a fixed port with a state folder of its own.

    Attributes:
        starts: how often it was started.
    """

    python: Forks
    folder: Path
    environment: dict[str, str]
    flags: Sequence[str] = ()
    port: int = attrs.field(factory=free_port)
    starts: int = 0
    server: Server | None = None
    _starting: threading.Thread | None = None

    @property
    def state(self) -> Path:
        """Its state folder."""
        return self.folder / "state"

    def start(self) -> Server:
        """Start it, and wait until clients can connect."""
        options = ["--port", str(self.port), "--without-transport", "http", "--threads", "1", "--drain-seconds", "0"]
        options += ["--state-dir", str(self.state), "--store", str(self.folder / "store"), *self.flags]
        self.server = start_server(self.python.start, self.folder, *options, env=self.environment)
        self.starts += 1
        return self.server

    def kill(self, *others: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the gateway and other processes at once, and wait for the end of the gateway."""
        assert self.server is not None
        for process in (self.server.process.pid, *others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        self.server.process.wait(GONE_SECONDS)

    def restart(self, *others: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the gateway and other processes, and begin to start it again in a thread; returns once it was killed."""
        self.join()
        self.kill(*others, number=number)
        self._starting = threading.Thread(target=self.start, daemon=True)
        self._starting.start()

    def join(self) -> None:
        """Wait until a restart has ended."""
        if self._starting is not None:
            self._starting.join()
            self._starting = None

    def stop(self) -> None:
        """Stop it."""
        self.join()
        if self.server is not None:
            self.server.stop()


@contextlib.contextmanager
def restartable(folder: Path, *flags: str, **settings: object) -> Iterator[RestartedServer]:
    """`remote_accelerator` is a server that can be restarted. `settings`: further settings of this program."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DJINN_CONFIG": os.devnull,
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    with contextlib.closing(PreparedPython(environment)) as python:
        server = RestartedServer(python, folder, environment, flags)
        started = server.start()
        try:
            known = {"servers": [started.url("tcp")], "token": started.token, "disable": ("local",)}
            with configured(**(known | settings)):
                djinn.init()
                yield server
        finally:
            server.stop()


def executors() -> list[int]:
    """The processes of the executors that this program uses, once they are ready."""
    while True:
        (status,) = ask_servers(client.settings()).values()
        if not isinstance(status, Exception):
            ready = [one.process for one in status.executors if one.state == "ready"]
            if len(ready) >= len(open_connections()):
                return ready
        time.sleep(0.05)


def resumed() -> int:
    """How often the session was continued over other connections; with several executors, the least of them."""
    return min(one.connection.resumed for one in open_connections())


def digest_of_state() -> str:
    """Return a hash of every tensor on the device that this program can reach, and of the random state there and here."""
    gc.collect()
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "remote_accelerator":
            here = one.detach().cpu().contiguous()
            about = f"{tuple(one.shape)} {one.stride()} {one.dtype} {one.requires_grad}"
            found.append(about.encode() + here.view(-1).view(torch.uint8).numpy().tobytes())
    digests = sorted(hashlib.sha256(data).digest() for data in found)
    states = [torch.get_rng_state(), torch.remote_accelerator.get_rng_state(0)]
    digests += [state.cpu().numpy().tobytes() for state in states]
    return f"{len(found)} tensors {hashlib.sha256(b''.join(digests)).hexdigest()}"


def train(at: Callable[[int], object]) -> str:
    """Train with dropout, AdamW and updates in place; `at` is called with the number of each step."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    given, wanted = torch.randn(32, 16).to(REMOTE), torch.randint(0, 4, (32,)).to(REMOTE)
    average = torch.zeros(4, 32, device=REMOTE)
    for step in range(12):
        at(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(given), wanted)
        loss.backward()
        optimizer.step()
        average.mul_(0.9).add_(model[3].weight.detach(), alpha=0.1)
        noise = torch.rand(8, device=REMOTE)
        average[0, :8] += noise
        if step % 3 == 0:
            loss.item()
    return digest_of_state()


def generate(at: Callable[[int], object]) -> str:
    """Sample tokens with a KV cache that grows by `cat`; `at` is called with the number of each token."""
    torch.manual_seed(6)
    embedding, out = (torch.randn(64, 32) * 0.5).to(REMOTE), torch.randn(32, 64).to(REMOTE)
    query, key, value = ((torch.randn(32, 32) * 0.3).to(REMOTE) for _ in range(3))
    keys, values = torch.zeros(0, 32, device=REMOTE), torch.zeros(0, 32, device=REMOTE)
    token, tokens = 1, []
    for number in range(16):
        at(number)
        x = embedding[token : token + 1]
        keys, values = torch.cat((keys, x @ key)), torch.cat((values, x @ value))
        x = x + torch.softmax(x @ query @ keys.T / 32**0.5, -1) @ values
        token = int(torch.multinomial(torch.softmax(x @ out, -1), 1).item())
        tokens.append(token)
    return f"{tokens} {digest_of_state()}"


def upload(at: Callable[[int], object]) -> str:
    """Upload tensors of 2 to 8 MiB, in frames of 4 MiB, and write to them; `at` is called with the number of each."""
    torch.manual_seed(7)
    held = []
    for number in range(4):
        source = torch.randint(0, 256, (2 << 20, 1 + number), dtype=torch.uint8)
        at(number)
        held.append(source.to(REMOTE))
        held[-1][number] += 1
        view = held[-1].view(-1)[:1000]
        view.mul_(3)
    return digest_of_state()


PROGRAMS: dict[str, Program] = {"train": train, "generate": generate, "upload": upload}


@attrs.define
class Tally:
    """Outcomes of restarts under programs: kills, runs whose state differed, runs that raised, and sessions that were resumed."""

    kills: int = 0
    different: int = 0
    raised: int = 0
    resumed: int = 0

    def __str__(self) -> str:
        return f"{self.kills} kills, {self.different} states differed, {self.raised} raised, {self.resumed} sessions resumed"


def _never(_: int) -> None:
    """Disturb nothing."""


def disturb(server: RestartedServer, name: str, kills: int, chance: random.Random, *, both: bool) -> Tally:
    """Run a program so many times. At a random moment of each run, kill the gateway, or (`both`) the gateway and the executor."""
    program, tally = PROGRAMS[name], Tally()
    program(_never)
    started = time.monotonic()
    expected = program(_never)
    usual = time.monotonic() - started
    for _ in range(kills):
        server.join()
        others, before = executors() if both else (), resumed()
        timer = threading.Timer(chance.uniform(0.0, usual), server.restart, others)
        timer.start()
        try:
            tally.different += program(_never) != expected
        except Exception as error:
            tally.raised += 1
            traceback.print_exception(error)
            djinn.shut_down()
            djinn.init()
        timer.join()
        tally.kills += 1
        server.join()
        djinn.synchronize()
        tally.resumed += resumed() > before
    server.join()
    return tally
