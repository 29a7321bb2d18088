"""The functions of `torch.cuda`: replaced by functions of the remote device, kept, or refused.

A function with the name of a function of `torch.remote_accelerator` is replaced by it. PyTorch's own functions that
only use public functions are kept. Other functions would need a CUDA driver, and raise an error that says so.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NoReturn

import attrs
import torch
import torch.backends.cuda
import torch.backends.cudnn
import torch.cuda
import torch.utils.flop_counter  # import this before PyTorch seems to have CUDA, because it then warns that Triton is missing
from torch.profiler import record_function

from djinn_client.interception.device import memory
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.device.indexes import current_device, set_current_device
from djinn_core.errors import UnsupportedOperation

STAND_IN_VERSION = "12.8"  # for programs that parse the version; the executor's version is unknown
# PyTorch implements these by other functions of `torch.cuda`, or needs no device for them.
KEPT = frozenset(
    "CudaError DeferredCudaCallError cudaStatus device device_of get_arch_list get_device_capability get_device_name get_gencode_flags "
    "is_tf32_supported max_memory_cached memory_cached reset_max_memory_allocated reset_max_memory_cached".split()
)
_NO_DRIVER = "this machine has no CUDA driver. `djinn status` shows the server's devices and memory"
# Refused functions and classes by reason. Later versions of PyTorch may have more.
_REFUSED = {
    "CUDA graphs of remote programs cannot be captured. Run the code without the graph: Djinn sends a repeated program by its digest "
    "only, which saves the same launches": "CUDAGraph export_dot export_graph_data graph graph_pool_handle",
    "this process cannot control the executor's allocator. Remove the call": "CUDAPluggableAllocator MemPool caching_allocator_alloc "
    "caching_allocator_delete caching_allocator_disabled change_current_allocator host_memory_stats host_memory_stats_as_nested_dict "
    "memory_snapshot memory_stats_as_nested_dict reset_accumulated_host_memory_stats reset_peak_host_memory_stats use_mem_pool",
    _NO_DRIVER: "ExternalStream GreenContext clock_rate current_blas_handle current_solver_handle device_memory_used "
    "get_stream_from_external list_gpu_processes memory_usage power_draw temperature utilization",
}
REFUSED_BECAUSE = {name: reason for reason, names in _REFUSED.items() for name in names.split()}


class _OpenRanges(threading.local):
    def __init__(self) -> None:
        self.ranges: list[record_function] = []


_open = _OpenRanges()


def range_push(msg: str) -> int:
    """Begin a nested profiler range of this thread. Return its depth, 0 for the outermost."""
    begun = record_function(msg)
    begun.__enter__()
    _open.ranges.append(begun)
    return len(_open.ranges) - 1


def range_pop() -> int:
    """End the innermost range of this thread. Return the number of open ranges, or -2 if none was open, as NVTX does."""
    if not _open.ranges:
        return -2
    _open.ranges.pop().__exit__(None, None, None)
    return len(_open.ranges)


def range_start(msg: str) -> int:
    """Accept the begin of a range that another thread may end, without recording it. Return 0 as its id."""
    del msg
    return 0


def range_end(range_id: int) -> None:
    """Accept the end of a range from `range_start`, without recording it."""


def mark(msg: str) -> None:
    """Accept a marker, without recording it."""


@contextmanager
def nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Record the block as a profiler range. Works as context manager and decorator, as `torch.cuda.nvtx.range` does."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


_NVTX: dict[str, Any] = {
    **{function.__name__: function for function in (mark, range_end, range_pop, range_push, range_start)},
    "range": nvtx_range,
}


@attrs.frozen
class CudaProperties:
    """GPU properties that programs query, with the names of PyTorch's `_CudaDeviceProperties`. Sizes are in bytes.

    Unknown limits have the values of an A100. Other unknown numbers are 0. For a CPU, the compute capability is 8.0, the
    first with bfloat16 and TF32, because programs query it before they use these.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_multiprocessor: int = 167936
    L2_cache_size: int = 0
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""  # noqa: N815 - AMD's name
    uuid: str = ""


_CAPABILITY_OF_CPUS = (8, 0)


def get_device_properties(device: Any = None) -> CudaProperties:
    """Return the properties of a device. The first call connects to the executor.

    Raises:
        RuntimeError: the device does not exist.
    """
    properties = memory.get_device_properties(device)
    major, minor = (properties.major, properties.minor) if properties.major else _CAPABILITY_OF_CPUS
    return CudaProperties(
        properties.name, properties.total_memory, max(1, properties.multi_processor_count), major, minor
    )


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def no(*_: Any, **__: Any) -> bool:
    """Return False: the property does not hold on a remote device."""
    return False


