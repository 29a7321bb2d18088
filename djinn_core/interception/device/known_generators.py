"""Registry of remote generators by C++ object, because PyTorch hands ops a new Python object for the C++ generator."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

from djinn_core.interception.tensors.lazy_tensor import LazyTensor, device_type
from djinn_core.torch_private import CGenerator, generator_key


class Known(Protocol):
    """A remote generator."""

    def operand(self) -> LazyTensor | None:
        """The value that holds its state; None for the state that ops use by default."""


known: WeakValueDictionary[int, Known] = WeakValueDictionary()


def operand_of(generator: CGenerator) -> LazyTensor | None:
    """The value that holds the state of a generator which an op was given; None for the state that ops use by default.

    Raises:
        RuntimeError: the generator is of another device, as for every accelerator.
    """
    found = known.get(generator_key(generator))
    if found is None:
        raise RuntimeError(
            f"Expected a '{device_type()}' device type for generator but found '{generator.device.type}'"
        )
    return found.operand()
