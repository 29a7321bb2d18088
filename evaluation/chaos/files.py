"""Kills of executors that write files: checkpoints, and values of idle sessions."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from safetensors import safe_open

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_server.builtins.weights import UNFINISHED
from evaluation.chaos.disturbing import executors, kill
from evaluation.chaos.programs import REMOTE

TENSORS, LENGTH, STEPS = 16, 1 << 20, 3
GONE_SECONDS = 600.0
WEIGHTS = "file:weights.safetensors"


@attrs.define
class FileKills:
    """Kills of the executor at random moments, with a check of the files on disk after each.

    Attributes:
        folder: the server's folder, with its journals and, under `saved`, its checkpoints.
        halfway: number of kills during the write of a file.
        whole: number of valid checkpoints.
        broken: problems of invalid checkpoints, and of checkpoints with tensors of two steps.
    """

    folder: Path
    halfway: int = 0
    whole: int = 0
    broken: list[str] = attrs.field(factory=list)

    def figures(self) -> dict[str, int]:
        """Return all counts."""
        return {"halfway": self.halfway, "whole": self.whole, "broken": len(self.broken)}

    def __str__(self) -> str:
        return f"{self.halfway} kills during a write, {self.whole} checkpoints whole, broken: {self.broken[:3]}"

    def executor(self, _: random.Random) -> Callable[[], object]:
        """Return a function that kills the executor and checks the files."""
        (process,) = executors()
        return lambda: self._kill(process)

    def _kill(self, process: int) -> None:
        before = self._unfinished_files()
        kill([process])
        self.halfway += bool(before & self._unfinished_files())
        self.check_files()

    def _unfinished_files(self) -> set[Path]:
        return {item for item in self.folder.rglob("*") if UNFINISHED in item.name or item.suffix == ".new"}

    def check_files(self) -> None:
        """Read all checkpoints with safetensors, and record checkpoints that do not have all tensors of one step."""
        for file in sorted((self.folder / "saved").rglob("*.safetensors")):
            if UNFINISHED in file.name:
                continue
            wrong = problem_of(file)
            self.whole += not wrong
            self.broken += [f"{file.name}: {wrong}"] if wrong else []


def problem_of(file: Path) -> str:
    """Return the problem of a checkpoint, or "" if all its tensors have the number of one step."""
    try:
        with file.open("rb") as stream:  # open once, because the file may be replaced at any time
            (length,) = struct.unpack("<Q", stream.read(8))
            ends = [one["data_offsets"][1] for name, one in json.loads(stream.read(length)).items() if name[0] != "_"]
            size = os.fstat(stream.fileno()).st_size
            link = f"/proc/self/fd/{stream.fileno()}"
            with safe_open(link, "pt") as checkpoint:
                steps = {float(end) for name in checkpoint.keys() for end in checkpoint.get_tensor(name).aminmax()}  # noqa: SIM118
    except Exception as error:  # a reader may raise anything
        return f"{type(error).__name__}: {error}"
    if size != 8 + length + max(ends):
        return f"{size} bytes, and {max(ends)} of tensors"
    return "" if len(steps) == 1 else f"tensors of the steps {sorted(steps)}"


class NumberedModel(torch.nn.Module):
    """A model whose parameters all equal the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.zeros(LENGTH) for _ in range(TENSORS)])


def saving() -> list[float]:
    """Save a model and its state in each step, by `safetensors` and by `torch.save`. Return the final sum of each file."""
    model = NumberedModel().to(REMOTE)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for item in model.parameters():
                item.add_(1)
        djinn.save_weights(model.state_dict(), "file:run/model.safetensors", {"step": str(step)})
        torch.save({"state": model.state_dict(), "step": step}, "file:run/state.pt")
    state = torch.load("file:run/state.pt", map_location=REMOTE)
    assert state["step"] == STEPS
    results = [sum(item.sum().item() for item in state["state"].values())]
    return [*results, sum(item.sum().item() for item in djinn.open_weights("file:run/model.safetensors").values())]


def moving() -> list[float]:
    """Change values in place, and wait after each change until the idle session is on disk. Return the values."""
    ones = {"weight": torch.ones(LENGTH).to(REMOTE)}
    djinn.save_weights(ones, WEIGHTS)
    references = torch.zeros(TENSORS * LENGTH).to(REMOTE)
    view, read = references[: LENGTH // 2], djinn.open_weights(WEIGHTS)["weight"]
    results = []
    for _ in range(2):
        references.add_(1)
        view.add_(1)
        results += [references.sum().item(), view.sum().item(), read.sum().item()]
        wait_until_gone()
    return results


def wait_until_gone() -> None:
    """Wait until the values of all sessions are on disk."""
    until = time.monotonic() + GONE_SECONDS
    while time.monotonic() < until:
        statuses = ask_servers(client.settings()).values()  # one for each address
        if (status := next((item for item in statuses if not isinstance(item, Exception)), None)) is not None:
            sessions = [item for executor in status.executors for item in executor.sessions]
            if all(item.disk and not item.memory for item in sessions):  # after a kill there is no executor, so wait
                return
        time.sleep(0.02)
    raise TimeoutError("an idle session was not moved to disk")


PROGRAMS: Mapping[str, Callable[[], object]] = MappingProxyType({"save": saving, "move": moving})
