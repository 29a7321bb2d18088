"""The default device of transformers' pipelines and trainers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from djinn_client.interception.tensors.lazy_tensor import is_remote, logical_device
from djinn_integrations import is_the_only_accelerator

_CPU = torch.device("cpu")


def adapt_pipeline(module: Any) -> None:
    """Adapt `transformers.pipelines.base`: `device=0`, or no argument `device`, selects the remote device, like a GPU."""
    initialize = module.Pipeline.__init__

    @functools.wraps(initialize)
    def make(self: Any, model: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        has_device_map = device is None and getattr(model, "hf_device_map", None) is not None
        if not has_device_map and device is None and is_remote(model.device):
            device = model.device
        elif (
            not has_device_map
            and (device is None or (isinstance(device, int) and device >= 0))
            and is_the_only_accelerator()
        ):
            device = logical_device(device or 0)
        initialize(self, model, *args, device=device, **kwargs)

    module.Pipeline.__init__ = make


def adapt_training_arguments(module: Any) -> None:
    """Adapt `transformers.training_args`: `Trainer` uses the device that Accelerate chooses, and accepts `bf16=True`."""
    name = "_setup_devices"
    device_property, computes_bfloat16 = getattr(module.TrainingArguments, name), module.is_torch_bf16_gpu_available

    def set_up(arguments: Any) -> torch.device:
        device: torch.device = device_property.func(arguments)
        state = arguments.distributed_state
        return state.device if device == _CPU and state is not None and not arguments.use_cpu else device

    cached = functools.cached_property(set_up)
    cached.__set_name__(module.TrainingArguments, name)
    setattr(module.TrainingArguments, name, cached)
    module.is_torch_bf16_gpu_available = lambda: computes_bfloat16() or is_the_only_accelerator()
