"""Settings of PyTorch that affect results. Executors compute under the client's settings.

The client sends settings that select kernels, such as deterministic algorithms and TF32. It applies
`torch.set_default_dtype` itself, because an executor keeps its own default dtype. If an op needs floats, the client
converts integers to the default dtype first.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import torch

from djinn_client import torch_dispatch
from djinn_client.interception.native.library import implement
from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core import torch_private
from djinn_core.ir.program import Call
from djinn_core.torch_private import schema_of
from djinn_core.wire.numeric_messages import NumericSettings


def install() -> None:
    """Track the settings of this process from now on. C++ checks at each op whether they have changed."""
    port.numeric_settings = _current_settings()
    implement(settings_changed=_note_change)


def require_exact(exact: bool) -> None:
    """Set whether later programs must give the same bits as in a session that has the executor to itself."""
    if port.numeric_settings.exact is not exact:
        port.numeric_settings = msgspec.structs.replace(port.numeric_settings, exact=exact)


def _current_settings() -> NumericSettings:
    return NumericSettings(**torch_private.numeric_settings(), exact=port.numeric_settings.exact)


@torch_dispatch.without_modes  # torch.export changes settings during tracing
def _send_recorded() -> None:
    current().cut_all()


def _note_change() -> None:
    """Send the ops recorded before a change of the settings, because ops run under the settings at the time of their call."""
    settings = _current_settings()
    if settings == port.numeric_settings:
        return
    # Changing a setting starts no server. Ops that wait for a session to begin run under the settings at that time.
    if port.is_open() and any(recorder.unsent for recorder in recorders.all()):
        _send_recorded()
    port.numeric_settings = settings


EXECUTOR_DEFAULT_DTYPE = torch.float32


def as_floats(func: Any, args: tuple[Any, ...], call: Call) -> tuple[Any, ...] | None:
    """Return the arguments with integers converted to the default dtype.

    Return None if the executor's default dtype gives the same results.
    """
    default = torch.get_default_dtype()
    if default == EXECUTOR_DEFAULT_DTYPE or torch.Tag.pointwise not in func.tags:
        return None
    if any(m.dtype.is_floating_point or m.dtype.is_complex for m in call.operands):
        return None
    if not any(m is not None and m.dtype in {default, default.to_complex()} for m in call.results):
        return None
    return tuple(_converted(a, default) if index or "where" not in func.name() else a for index, a in enumerate(args))


def with_default_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a factory op's keyword arguments. Add the default dtype if they name no dtype."""
    default = torch.get_default_dtype()
    if default == EXECUTOR_DEFAULT_DTYPE or kwargs.get("dtype") is not None or not _is_factory(func):
        return kwargs
    filling = args[1] if func is torch.ops.aten.full.default else 0.0
    return {**kwargs, "dtype": torch.tensor(filling, device="cpu").dtype}


@functools.cache
def _is_factory(func: Any) -> bool:
    """Return True if `func` creates a tensor from numbers only, with a dtype that depends on the default dtype."""
    arguments = {a.name: a for a in schema_of(func).arguments}
    if not {"dtype", "device"} <= set(arguments) or arguments["dtype"].default_value is not None:
        return False
    return not any("Tensor" in str(a.type) for a in arguments.values())


def _converted(argument: Any, dtype: torch.dtype) -> Any:
    return argument.to(dtype) if isinstance(argument, LazyTensor) else argument
