"""Makes `cuda` the name of the remote device in processes of `djinn run`: its own, and those that the script spawns.

multiprocessing sends a new interpreter what it needs before the script's own module and objects: one more entry there
installs the names as it is unpickled. A forked child has them anyway.
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
        StartupError: this version of PyTorch lacks what the facade replaces.
    """
    try:
        _replace()
    except DjinnError:
        raise
    except Exception as error:
        raise StartupError(
            f"`djinn run` cannot make `cuda` the remote device with PyTorch {torch.__version__}: {type(error).__name__}: {error}. "
            "docs/versions.md lists the versions that are supported"
        ) from error


def _replace() -> None:
    rename_to_cuda()
    cuda_tensors.replace()
    cuda_module.replace()
    cuda_subsystems.replace()


def install_in_processes() -> None:
    """From now on, and in the processes that this one spawns, `cuda` is the remote device; once.

    Raises:
        StartupError: this version of PyTorch lacks what the facade replaces.
    """
    import djinn  # noqa: F401 - registers the remote device

    if device_type() != DEVICE_NAME:
        return
    install()
    _call_in_new_processes(install_in_processes)


@attrs.frozen
class _CalledOnArrival:
    """Calls a function in the process that unpickles it."""

    function: Callable[[], None]

    def __reduce__(self) -> Any:
        return self.function, ()


def _call_in_new_processes(function: Callable[[], None]) -> None:
    """From now on new processes call `function`, which is a module's own, before they do anything else."""
    prepare = spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_names(name: str) -> dict[str, Any]:
        return {**prepare(name), "djinn": _CalledOnArrival(function)}

    spawn.get_preparation_data = with_names
