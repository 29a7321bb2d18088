"""Remote tensors of classes that the user derived from `torch.Tensor`.

On other accelerators `tensor.as_subclass(Mine)` gives the same tensor another Python class. A remote tensor must stay a
`LazyTensor` to be recorded, so it gets a class that is both: the user's methods and `__torch_function__` come first, below
them the ops are recorded as ever.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from djinn_core import torch_objects, torch_private
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.dispatch import handles, record
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, wrap
from djinn_core.torch_objects import Conversion
from djinn_core.tracebacks import shorten_through

aten = torch.ops.aten


class _UserClassBase(LazyTensor):
    """Base below the user's class: PyTorch's own `__torch_function__`, which LazyTensor disables."""

    of_user: type[torch.Tensor]

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, t) for t in types):
            return NotImplemented
        try:
            with torch_private.no_torch_functions():
                out = func(*args, **(kwargs or {}))
        except BaseException as error:
            shorten_through(error)
            raise
        return torch_objects.convert_results(func, out, cls.of_user)


@functools.cache
def remote_class(cls: type[torch.Tensor]) -> type[LazyTensor]:
    """The class of remote tensors that are `cls` as well."""
    if issubclass(cls, LazyTensor):
        return cls
    if cls in {torch.Tensor, torch.nn.Parameter}:
        return LazyTensor
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "of_user": cls}
    for name in ("__deepcopy__", "__reduce_ex__"):
        if getattr(cls, name) in {getattr(torch.Tensor, name), getattr(torch.nn.Parameter, name)}:
            members[name] = getattr(LazyTensor, name)
    if hasattr(cls, "cls_to_become"):  # a lazy module's parameter, once its shape is known
        members["cls_to_become"] = LazyTensor
    made: type[LazyTensor] = types.new_class(
        cls.__name__, (cls, _UserClassBase), exec_body=lambda body: body.update(members)
    )
    return made


def class_of_user(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class that the user gave `tensor`, without what makes it remote."""
    cls: type[torch.Tensor] = getattr(type(tensor), "of_user", type(tensor))
    return torch.Tensor if cls is LazyTensor else cls


def as_subclass(tensor: LazyTensor, cls: type[torch.Tensor]) -> LazyTensor:
    """The same memory and history, as a tensor of class `cls`."""
    thread = device_state.thread
    outer, thread.subclass = thread.subclass, remote_class(cls)
    try:
        with torch_private.no_torch_functions():
            made: LazyTensor = aten.alias.default(tensor)
    finally:
        thread.subclass = outer
    if issubclass(cls, torch.nn.Parameter):
        vars(made)["_is_param"] = True
    return made


@handles(aten.alias.default)
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another tensor over the same memory, of the class that `as_subclass` wants."""
    made = record(func, args, kwargs)
    wanted = device_state.thread.subclass
    return made if wanted is None else wrap(made.remote, wanted)


def as_subclass_of_any(plain: Conversion) -> Conversion:
    """`torch.Tensor.as_subclass`, for remote tensors as well."""

    @functools.wraps(plain)
    def convert(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
        return as_subclass(tensor, cls) if isinstance(tensor, LazyTensor) else plain(tensor, cls)

    return convert


def new_of_any(plain: Conversion) -> Conversion:
    """`torch.Tensor.__new__`, for remote tensors as well: `Mine(tensor)` is `tensor.as_subclass(Mine)`."""

    @functools.wraps(plain)
    def new(cls: type[torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        if len(args) == 1 and isinstance(args[0], LazyTensor) and not options:
            return as_subclass(args[0], cls)
        return plain(cls, *args, **options)

    return new


def make_subclass(plain: Conversion) -> Conversion:
    """`torch.Tensor._make_subclass`, for remote tensors as well: a tensor of that class without history."""

    @functools.wraps(plain)
    def make(cls: type[torch.Tensor], data: torch.Tensor, require_grad: bool = False, **options: Any) -> torch.Tensor:
        if isinstance(data, LazyTensor):
            made = as_subclass(data.detach(), cls)  # type: ignore[arg-type]
            with torch_private.no_torch_functions():
                return made.requires_grad_(require_grad)
        return plain(cls, data, require_grad, **options)

    return make


def register() -> None:
    """Have PyTorch make remote tensors of the user's classes."""
    torch_objects.wrap_make_subclass(make_subclass)
    torch_objects.wrap_conversions(as_subclass_of_any, new_of_any)
