"""The remote device's random state in training checkpoints, as libraries store it for GPUs.

Without this state, dropout in a resumed run would differ from dropout in an uninterrupted run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from djinn_client.interception.device import random_state
from djinn_client.interception.runtime_interface import port

FILE = "rng_state_remote_accelerator.bin"
Step = Callable[..., Any]


def saving_random_state(function: Step, position: int) -> Step:
    """Return a wrapper of `function` that also saves the random state to the folder in its argument at `position`."""

    @functools.wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        folder = _folder(args, kwargs, position)
        if port.is_open() and folder is not None:
            (folder / FILE).write_bytes(random_state.get_state().numpy().tobytes())
        return result

    return save


def loading_random_state(function: Step, position: int) -> Step:
    """Return a wrapper of `function` that also loads the random state from the folder in its argument at `position`."""

    @functools.wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        folder = _folder(args, kwargs, position)
        if folder is not None and (folder / FILE).exists():
            state = bytearray((folder / FILE).read_bytes())
            random_state.set_state(torch.frombuffer(state, dtype=torch.uint8))
        return result

    return load


def _folder(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> Path | None:
    keywords = (kwargs[name] for name in ("input_dir", "output_dir", "checkpoint") if name in kwargs)
    folder = args[position] if len(args) > position else next(keywords, None)
    return None if folder is None else Path(folder)
