"""The C++ library, compiled against the installed PyTorch when it is first loaded."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from djinn.errors import StartupError
from djinn_server.system.native_library import NativeLibrary

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIBRARY: Final = NativeLibrary("the device fakegpu", Path(__file__).resolve().parent / "csrc", "-O1")
_lock = threading.Lock()
_loaded = False


def load(figures: Mapping[str, float] | None = None) -> None:
    """Register the device `fakegpu` with PyTorch, once.

    `figures` describe the hardware. Later calls can only change rates.

    Raises:
        StartupError: PrivateUse1 belongs to another device, or the library cannot be compiled on this machine.
    """
    global _loaded
    with _lock:
        if not _loaded:
            name = torch._C._get_privateuse1_backend_name()
            if name != "privateuseone":
                raise StartupError(
                    f"this process has the device {name!r}, and PyTorch allows only one such device: use fakegpu in an executor process"
                )
            torch.ops.load_library(str(build()))
        torch.ops.fakegpu.configure({name: float(value) for name, value in (figures or {}).items()})
        if not _loaded:
            torch._C._rename_privateuse1_backend("fakegpu")
            torch._register_device_module("fakegpu", _module())
        _loaded = True


def build() -> Path:
    """Return the path of the library. Compile it if necessary."""
    return _LIBRARY.build()


class _Properties(types.SimpleNamespace):
    """Replacement of the result of `torch.cuda.get_device_properties`."""


def _module() -> types.ModuleType:
    """Return the device module `torch.fakegpu`, with the functions that PyTorch expects of a device."""
    module: Any = types.ModuleType("torch.fakegpu")
    ops, accelerator = torch.ops.fakegpu, torch.accelerator

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return accelerator.current_device_index() if index is None else int(index)

    def generator(device: Any = "fakegpu") -> torch.Generator:
        return ops.default_generator(index_of(device))  # type: ignore[no-any-return]

    def manual_seed_all(seed: int) -> None:
        for index in module.default_generators:
            index.manual_seed(seed)

    def get_device_properties(device: Any = None) -> _Properties:
        total = accelerator.get_memory_info(index_of(device))[1]
        return _Properties(name="Fake GPU", total_memory=total, multi_processor_count=132, major=9, minor=0)

    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = ops.is_in_bad_fork
    module.device_count = ops.device_count
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.synchronize = accelerator.synchronize
    module.default_generators = tuple(ops.default_generator(index) for index in range(ops.device_count()))
    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.get_rng_state = lambda device="fakegpu": generator(device).get_state()
    module.set_rng_state = lambda state, device="fakegpu": generator(device).set_state(state)
    module.get_device_properties = get_device_properties
    module.reset_peak_memory_stats = accelerator.reset_peak_memory_stats
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module  # type: ignore[no-any-return]
