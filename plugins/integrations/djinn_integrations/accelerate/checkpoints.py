"""Checkpoints of `Accelerator.save_state`: with the device's random state. At a server address, tensors stay there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn.hooks import rebind
from djinn_client.interception.tensors.lazy_tensor import is_remote
from djinn_integrations.random_state_files import loading_random_state, saving_random_state
from djinn_integrations.weights.server_files import address_in, loading_stays_on


def adapt_checkpointing(module: Any) -> None:
    """Adapt `accelerate.checkpointing`: save and load the remote random state, and keep tensors on the server."""
    for name, wrap in {
        "save_accelerator_state": saving_random_state,
        "load_accelerator_state": _loading,
    }.items():
        function = getattr(module, name)
        rebind(function, wrap(function, position=0), ("accelerate",))


def _loading(load: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return a wrapper of `load_accelerator_state` that keeps tensors of a server address on the remote device.

    Accelerate would load optimizers through the CPU. `position`: index of the argument with the folder.
    """
    plain = loading_random_state(load, position=position)

    @functools.wraps(load)
    def loaded(input_dir: Any, models: Sequence[torch.nn.Module], *args: Any, **options: Any) -> Any:
        devices = {parameter.device for model in models for parameter in model.parameters()}
        if address_in(input_dir) is None or len(devices) != 1 or not all(map(is_remote, devices)):
            return plain(input_dir, models, *args, **options)
        with loading_stays_on(*devices):
            return plain(input_dir, models, *args, **options)

    return loaded
