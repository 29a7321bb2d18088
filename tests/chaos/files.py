"""Executors that are killed while they write files: checkpoints that they save, and idle sessions that they move to disk."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from safetensors import safe_open

import djinn
from djinn_core.builtins.weights import UNFINISHED
from djinn_core.runtime import client
from djinn_core.runtime.connecting.status import ask_servers

REMOTE = "remote_accelerator:0"
TENSORS, LENGTH, STEPS = 16, 1 << 20, 4
GONE_SECONDS = 60.0


@attrs.define
class FileKills:
    """Kills at random moments, and what lay on the disk after each.

    Attributes:
        folder: the server's, with what it saves and its journals.
        halfway: how many kills left a file that had been begun: they came in the middle of writing it.
        broken: files under their names that were not whole, or had tensors of two steps.
    """

    folder: Path
    kills: int = 0
    halfway: int = 0
    broken: list[str] = attrs.field(factory=list)
    whole: int = 0

    def at(self, seconds: float, process: Callable[[], int]) -> threading.Timer:
        """Kill a process after so many seconds, and look at the files."""
        timer = threading.Timer(seconds, self._kill, (process,))
        timer.start()
        return timer

    def _kill(self, process: Callable[[], int]) -> None:
        number = process()
        before = self._begun()
        os.kill(number, signal.SIGKILL)
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


def moving(weights: str) -> list[float]:
    """Change values in place, beside weights that are read, and wait each time until the idle session is on disk."""
    held = torch.zeros(TENSORS * LENGTH).to(REMOTE)
    view, read = held[: LENGTH // 2], djinn.open_weights(weights)["weight"]
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
        (status,) = ask_servers(client.settings()).values()
        if not isinstance(status, Exception):
            sessions = [one for executor in status.executors for one in executor.sessions]
            if sessions and all(one.disk and not one.memory for one in sessions):
                return
        time.sleep(0.02)
    raise TimeoutError("an idle session stays on its device")
