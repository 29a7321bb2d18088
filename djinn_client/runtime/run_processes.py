"""Processes of `djinn run`: its own, and those that the script starts with multiprocessing's `spawn` or `forkserver`.

multiprocessing sends a new interpreter what it needs before the script's own module and objects: one more entry there
installs the names as it is unpickled. A forked child has them anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

import attrs

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.lazy_tensor import device_type


def begin() -> None:
    """From now on, and in the processes that this one spawns, `cuda` is the remote device; once.

    Raises:
        StartupError: this version of PyTorch lacks what the facade replaces.
    """
    import djinn  # noqa: F401 - registers the remote device
    from djinn_client.cuda_facade.install import install  # here, because other programs need none of it

    if device_type() != DEVICE_NAME:
        return
    install()
    _call_in_new_processes(begin)


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
