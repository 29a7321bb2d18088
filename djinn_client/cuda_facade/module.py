"""`torch.cuda`: each of its public functions is the remote device's, or PyTorch's own over those, or refused.

PyTorch's own is kept where it is written with other public functions. A function of `torch.remote_accelerator` takes the
place of the one of the same name. What is left knows of a driver that is not there, and says so.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.cuda

from djinn_client.cuda_facade import nvtx
from djinn_client.cuda_facade.properties import get_device_properties
from djinn_client.interception.device.current_device import current_device, set_current_device
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_core.errors import UnsupportedOperation

# Written by PyTorch with other functions of `torch.cuda`, or without any.
KEPT = frozenset({
    "CudaError",
    "DeferredCudaCallError",
    "cudaStatus",
    "device",
    "device_of",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_gencode_flags",
    "is_tf32_supported",
    "max_memory_cached",
    "memory_cached",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
})  # fmt: skip

WHY = {
    "graph": "a CUDA graph would have to be captured on the executor. Run the code without it: Djinn sends a repeated "
    "program by its name only, which is what a graph is for",
    "memory": "the executor's allocator is not this process's to steer",
    "driver": "there is no driver on this machine to ask; `djinn status` shows what the server knows",
    "": "it has no counterpart on a remote device",
}
REFUSED_BECAUSE = {
    "CUDAGraph": "graph",
    "graph": "graph",
    "graph_pool_handle": "graph",
    "CUDAPluggableAllocator": "memory",
    "GreenContext": "driver",
    "ExternalStream": "driver",
    "MemPool": "memory",
    "caching_allocator_disabled": "memory",
    "get_stream_from_external": "driver",
    "host_memory_stats": "memory",
    "host_memory_stats_as_nested_dict": "memory",
    "memory_stats_as_nested_dict": "memory",
    "reset_accumulated_host_memory_stats": "memory",
    "reset_peak_host_memory_stats": "memory",
    "caching_allocator_alloc": "memory",
    "caching_allocator_delete": "memory",
    "change_current_allocator": "memory",
    "memory_snapshot": "memory",
    "use_mem_pool": "memory",
    "clock_rate": "driver",
    "current_blas_handle": "driver",
    "current_solver_handle": "driver",
    "device_memory_used": "driver",
    "list_gpu_processes": "driver",
    "memory_usage": "driver",
    "power_draw": "driver",
    "temperature": "driver",
    "utilization": "driver",
}  # fmt: skip


def nothing(*_: Any, **__: Any) -> None:
    """There is nothing to do."""


def no(*_: Any, **__: Any) -> bool:
    """It is not so on a remote device."""
    return False


def yes(*_: Any, **__: Any) -> bool:
    """It is so on a remote device."""
    return True


def one() -> int:
    """`torch.cuda.device_count`: all executors as one device, so that no script divides its work over indexes of a pool."""
    return 1


def call_now(callable: Callable[[], Any], **_: Any) -> None:  # noqa: A002 - PyTorch names it so
    """`torch.cuda._lazy_call`: the device needs no initialisation that a call could wait for."""
    callable()


def exchange_device(index: int) -> int:
    """`torch.cuda._exchange_device`: make `index` the current one unless it is negative; the one before."""
    return set_current_device(index) if index >= 0 else -1


def make_graphed_callables(callables: Any, *_: Any, **__: Any) -> Any:
    """The callables as they are: what they do is recorded and sent by its name anyway."""
    return callables


def set_sync_debug_mode(mode: int | str) -> None:
    """Only the default, in which nothing is told about sync points.

    Raises:
        UnsupportedOperation: another mode.
    """
    if mode not in {0, "default"}:
        raise UnsupportedOperation("torch.cuda.set_sync_debug_mode: djinn.stats()['round_trips'] counts sync points")


def memory_fraction(*_: Any) -> float:
    """`torch.cuda.get_per_process_memory_fraction`: nothing is set aside."""
    return 1.0


class CudartModule:
    """`torch.cuda.cudart()`: profiling of a process that has no GPU can be started and stopped; the rest is refused."""

    class cudaError:  # noqa: N801 - NVIDIA's name
        """Codes of errors."""

        success = 0

    cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)  # noqa: N815 - NVIDIA's names

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperation(f"torch.cuda.cudart().{name}: {WHY['driver']}")


_runtime = CudartModule()

OWN: dict[str, Any] = {
    "caching_allocator_enable": nothing,
    "check_error": nothing,
    "cudart": lambda: _runtime,
    "device_count": one,
    "get_allocator_backend": lambda: "native",
    "get_device_properties": get_device_properties,
    "get_per_process_memory_fraction": memory_fraction,
    "get_sync_debug_mode": lambda: 0,
    "ipc_collect": nothing,
    "make_graphed_callables": make_graphed_callables,
    "set_per_process_memory_fraction": nothing,
    "set_sync_debug_mode": set_sync_debug_mode,
}
_INTERNAL: dict[str, Any] = {
    "_exchange_device": exchange_device,
    "_get_device": lambda device: torch.device("cuda", current_device()) if device is None else torch.device(device),
    "_initialized": True,
    "_lazy_call": call_now,
    "_lazy_init": nothing,
    "_maybe_exchange_device": exchange_device,
}
_OF_DEVICE = ("_is_in_bad_fork", "default_generators")


def replace() -> None:
    """Put the remote device's functions in the place of those of `torch.cuda`, wherever PyTorch keeps them."""
    remote = getattr(torch, DEVICE_NAME)
    for name in functions():
        if name not in KEPT:
            _put(name, OWN.get(name) or getattr(remote, name, None) or _refusal(name))
    for name, member in _INTERNAL.items():
        _put(name, member)
    for name in _OF_DEVICE:
        _put(name, getattr(remote, name))
    for name, member in nvtx.FUNCTIONS.items():
        setattr(torch.cuda.nvtx, name, member)


def functions() -> list[str]:
    """The public functions and classes of `torch.cuda`, without types of tensors and storages."""
    return [
        name
        for name in torch.cuda.__all__
        if callable(getattr(torch.cuda, name)) and not name.endswith(("Tensor", "Storage"))
    ]


def _put(name: str, member: Any) -> None:
    """Set `torch.cuda.<name>`, and the same name in the modules of `torch.cuda` that hold the same object."""
    before = getattr(torch.cuda, name, None)
    member = _of_its_own(name, member)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition("torch.cuda")[:2] == ("", "torch.cuda") and vars(module).get(name) is before:
            setattr(module, name, member)
    setattr(torch.cuda, name, member)


def _of_its_own(name: str, member: Any) -> Any:
    """A function that no other name shares: `torch.compile` tells functions apart by identity."""
    if not isinstance(member, FunctionType):
        return member
    copied = FunctionType(member.__code__, member.__globals__, name, member.__defaults__, member.__closure__)
    return functools.update_wrapper(copied, member, assigned=("__module__", "__doc__", "__kwdefaults__"))


def _refusal(name: str) -> Any:
    original = getattr(torch.cuda, name)
    message = f"torch.cuda.{name} under `djinn run`: {WHY[REFUSED_BECAUSE.get(name, '')]}"

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperation(message)

    if inspect.isclass(original):  # still a class, for those who ask `isinstance`
        return type(name, (), {"__init__": refuse, "__doc__": message})
    return functools.wraps(original)(refuse)
