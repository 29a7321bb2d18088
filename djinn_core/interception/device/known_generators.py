"""Registry of remote generators by C++ object, because PyTorch hands ops a new Python object for the C++ generator."""

from __future__ import annotations

from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.native import library as native
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, device_type
from djinn_core.torch_private import CGenerator, generator_key


def operand_of(generator: CGenerator) -> LazyTensor | None:
    """The value that holds the state of a generator which an op was given; None for the state that ops use by default.

    Raises:
        RuntimeError: the generator is of another device, as for every accelerator.
    """
    if native.ON:
        return native.ops.generator_value(generator)  # type: ignore[no-any-return]
    found = device_state.generators.get(generator_key(generator))
    if found is None:
        raise RuntimeError(
            f"Expected a '{device_type()}' device type for generator but found '{generator.device.type}'"
        )
    return found.operand()
