"""Custom ops: recorded as single ops if the session's executors offer them, otherwise decomposed or refused.

The client looks ops up by the object that the program calls. It only compares the names that executors send.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.native.library import ops, set_kernel
from djinn_client.interception.runtime_interface import port
from djinn_client.torch_dispatch import cast_by_autocast, has_kernel
from djinn_core.errors import UnsupportedOperation, install_hint
from djinn_core.ir.operators import allow_custom
from djinn_core.torch_private import defining_module, overload_called, python_operator, schema_of

if TYPE_CHECKING:  # importing Djinn must not import pluggy
    from djinn_core.hookspecs.operators import CastPolicy, OperatorLibrary

_FOLDERS: Final = MappingProxyType({"torchvision": "torchvision"})  # folders in `plugins`, by op namespace
kept_whole: Final[set[str]] = set()  # names of ops with a recording kernel
_cast: Final[set[str]] = set()  # names of ops with an autocast kernel


def runs_whole(func: Any) -> bool:
    """Return True if the session's executors run a custom op. Without a session, a capture assumes that they do.

    Raises:
        UnsupportedOperation: the executors have the op with another schema.
    """
    name = func.name()
    theirs = port.offered.get(name)
    if theirs is None and (port.is_open() or port.fallback is not None):
        return False
    if theirs is not None and theirs != (ours := str(schema_of(func))):
        raise UnsupportedOperation(
            f"{name} cannot run on {DEVICE_NAME}: its schema here is `{ours}` and on the server `{theirs}`. Install the same version of the library "
            "on both sides"
        )
    _add_autocast(func)
    allow_custom({name: func})
    return True


def library_of(op: str) -> OperatorLibrary | None:
    """Return the operator library of the installed plugin that has an op, or None if no plugin has it."""
    return next((one for one in port.operators() if op in one.operators), None)


def metadata_of(func: Any) -> Callable[..., Any] | None:
    """Return the plugin's metadata function for a custom op, or None if the op's own meta kernel must be used."""
    library = library_of(func.name())
    return None if library is None else library.metadata(func.name())


def is_data_dependent(func: Any) -> bool:
    """Return True if a plugin says that the shapes of an op's results depend on data."""
    library = library_of(func.name())
    return library is not None and func.name() in library.data_dependent


def keep_offered_whole() -> None:
    """Register kernels for the ops that the executors offer, so that they are recorded as single ops.

    PyTorch would otherwise run the Python function of an op without a device (`torch.library.custom_op`) with remote
    tensors. The kernels are registered by name, so an op may be defined afterwards.
    """
    for name in port.offered:
        func = overload_called(name)
        if name not in kept_whole and (func is None or _is_decomposed(func)):
            packet, _, overload = name.partition(".")
            ops.keep_whole(packet, overload)
            kept_whole.add(name)
        if func is not None:
            _add_autocast(func)


def refusal(func: Any) -> str:
    """Return the error message for a custom op that the executors lack and that has no decomposition."""
    name, namespace = func.name(), str(func.namespace)
    begin = f"{name} cannot run on {DEVICE_NAME}: the server does not offer this custom op. "
    library = library_of(name)
    if library is not None:
        package = library.package or f"the plugin {library.name!r} and the module {library.module!r}"
        return f"{begin}Install {package} on the server, and allow the op: {_start_with(library.name)}"
    if namespace in _FOLDERS:
        folder = _FOLDERS[namespace]
        return (
            f"{begin}On the server, run {install_hint(f'plugins/{folder}')}. Then allow the op: {_start_with(folder)}"
        )
    definition = python_operator(func)
    if definition is None:
        return (
            f"{begin}No installed plugin of the kind `operators` has this op. `djinn plugins new NAME --kind operators` "
            "creates such a plugin"
        )
    module = defining_module(definition)
    if module == "__main__":
        return (
            f"{begin}Move its Python function to a module that the server can import, and allow the ops of that module: "
            f"{_start_with('module:NAME')}"
        )
    return f"{begin}Install the module {module!r} on the server, and allow its ops: {_start_with(f'module:{module}')}"


def _start_with(value: str) -> str:
    return (
        f"`djinn serve --operators {value}`, or djinn.configure(operators=[{value!r}]) for the executors of this program. "
        "Or let Djinn compute the op on this machine: djinn.configure(client_fallback=True)"
    )


def _is_decomposed(func: Any) -> bool:
    return has_kernel(func, "CompositeExplicitAutograd") and not has_kernel(func, "PrivateUse1")


def _add_autocast(func: Any) -> None:
    """Register an autocast kernel for an op on this device.

    The plugin of the op, or else the op's autocast kernels for other devices, define the casts.
    """
    name = func.name()
    if name in _cast or has_kernel(func, "AutocastPrivateUse1"):
        return
    policy = _cast_policy(func)
    if policy is None:
        return
    _cast.add(name)

    def cast(*args: Any, **kwargs: Any) -> Any:
        return cast_by_autocast(func, args, kwargs, DEVICE_NAME, policy.dtype, restores=policy.restores)

    set_kernel(name, cast, "AutocastPrivateUse1")


def _cast_policy(func: Any) -> CastPolicy | None:
    library = library_of(func.name())
    if library is not None and (policy := library.cast_policy(func.name())) is not None:
        return policy
    definition = python_operator(func)
    if definition is None:
        return None
    dtypes = definition._autocast_dtype
    from djinn_core.hookspecs.operators import CastPolicy

    dtype: torch.dtype | None = dtypes.get("cuda") or next(iter(dtypes.values()), None)
    return None if dtype is None else CastPolicy(dtype)
