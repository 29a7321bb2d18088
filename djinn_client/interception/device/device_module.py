"""`torch.remote_accelerator`: the device module, with the functions that PyTorch expects of every accelerator."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

import torch

from djinn_client.interception import sync
from djinn_client.interception.device import memory, random_state
from djinn_client.interception.device.device_state import DEVICE_NAME, device_state
from djinn_client.interception.device.indexes import current_device, index_of, set_current_device
from djinn_client.interception.native import streams
from djinn_client.interception.native.generators import default_generator
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.tracebacks import for_users


class device:  # noqa: N801 - PyTorch calls it so
    """Context manager that changes the current index. None or a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self.index = current_device() if unchanged else index_of(device)
        self.previous_index = 0

    def __enter__(self) -> None:
        self.previous_index = set_current_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_current_device(self.previous_index)


class device_of(device):  # noqa: N801 - PyTorch calls it so
    """Context manager that makes a tensor's index the current index. A tensor that is not remote changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if isinstance(obj, LazyTensor) else None)


def default_generators() -> tuple[torch.Generator, ...]:
    """Return the default generators of all indexes."""
    return tuple(default_generator(i) for i in range(device_count()))


def manual_seed(seed: int) -> None:
    """Seed the random state of the current index. The call is recorded like an op."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random state of every index with `seed`."""
    device_state.seed = seed
    if port.forked:  # as on CUDA: this process cannot use the device, and workers seed all devices
        return
    for generator in default_generators():
        generator.manual_seed(seed)


def seed() -> None:
    """Seed the random state of the current index with a random number."""
    default_generator().seed()


def seed_all() -> None:
    """Seed the random state of every index with the same random number."""
    manual_seed_all(default_generator().seed())


def initial_seed() -> int:
    """Return the seed that the random state of the current index started from."""
    return default_generator().initial_seed()


# Modules of PyTorch that call `get_rng_state` and restore the state without reading it: `fork_rng` and activation
# checkpointing.
_RESTORING_MODULES: Final = frozenset({"torch.random", "torch.utils.checkpoint"})


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the random state as a CPU tensor of bytes: one round trip.

    If PyTorch itself calls, the state stays on the executor.
    """
    if not _is_called_to_restore():
        return default_generator(device).get_state()
    if port.forked:  # the random state belongs to the parent
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return random_state.copy_state_of(default_generator(device))


def _is_called_to_restore() -> bool:
    """Return True if the first frame outside of Djinn is in a module of PyTorch that restores the state without reading it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("djinn_client.", "djinn_core.")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in _RESTORING_MODULES


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the random states of all indexes: one round trip each."""
    return [generator.get_state() for generator in default_generators()]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the random state of an index to `new_state`."""
    if port.forked and not new_state.numel():
        return
    generator = default_generator(device)
    if isinstance(new_state, LazyTensor):
        random_state.restore_state(generator, new_state)
    else:
        generator.set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the random state of each index to the state at its position."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def synchronize(device: Any = None) -> None:
    """Wait until all recorded ops have run."""
    index_of(device)
    sync.synchronize()


def set_device(device: Any) -> None:
    """Make an index current on this thread. A negative index changes nothing."""
    if not (isinstance(device, int) and device < 0):
        set_current_device(index_of(device))


def device_count() -> int:
    """Return the number of device indexes."""
    return port.device_count()


def init() -> None:
    """Begin the session now instead of at the first use."""
    port.sink.open()


def is_in_bad_fork() -> bool:
    """Return True if this process was forked from a process that used the device."""
    return port.forked


def is_available() -> bool:
    """Return True if the device can be used: the configured server admits this client, or a local executor can start.

    If the device cannot be used, a warning says why. Takes a few seconds at most; does not raise.
    """
    return not port.forked and port.is_available()


def is_initialized() -> bool:
    """Return True unless this is a forked child that cannot use the device. The device needs no initialization."""
    return not port.forked


def yes(*_: Any, **__: Any) -> bool:
    """Return True. The device module answers several questions of PyTorch with this function."""
    return True


def no(*_: Any, **__: Any) -> bool:
    """Return False. The device module answers several questions of PyTorch with this function."""
    return False


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing. The device module implements several functions of accelerators with this function."""


class DeviceModule(ModuleType):
    """The class of the module `torch.remote_accelerator`."""

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """Return the default generators of all indexes."""
        return default_generators()

    @property
    def _initialized(self) -> bool:
        """Return True if the device counts as initialized.

        Activation checkpointing asks before it saves the random state.
        """
        return not port.forked


_MEMBERS: tuple[Any, ...] = (
    device,
    device_of,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    initial_seed,
    get_rng_state,
    get_rng_state_all,
    set_rng_state,
    set_rng_state_all,
    synchronize,
    set_device,
    device_count,
    current_device,
    init,
    is_available,
    is_initialized,
    memory.memory_allocated,
    memory.max_memory_allocated,
    memory.memory_reserved,
    memory.max_memory_reserved,
    memory.reset_peak_memory_stats,
    memory.reset_accumulated_memory_stats,
    memory.mem_get_info,
    memory.memory_stats,
    memory.memory_summary,
    memory.empty_cache,
    memory.get_device_properties,
    memory.get_device_name,
    memory.get_device_capability,
    streams.current_stream,
    streams.default_stream,
    streams.set_stream,
)
_NAMED: dict[str, Any] = {
    "LazyTensor": LazyTensor,
    "Stream": torch.Stream,
    "Event": streams.NativeEvent,
    "stream": streams.NativeStreamContext,
    "StreamContext": streams.NativeStreamContext,
    "is_built": yes,
    "is_bf16_supported": yes,
    "is_current_stream_capturing": no,
    "can_device_access_peer": no,
    "_is_in_bad_fork": is_in_bad_fork,
    "_lazy_init": nothing,
    "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
}


def make_module() -> ModuleType:
    """Return the module that becomes `torch.remote_accelerator`."""
    module = DeviceModule(f"torch.{DEVICE_NAME}", "The remote accelerator as a PyTorch device module.")
    for name, member in {member.__name__: member for member in _MEMBERS}.items():
        setattr(module, name, member if isinstance(member, type) else for_users(member))
    for name, member in _NAMED.items():
        setattr(module, name, member)
    return module
