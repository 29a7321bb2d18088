"""Random generators of the remote device.

C++ holds their states, which are values on the executor and come from `device/random_state.py`.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME, device_state
from djinn_client.interception.device.indexes import existing_index, index_of
from djinn_client.interception.native.library import ops
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device
from djinn_client.torch_dispatch import CGenerator


def default(index: int) -> torch.Generator:
    """Return the default generator of an index."""
    generator: torch.Generator = ops.default_generator(index)
    return generator


def operand(generator: torch.Generator) -> LazyTensor | None:
    """Return the value that holds a generator's state. Return None for the session's own state on the executor.

    Raises:
        RuntimeError: the generator belongs to another device.
    """
    value: LazyTensor | None = ops.generator_value(generator)
    return value


def _reduce(generator: Any) -> Any:
    """Pickle a generator as PyTorch does, but without an offset: the executor's generator may have no offset."""
    if generator.device.type != DEVICE_NAME:
        return generator.__reduce__()
    return torch.Generator, (generator.device,), (generator.initial_seed(), None, generator.get_state())


class _GeneratorMeta(type(CGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, CGenerator)


class Generator(CGenerator, metaclass=_GeneratorMeta):
    """A generator that shows its device under another name. It replaces `torch.Generator` when the device is renamed."""

    __module__ = "torch"

    def __new__(cls, device: Any = None) -> Any:
        """Create a generator. Unlike PyTorch's class, accept the device's other name."""
        requested = torch.device("cpu" if device is None else device)
        if not is_remote(requested):
            return CGenerator(requested)
        return super().__new__(cls, logical_device(existing_index(requested)))  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the logical device."""
        return CGenerator.device.__get__(self)


def register() -> None:
    """Register the pickling of generators."""
    copyreg.pickle(CGenerator, _reduce)


def default_generator(device: Any = None) -> torch.Generator:
    """Return the generator for the random state that ops use by default."""
    index = index_of(device)
    defaults = device_state.default_generators
    if index not in defaults:
        with device_state.seed_lock:
            if index not in defaults:
                generator = default(index)
                if index and device_state.seed is not None:
                    generator.manual_seed(device_state.seed)
                defaults[index] = generator
    return defaults[index]


def bound_state(index: int) -> LazyTensor:
    """Return the value that holds the random state of an index that is bound to one device."""
    state = operand(default_generator(index))
    assert isinstance(state, LazyTensor)
    return state
