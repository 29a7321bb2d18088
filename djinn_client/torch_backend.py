"""Private functions of torch that a backend in C++ needs beside those in `torch_private.py`: registration, and questions about ops and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import torch
from torch.utils import backend_registration


def returns_list(op: str) -> bool:
    """True if an op, such as `aten::split.Tensor`, returns one list of tensors. False for a name that PyTorch does not know."""
    name, _, overload = op.partition(".")
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return False
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]"


def without_torch_dispatch() -> AbstractContextManager[Any]:
    """A block in which no `__torch_dispatch__` is called."""
    return torch._C._DisableTorchDispatch()


def boxed_function(namespace: str, name: str) -> Callable[..., Any]:
    """The op `namespace::name`, without the frames that PyTorch puts around it."""
    return getattr(getattr(torch.ops, namespace), name).default._op  # type: ignore[no-any-return]


def overloads_of(namespace: Any) -> Iterator[tuple[str, str, Any]]:
    """The ops of a namespace, such as `torch.ops.aten`: their names, overload names and overloads."""
    for name in dir(namespace):
        packet = getattr(namespace, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                yield name, "" if overload == "default" else overload, getattr(packet, overload)


def rename_backend(name: str) -> None:
    """Make `torch.device(name)` the device of a backend outside of PyTorch."""
    backend_registration.rename_privateuse1_backend(name)


def add_device_module(name: str, module: ModuleType) -> None:
    """Make `module` `torch.<name>`, and give tensors, modules and storages methods of that name."""
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(name, module)


def own_device_kind() -> int:
    """The number of the device type of a backend outside of PyTorch."""
    kinds: Any = torch._C._autograd.DeviceType
    return int(kinds.PrivateUse1)


def has_python_key(tensor: torch.Tensor) -> bool:
    """True if a `__torch_dispatch__` handles the ops of a tensor."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


is_transformed: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor
