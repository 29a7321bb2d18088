"""Executors that are killed while they write files: checkpoints that they save, and idle sessions that they move to disk."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from configured import configured
from prepared_python import PreparedPython
from safetensors import safe_open
from servers import start_server

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_server.builtins.weights import UNFINISHED

REMOTE = "remote_accelerator:0"
TENSORS, LENGTH, STEPS = 16, 1 << 20, 3
GONE_SECONDS = 600.0
LEASE_SECONDS = 1200  # for which the client waits for the next executor, on a busy machine
WEIGHTS = "file:weights.safetensors"


@attrs.define
class FileKills:
    """Kills at random moments, and what lay on the disk after each.

    Attributes:
        folder: the server's, with what it saves and its journals.
        halfway: how many kills left a file that had been begun: they came in the middle of writing it.
        whole: checkpoints that were looked at and found whole. broken: those that were not, or had tensors of two steps.
        different: how many disturbed runs had another result. raised: and how many none.
    """

    folder: Path
    kills: int = 0
    halfway: int = 0
    whole: int = 0
    broken: list[str] = attrs.field(factory=list)
    different: int = 0
    raised: int = 0

    def figures(self) -> dict[str, int]:
        """All counts."""
        counts = {name: getattr(self, name) for name in ("kills", "halfway", "whole", "different", "raised")}
        return counts | {"broken": len(self.broken)}

    def __str__(self) -> str:
        found = f"{self.whole + len(self.broken)} checkpoints that were looked at"
        return (
            f"{self.kills} kills, {self.halfway} in the middle of a file, {self.different} results differed, {self.raised} raised, "
            f"{len(self.broken)} of {found} broken {self.broken[:3]}"
        )

    def kill(self, process: int) -> None:
        """Kill a process, and look at the files."""
        before = self._begun()
        os.kill(process, signal.SIGKILL)
        self.kills += 1
        self.halfway += bool(before & self._begun())
        self.look()

    def _begun(self) -> set[Path]:
        return {one for one in self.folder.rglob("*") if UNFINISHED in one.name or one.suffix == ".new"}

    def look(self) -> None:
        """Read all checkpoints as any program does, by safetensors; each has one step."""
        for file in sorted((self.folder / "saved").rglob("*.safetensors")):
            if UNFINISHED in file.name:
                continue
            wrong = problem_of(file)
            self.whole += not wrong
            self.broken += [f"{file.name}: {wrong}"] if wrong else []


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[None]:
    """`remote_accelerator` is at a server with this folder, whose executors begin quickly; it saves under `saved`."""
    (folder / "saved").mkdir()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DJINN_CONFIG": os.devnull,
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    options = ["--threads", "1", "--state-dir", str(folder / "state"), "--save-weights", str(folder / "saved"), *flags]
    options += ["--lease-seconds", str(LEASE_SECONDS)]
    with contextlib.closing(PreparedPython(environment)) as python:
        server = start_server(python.start, folder, *options, env=environment)
        try:
            with configured(connection_file=server.file), contextlib.chdir(folder):  # where pointer files lie
                yield
        finally:
            server.stop()


def disturb(
    program: Callable[[], object],
    kills: int,
    chance: random.Random,
    victims: Callable[[random.Random], list[int]],
    folder: Path,
) -> FileKills:
    """Run a program until a victim was killed so many times, once in each run."""
    tally = FileKills(folder)
    program()
    started = time.monotonic()
    expected = program()
    usual = time.monotonic() - started
    while tally.kills < kills:
        timer = threading.Timer(chance.uniform(0.0, usual), lambda: tally.kill(victims(chance)[0]))
        timer.start()
        try:
            tally.different += program() != expected
        except Exception as error:
            tally.raised += 1
            traceback.print_exception(error)
        timer.join()
    tally.look()
    return tally


def problem_of(file: Path) -> str:
    """The problem of a checkpoint whose tensors all have the number of one step; empty if there is none."""
    try:
        with file.open("rb") as opened:  # one version: it may be replaced at any time
            (length,) = struct.unpack("<Q", opened.read(8))
            ends = [one["data_offsets"][1] for name, one in json.loads(opened.read(length)).items() if name[0] != "_"]
            size = os.fstat(opened.fileno()).st_size
            link = f"/proc/self/fd/{opened.fileno()}"
            with safe_open(link, "pt") as found:
                steps = {float(end) for name in found.keys() for end in found.get_tensor(name).aminmax()}  # noqa: SIM118
    except Exception as error:  # whatever a reader of it raises
        return f"{type(error).__name__}: {error}"
    if size != 8 + length + max(ends):
        return f"{size} bytes, and {max(ends)} of tensors"
    return "" if len(steps) == 1 else f"tensors of the steps {sorted(steps)}"


class Numbered(torch.nn.Module):
    """A model whose parameters all have the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.zeros(LENGTH) for _ in range(TENSORS)])


def saving() -> list[float]:
    """Save a model and its state in each step in both ways; the sum that each file has at the end."""
    model = Numbered().to(REMOTE)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1)
        djinn.save_weights(model.state_dict(), "file:run/model.safetensors", {"step": str(step)})
        torch.save({"state": model.state_dict(), "step": step}, "file:run/state.pt")
    state = torch.load("file:run/state.pt", map_location=REMOTE)
    assert state["step"] == STEPS
    found = [sum(one.sum().item() for one in state["state"].values())]
    return [*found, sum(one.sum().item() for one in djinn.open_weights("file:run/model.safetensors").values())]


def moving() -> list[float]:
    """Change values in place, beside weights that are read, and wait each time until the idle session is on disk."""
    ones = {"weight": torch.ones(LENGTH).to(REMOTE)}
    djinn.save_weights(ones, WEIGHTS)
    held = torch.zeros(TENSORS * LENGTH).to(REMOTE)
    view, read = held[: LENGTH // 2], djinn.open_weights(WEIGHTS)["weight"]
    found = []
    for _ in range(2):
        held.add_(1)
        view.add_(1)
        found += [held.sum().item(), view.sum().item(), read.sum().item()]
        wait_until_gone()
    return found


def wait_until_gone() -> None:
    """Wait until no session has values on the device."""
    until = time.monotonic() + GONE_SECONDS
    while time.monotonic() < until:
        statuses = ask_servers(client.settings()).values()  # of each address, where one does not answer
        if (status := next((one for one in statuses if not isinstance(one, Exception)), None)) is not None:
            sessions = [one for executor in status.executors for one in executor.sessions]
            if all(
                one.disk and not one.memory for one in sessions
            ):  # none is there after a kill: the client waits here
                return
        time.sleep(0.02)
    raise TimeoutError("an idle session stays on its device")


PROGRAMS: Mapping[str, Callable[[], object]] = MappingProxyType({"save": saving, "move": moving})
