"""The private torch functions that make tensors what Python programs expect of objects: classes, copies, storages, files.

The other private functions are in `torch_private`, and so is the list of all of them.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.graph
import torch.nn
import torch.overrides
import torch.utils.dlpack
from torch.multiprocessing.reductions import (
    StorageWeakRef as StorageWeakRef,  # noqa: PLC0414 - for others; tells of a storage's end, and keeps none
)

ToDlpack = Callable[[torch.Tensor], Any]
StorageConstructor = Callable[..., torch.UntypedStorage]
SwapTensors = Callable[[torch.Tensor, torch.Tensor], None]
Conversion = Callable[..., torch.Tensor]
SetDefault = Callable[..., None]


def rebuild_tensor(tensor: torch.Tensor, requires_grad: bool) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Pickle reduction of a tensor: a function that `torch.load(weights_only=True)` accepts, and its arguments."""
    if tensor.dtype in torch.storage._new_dtypes():  # saved as untyped storages, of PyTorch's own classes only
        arguments = (tensor.cpu(), tensor.dtype, str(tensor.device), requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments
    storage = torch.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return torch._utils._rebuild_tensor_v2, (storage, *layout, requires_grad, OrderedDict())


def rebuild_parameter(
    data: torch.Tensor, requires_grad: bool, state: dict[str, Any]
) -> tuple[Callable[..., torch.nn.Parameter], tuple[Any, ...]]:
    """Likewise for a parameter with the attributes `state`."""
    if not state:
        return torch._utils._rebuild_parameter, (data, requires_grad, OrderedDict())
    return torch._utils._rebuild_parameter_with_state, (data, requires_grad, OrderedDict(), state)


def rebuild_with_state(
    rebuild: Callable[..., torch.Tensor], cls: type[torch.Tensor], arguments: tuple[Any, ...], state: dict[str, Any]
) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Likewise for a tensor of class `cls` with the attributes `state`, which `rebuild` makes of `arguments`."""
    return torch._tensor._rebuild_from_type_v2, (rebuild, cls, arguments, state)


def wrap_storage_constructor(wrap: Callable[[StorageConstructor], StorageConstructor]) -> None:
    """Replace what `torch.UntypedStorage(...)` calls: for a device without an allocator it ends the process."""
    torch.UntypedStorage.__new__ = wrap(torch.UntypedStorage.__new__)  # type: ignore[method-assign,assignment]


def wrap_to_dlpack(wrap: Callable[[ToDlpack], ToDlpack]) -> None:
    """Replace `torch.to_dlpack` in both modules that hold it."""
    modules: tuple[Any, ...] = (torch, torch.utils.dlpack)
    for module in modules:
        module.to_dlpack = wrap(module.to_dlpack)


def wrap_memory_questions(**wraps: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace PyTorch's functions of these names, which tell of a tensor where its memory is, and whether lazy clones share it."""
    for name, wrap in wraps.items():
        setattr(torch._C, name, wrap(getattr(torch._C, name)))


def write_storage(storage: torch.UntypedStorage, *arguments: Any) -> None:
    """Write a CPU storage to a file as `torch.save` does in its old format."""
    storage._write_file(*arguments)


def read_storage(nbytes: int, *arguments: Any) -> torch.UntypedStorage:
    """A CPU storage of `nbytes` bytes, read as `torch.load` does in its old format."""
    storage = torch.UntypedStorage(nbytes)
    storage._set_from_file(*arguments)
    return storage


def wrap_set_default_dtype(wrap: Callable[[SetDefault], SetDefault]) -> None:
    """Replace what sets the default dtype, by either of PyTorch's functions."""
    core: Any = torch._C
    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        setattr(core, name, wrap(getattr(core, name)))


def held_by_script(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters that C++ holds for `module`, where it is a compiled script."""
    return dict(module._parameters.items()) if isinstance(module, torch.jit.ScriptModule) else {}


def hold_in_script(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter | None]) -> None:
    """Have C++ hold what these parameters have become."""
    for name, parameter in parameters.items():
        module._parameters[name] = parameter


def wrap_swap_tensors(wrap: Callable[[SwapTensors], SwapTensors]) -> None:
    """Replace `torch.utils.swap_tensors`, with which modules keep their parameters when these are converted."""
    torch.utils.swap_tensors = wrap(torch.utils.swap_tensors)


def convert_results(func: Any, out: Any, cls: type[torch.Tensor]) -> Any:
    """Result of `func` for tensors of class `cls`, as PyTorch wraps it, from its plain result `out`."""
    plain: Any = torch.overrides.get_default_nowrap_functions
    convert: Any = torch._tensor._convert
    return out if func in plain() else convert(out, cls)


def of_own_class(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one of PyTorch's own class, where the user's may say other things of it."""
    if type(tensor) is torch.Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def wrap_make_subclass(wrap: Callable[[Conversion], Conversion]) -> None:
    """Replace `torch.Tensor._make_subclass`, by which classes derived from `torch.Tensor` make their tensors."""
    wrapped: Any = staticmethod(wrap(torch.Tensor._make_subclass))
    torch.Tensor._make_subclass = wrapped  # type: ignore[method-assign]


def wrap_conversions(as_subclass: Callable[[Conversion], Conversion], new: Callable[[Conversion], Conversion]) -> None:
    """Replace `torch.Tensor.as_subclass` and `torch.Tensor.__new__`, which make a tensor one of a class derived from `torch.Tensor`."""
    tensor: Any = torch.Tensor
    tensor.as_subclass = as_subclass(tensor.as_subclass)
    tensor.__new__ = staticmethod(new(tensor.__new__))


def poison_gradient_node(tensor: torch.Tensor, refuse: Callable[[Any], Any]) -> None:
    """Have `refuse` called where a graph that was recorded already would accumulate a gradient into `tensor`."""
    if tensor.is_leaf and tensor.requires_grad and tensor._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(refuse)


def swap_contents(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what two tensors are below Python; the hooks for gradients stay with the objects."""
    hooks, accumulated = first._backward_hooks, first._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(first, second)
    first._backward_hooks = hooks
    first._post_accumulate_grad_hooks = accumulated


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Whatever is called before and after the forward pass of `module`, hooks for all modules included."""
    every = torch.nn.modules.module
    kept = (every._global_forward_hooks, every._global_forward_pre_hooks)
    return [hook for hooks in (*kept, module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()]


def writes_to(tensor: torch.Tensor) -> int:
    """Version counter of the tensor: PyTorch's writes to its memory; 0 if it does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def unseen_by_function_modes() -> AbstractContextManager[None]:
    """Blocks in which functions on tensors are called as they are, whatever modes are entered."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def number_of_storage(storage: torch.UntypedStorage) -> int:
    """Result of `torch_private.storage_key` for the tensors that look into it."""
    number: int = storage._cdata
    return number


def wrap_element_printing(wrap: Callable[[Callable[..., str]], Callable[..., str]]) -> None:
    """Replace the function that prints the elements of a tensor, given the tensor and its indent."""
    printing: Any = importlib.import_module("torch._tensor_str")
    printing._tensor_str = wrap(printing._tensor_str)
