"""Build the command line and the environment variables of an executor process."""

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
    """Return the command line that runs `module` as an executor.

    A new interpreter is started instead of `multiprocessing`, so the user's script needs no main guard and is not
    imported again. `-P` keeps the working directory off the import path, because it may hold a file such as `random.py`.

    Args:
        module: Python module that the process runs.
        device: device to compute on; empty: the best device.
        report: file descriptor for reports to the parent.
        confined: True if the executor drops privileges before it reads any input.

    Raises:
        StartupError: `sys.executable` is empty, as in some embedded interpreters.
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
    """Return the environment variables for an executor process: those of this process, with its import path.

    The import path lets the executor import the same code. The token, plugin settings and the variables in `without` are
    left out: executors need no token, and receive plugin settings in their configuration.
    """
    excluded = {"DJINN_TOKEN", *without}
    environment = {
        name: value for name, value in os.environ.items() if name not in excluded and not name.startswith(PLUGIN_PREFIX)
    }
    environment["PYTHONPATH"] = os.pathsep.join(_import_path())
    # Without this, MKL keeps buffers for each thread: several megabytes for each session.
    environment.setdefault("MKL_DISABLE_FAST_MM", "1")
    # Lets PyTorch's allocator request huge pages for 2 MiB and more. Page faults of small pages take longer than copying
    # the memory.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return environment


def _import_path() -> list[str]:
    """Return `sys.path` and Djinn's folder as absolute paths. The working directory is last, to shadow no module."""
    entries = [entry for entry in sys.path if entry]
    root = str(Path(__file__).resolve().parents[2])
    if root not in entries:
        entries.append(root)
    if "" in sys.path:
        entries.append(".")
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        working_directory = Path.cwd()
        return [str(working_directory / entry) for entry in entries if Path(entry).exists()]
    return [entry for entry in entries if Path(entry).is_absolute()]
