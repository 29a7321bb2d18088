"""Make `cuda` the name of the remote device, in the process of `djinn run` and in processes that the script spawns.

Before the script's objects, multiprocessing sends preparation data to a spawned interpreter. This module adds an entry to
the data that installs the names when it is unpickled. A forked child inherits the names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

import attrs
import torch

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.install import rename_to_cuda
from djinn_client.interception.tensors.lazy_tensor import device_type
from djinn_commands.run import cuda_module, cuda_subsystems, cuda_tensors
from djinn_core.errors import DjinnError, StartupError


def install() -> None:
    """Make `cuda` the remote device in this process.

    Raises:
        StartupError: this version of PyTorch lacks a function that must be replaced.
    """
    try:
        _replace()
    except DjinnError:
        raise
    except Exception as error:
        raise StartupError(
            f"`djinn run` cannot make `cuda` the remote device with PyTorch {torch.__version__} ({type(error).__name__}: {error}): install a "
            "version that docs/versions.md lists"
        ) from error


def _replace() -> None:
    rename_to_cuda()
    cuda_tensors.replace()
    cuda_module.replace()
    cuda_subsystems.replace()


def install_in_processes() -> None:
    """Make `cuda` the remote device in this process and in the processes that it spawns. A second call does nothing.

    Raises:
        StartupError: this version of PyTorch lacks a function that must be replaced.
    """
    import djinn  # noqa: F401 - registers the remote device

    if device_type() != DEVICE_NAME:
        return
    install()
    _call_in_new_processes(install_in_processes)


@attrs.frozen
class _CalledOnArrival:
    """An object whose unpickling calls a function."""

    function: Callable[[], None]

    def __reduce__(self) -> Any:
        return self.function, ()


def _call_in_new_processes(function: Callable[[], None]) -> None:
    """Make spawned processes call `function` before they load the script. `function` is a module-level function."""
    prepare = spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_names(name: str) -> dict[str, Any]:
        return {**prepare(name), "djinn": _CalledOnArrival(function)}

    spawn.get_preparation_data = with_names
