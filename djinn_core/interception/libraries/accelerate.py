"""Accelerate, and `transformers.Trainer` through it: which device they take, and how much memory it has.

Both ask for one kind of accelerator after another by name and end with the CPU. There they now find the remote device;
whoever has another accelerator, or wants the CPU (`Accelerator(cpu=True)`, `use_cpu=True`), gets what they had.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from djinn_core.interception.lazy_tensor import logical_device

_CPU = torch.device("cpu")


def adapt_state(module: ModuleType) -> None:
    """`accelerate.state`: `PartialState().device` where nobody asked for the CPU and there is no other accelerator."""
    chosen = module.PartialState.default_device.fget

    def default_device(state: Any) -> torch.device:
        device: torch.device = chosen(state)
        return logical_device(0) if device == _CPU else device

    module.PartialState.default_device = property(default_device)


def adapt_training_arguments(module: ModuleType) -> None:
    """`transformers.training_args`: the trainer takes the device that accelerate took."""
    name = "_setup_devices"
    chosen = getattr(module.TrainingArguments, name)

    def set_up(arguments: Any) -> torch.device:
        device: torch.device = chosen.func(arguments)
        state = arguments.distributed_state
        return state.device if device == _CPU and state is not None and not arguments.use_cpu else device

    kept = functools.cached_property(set_up)
    kept.__set_name__(module.TrainingArguments, name)
    setattr(module.TrainingArguments, name, kept)
