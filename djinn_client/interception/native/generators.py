"""Random generators of the remote device: C++ keeps their states, which are values of the executor, and `device/random_state.py` makes these."""

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
    """The default generator of an index."""
    found: torch.Generator = ops.default_generator(index)
    return found


def operand(generator: torch.Generator) -> LazyTensor | None:
    """The value that holds the state of a generator; None for the state that the executor's session has.

    Raises:
        RuntimeError: the generator is of another device.
    """
    found: LazyTensor | None = ops.generator_value(generator)
    return found


def _reduce(generator: Any) -> Any:
    """As PyTorch pickles generators, but without an offset, which the executor's may not have."""
    if generator.device.type != DEVICE_NAME:
        return generator.__reduce__()
    return torch.Generator, (generator.device,), (generator.initial_seed(), None, generator.get_state())


class _GeneratorMeta(type(CGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, CGenerator)


class Generator(CGenerator, metaclass=_GeneratorMeta):
    """A generator whose device is shown under another name; this becomes `torch.Generator` where the device has one."""

    __module__ = "torch"

    def __new__(cls, device: Any = None) -> Any:
        """As for PyTorch's class, which takes only devices that PyTorch knows."""
        wanted = torch.device("cpu" if device is None else device)
        if not is_remote(wanted):
            return CGenerator(wanted)
        return super().__new__(cls, logical_device(existing_index(wanted)))  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return CGenerator.device.__get__(self)


def register() -> None:
    """Tell Python how to pickle generators."""
    copyreg.pickle(CGenerator, _reduce)


def default_generator(device: Any = None) -> torch.Generator:
    """The generator that stands for the random state that ops use when they are given none."""
    index = index_of(device)
    defaults = device_state.default_generators
    if index not in defaults:
        with device_state.seeding:
            if index not in defaults:
                made = default(index)
                if index and device_state.seed is not None:
                    made.manual_seed(device_state.seed)
                defaults[index] = made
    return defaults[index]


def bound_state(index: int) -> LazyTensor:
    """The value that holds the random state of an index that is bound to one device."""
    state = operand(default_generator(index))
    assert isinstance(state, LazyTensor)
    return state
