"""Remote fault injection: a test injects faults into an executor process, and reads its counters."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from djinn_core.system.tcp import unix_socket
from djinn_fakegpu import control

_SECONDS: Final = 60.0  # seconds in which a process must open the device


def listen(path: Path) -> None:
    """Answer calls at a socket until this process ends. The folder's permissions protect it."""
    path.unlink(missing_ok=True)  # left by an earlier process
    listener = unix_socket()
    listener.bind(str(path))
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), name="fakegpu-control", daemon=True).start()


def _allocated(device: int) -> int:
    return int(torch.accelerator.memory_allocated(torch.device("fakegpu", device)))


def _pending() -> int:
    return int(torch.ops.fakegpu.pending_faults())


_CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "allocated": _allocated,
    "configure": control.configure,
    "counters": control.counters,
    "failed_op": control.failed_op,
    "inject": control.inject,
    "pending": _pending,
    "process": os.getpid,
}


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as lines:
            line = lines.readline()
            if not line:
                continue
            name, positional, keywords = json.loads(line)
            try:
                answer = [True, _CALLS[name](*positional, **keywords)]
            except Exception as error:
                answer = [False, f"{type(error).__name__}: {error}"]
            lines.write(json.dumps(answer).encode() + b"\n")


@attrs.frozen
class RemoteControl:
    """Control of the process that currently has the device `index` open.

    Attributes:
        folder: the process's setting `plugins.fakegpu.control`.
    """

    folder: Path
    index: int = 0

    def inject(self, kind: control.FaultKind, op: str = "", *, after: int = 0, seconds: float = 0.0) -> None:
        """Inject a fault into the next op whose name contains `op`, or into a later op."""
        self._call("inject", kind, op, after=after, seconds=seconds)

    def configure(self, **figures: float) -> None:
        """Change the simulated hardware."""
        self._call("configure", **figures)

    def counters(self) -> dict[str, int]:
        """Return the counters since the start or the last reset. Sizes are in bytes."""
        return dict(self._call("counters"))

    def failed_op(self) -> str:
        """Return the op at which a sticky error occurred, or an empty text without an error."""
        return str(self._call("failed_op"))

    def process(self) -> int:
        """Return the id of the process."""
        return int(self._call("process"))

    def pending(self) -> int:
        """Return the number of injected faults that have not occurred yet."""
        return int(self._call("pending"))

    def allocated(self) -> int:
        """Return the bytes of device memory in use by the process."""
        return int(self._call("allocated", self.index))

    def _call(self, name: str, *positional: object, **keywords: object) -> Any:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                with unix_socket() as connection:
                    connection.connect(str(self.folder / f"{self.index}.sock"))
                    with connection.makefile("rwb") as lines:
                        lines.write(json.dumps([name, positional, keywords]).encode() + b"\n")
                        lines.flush()
                        line = lines.readline()
                    break
            except (FileNotFoundError, ConnectionError):  # the process is restarting
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        if not line:
            raise ConnectionError(f"the process of fakegpu:{self.index} ended")
        succeeded, result = json.loads(line)
        if not succeeded:
            raise RuntimeError(result)
        return result
