"""The command line and the environment of an executor process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from pathlib import Path

from djinn_core.errors import StartupError
from djinn_core.settings import PLUGIN_PREFIX

EXECUTOR_MODULE = "djinn_server.executor_process"


def executor_command(module: str, device: str, report: int, *, confined: bool = False) -> list[str]:
    """Return the command that runs `module` as an executor with reports on file descriptor `report`.

    `confined`: True if the executor gives up rights before it reads anything.

    A command of its own instead of `multiprocessing`: the user's script needs no main guard and is not imported again.
    `-P` keeps the working directory, which may hold a file named `random.py`, off the import path.

    Raises:
        StartupError: this interpreter does not know its own executable, as in some embedded interpreters.
    """
    if not sys.executable:
        raise StartupError(
            "cannot start an executor process: this Python does not know its own executable (`sys.executable` is "
            "empty). Start `djinn serve` by hand and pass its address: djinn.configure(servers=[...])"
        )
    command = [sys.executable, "-P", "-m", module, "--device", device, "--report-fd", str(report)]
    if confined:  # `-s`: the tenant can write to the folder of its user's packages, which are imported first
        command[1:1] = ["-s"]
        command.append("--confined")
    return command


def executor_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment with its import path, so that the executor imports the same code.

    The result omits the token, plugin settings and the variables in `without`. Executors need no token, and receive plugin
    settings in their configuration.
    """
    left_out = {"DJINN_TOKEN", *without}
    environment = {
        name: value for name, value in os.environ.items() if name not in left_out and not name.startswith(PLUGIN_PREFIX)
    }
    environment["PYTHONPATH"] = os.pathsep.join(_import_path())
    # Without this, MKL keeps buffers for each thread: several megabytes for each session.
    environment.setdefault("MKL_DISABLE_FAST_MM", "1")
    # Makes PyTorch's allocator request huge pages from 2 MiB on: page faults of small pages take longer than a copy of
    # the memory.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return environment


def _import_path() -> list[str]:
    """Return `sys.path` in its order, the working directory (`""`) last so that nothing in it shadows a module."""
    entries = [entry for entry in sys.path if entry]
    root = str(Path(__file__).resolve().parents[2])
    if root not in entries:
        entries.append(root)
    if "" in sys.path:
        entries.append(".")
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        here = Path.cwd()
        return [str(here / entry) for entry in entries if Path(entry).exists()]
    return [entry for entry in entries if Path(entry).is_absolute()]