def yes(*_: Any, **__: Any) -> bool:
    """Return True: the property holds on a remote device."""
    return True


def one() -> int:
    """Return 1, for `torch.cuda.device_count`. All executors are one device, so scripts do not distribute work themselves."""
    return 1


def call_now(callable: Callable[[], Any], **_: Any) -> None:  # noqa: A002 - PyTorch names it so
    """Call a function at once, for `torch.cuda._lazy_call`: the device needs no lazy initialisation."""
    callable()


def exchange_device(index: int) -> int:
    """Set the current device and return the previous one, for `torch.cuda._exchange_device`.

    If `index` is negative, change nothing and return -1.
    """
    return set_current_device(index) if index >= 0 else -1


def make_graphed_callables(callables: Any, *_: Any, **__: Any) -> Any:
    """Return the callables unchanged, because Djinn sends repeated programs by digest without a graph."""
    return callables


def set_sync_debug_mode(mode: int | str) -> None:
    """Accept the default mode, in which PyTorch does not report synchronizations.

    Raises:
        UnsupportedOperation: the mode is not the default mode.
    """
    if mode not in {0, "default"}:
        raise UnsupportedOperation(
            "torch.cuda.set_sync_debug_mode cannot report synchronizations of remote devices: read djinn.stats()['round_trips']"
        )


def memory_fraction(*_: Any) -> float:
    """Return 1, for `torch.cuda.get_per_process_memory_fraction`: a session may use the whole device memory."""
    return 1.0


class CudartModule:
    """Replacement of `torch.cuda.cudart()`. The start and stop of profiling do nothing, and all other functions raise an error."""

    class cudaError:  # noqa: N801 - NVIDIA's name
        """Error codes of `torch.cuda.cudart()`."""

        success = 0

    cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)  # noqa: N815 - NVIDIA's names

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperation(f"torch.cuda.cudart().{name}: {_NO_DRIVER}")


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
    """Replace the functions of `torch.cuda` by functions of the remote device, in all submodules of `torch.cuda`."""
    remote = getattr(torch, DEVICE_NAME)
    for name in functions():
        if name not in KEPT:
            _put(name, OWN.get(name) or getattr(remote, name, None) or _refusal(name))
    for name, member in _INTERNAL.items():
        _put(name, member)
    for name in _OF_DEVICE:
        _put(name, getattr(remote, name))
    for name, member in _NVTX.items():
        setattr(torch.cuda.nvtx, name, member)
    torch.backends.cuda.is_built = yes
    torch.backends.cudnn.is_acceptable = no
    torch.version.cuda = torch.version.cuda or STAND_IN_VERSION


def functions() -> list[str]:
    """Return the public functions and classes of `torch.cuda`, without tensor and storage types."""
    return [
        name
        for name in torch.cuda.__all__
        if callable(getattr(torch.cuda, name)) and not name.endswith(("Tensor", "Storage"))
    ]


def _put(name: str, member: Any) -> None:
    """Set `torch.cuda.<name>`, and `<name>` in the submodules of `torch.cuda` that import the replaced object."""
    before = getattr(torch.cuda, name, None)
    member = _of_its_own(name, member)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition("torch.cuda")[:2] == ("", "torch.cuda") and vars(module).get(name) is before:
            setattr(module, name, member)
    setattr(torch.cuda, name, member)


def _of_its_own(name: str, member: Any) -> Any:
    """Return a copy of a function, called `name`, because `torch.compile` distinguishes functions by identity.

    Return other members unchanged.
    """
    if not isinstance(member, FunctionType):
        return member
    copy = FunctionType(member.__code__, member.__globals__, name, member.__defaults__, member.__closure__)
    return functools.update_wrapper(copy, member, assigned=("__module__", "__doc__", "__kwdefaults__"))


def _refusal(name: str) -> Any:
    original = getattr(torch.cuda, name)
    message = f"`djinn run` does not support torch.cuda.{name}: {REFUSED_BECAUSE.get(name, 'remote devices have no equivalent')}"

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperation(message)

    if inspect.isclass(original):  # still a class, for `isinstance`
        return type(name, (), {"__init__": refuse, "__doc__": message})
    return functools.wraps(original)(refuse)
