"""Settings of PyTorch that ops depend on: executors compute under them, too.

Settings by which kernels are chosen, such as deterministic algorithms and TF32, are sent. The client applies `torch.set_default_dtype` to ops,
because an executor keeps a default of its own: where an op needs floats, integers become floats of the default dtype first.
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
    """Note the settings of this process from now on. C++ looks at each op whether they have changed."""
    port.numeric_settings = _now()
    implement(settings_changed=_note_change)


def require_exact(exact: bool) -> None:
    """Note whether the following programs have to be rounded as if their session computed alone."""
    if port.numeric_settings.exact is not exact:
        port.numeric_settings = msgspec.structs.replace(port.numeric_settings, exact=exact)


def _now() -> NumericSettings:
    return NumericSettings(**torch_private.numeric_settings(), exact=port.numeric_settings.exact)


@torch_dispatch.without_modes  # torch.export changes settings in the middle of tracing
def _send_recorded() -> None:
    current().cut_all()


def _note_change() -> None:
    """Ops run under the settings of their time, so what was recorded before a change is sent first."""
    now = _now()
    if now == port.numeric_settings:
        return
    # What waits for a session to begin runs under the settings of then: changing them starts no server.
    if port.is_open() and any(recorder.unsent for recorder in recorders.all()):
        _send_recorded()
    port.numeric_settings = now


EXECUTORS_HAVE = torch.float32


def as_floats(func: Any, args: tuple[Any, ...], call: Call) -> tuple[Any, ...] | None:
    """The arguments with whole numbers converted to the default dtype; None if `func` does not depend on that."""
    default = torch.get_default_dtype()
    if default == EXECUTORS_HAVE or torch.Tag.pointwise not in func.tags:
        return None
    if any(m.dtype.is_floating_point or m.dtype.is_complex for m in call.operands):
        return None
    if not any(m is not None and m.dtype in {default, default.to_complex()} for m in call.results):
        return None
    return tuple(_converted(a, default) if index or "where" not in func.name() else a for index, a in enumerate(args))


def with_default_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a factory op with the dtype that it has by default here."""
    default = torch.get_default_dtype()
    if default == EXECUTORS_HAVE or kwargs.get("dtype") is not None or not _is_factory(func):
        return kwargs
    filling = args[1] if func is torch.ops.aten.full.default else 0.0
    return {**kwargs, "dtype": torch.tensor(filling, device="cpu").dtype}


@functools.cache
def _is_factory(func: Any) -> bool:
    """True if `func` makes a tensor of numbers alone, whose dtype depends on the default dtype."""
    arguments = {a.name: a for a in schema_of(func).arguments}
    if not {"dtype", "device"} <= set(arguments) or arguments["dtype"].default_value is not None:
        return False
    return not any("Tensor" in str(a.type) for a in arguments.values())


def _converted(argument: Any, dtype: torch.dtype) -> Any:
    return argument.to(dtype) if isinstance(argument, LazyTensor) else argument
