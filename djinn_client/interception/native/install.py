"""Register the C++ device with PyTorch."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from djinn_client.interception import sync
from djinn_client.interception.device import memory, random_state
from djinn_client.interception.device.device_state import DEVICE_NAME, device_state
from djinn_client.interception.device.numeric_settings import with_default_dtype
from djinn_client.interception.dispatch import forget_calls, record
from djinn_client.interception.interpreter_shutdown import block_unless_main
from djinn_client.interception.native import generators, storages, streams
from djinn_client.interception.native.library import CalledFromCpp, implement, load, ops, send_upcalls_to
from djinn_client.interception.ops.attention import attention, backward_on_cpu
from djinn_client.interception.recording import recorder as recorders
from djinn_client.interception.recording.append import question
from djinn_client.interception.shape_inference.scalar_ranges import infers_for_any_float
from djinn_client.interception.tap import taps
from djinn_client.interception.tensors.lazy_tensor import show_values
from djinn_client.torch_dispatch import add_device_module, never_compiled, overloads_of
from djinn_client.tracebacks import shorten

HANDLED, ANY_FLOAT = 1, 4  # op flags; `constant_folding` has those of folding
_HERE: Final = Path(__file__).resolve().parents[2]
# Folders whose frames are never the user's code.
_own_folders: Final = [
    f"{Path(torch.__file__).resolve().parent}/",
    *(f"{_HERE}/{name}" for name in ("interception/", "runtime/", "tracebacks.py")),
]


class Upcalls(CalledFromCpp):
    """Dispatch mode whose handler C++ calls for each op without a cached call."""

    _default_dtype = torch.get_default_dtype()

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if torch.get_default_dtype() is not self._default_dtype:
                self._default_dtype = torch.get_default_dtype()
                forget_calls()  # cache keys of C++ contain the default dtype
            number = id(func)
            handler = device_state.handlers.get(number)
            question.func = func if handler is None or number in device_state.repeated else None
            question.args = id(args)
            kwargs = kwargs or {}
            if handler is None:
                handler, kwargs = record, with_default_dtype(func, args, kwargs)
            if taps.at_shutdown:
                block_unless_main()
            if not taps.op:
                return handler(func, args, kwargs)
            begun = perf_counter()
            try:
                return handler(func, args, kwargs)
            finally:
                end = perf_counter()
                for notify in taps.op:
                    notify(func, begun, end)
        except BaseException as error:
            shorten(error)
            raise


def _set_flags() -> None:
    from djinn_client.interception.ops.constant_folding import FLAGS

    for name, overload, func in overloads_of(torch.ops.aten):
        number = id(func)
        flags = FLAGS.get(number, 0) | (ANY_FLOAT if infers_for_any_float(func) else 0)
        if number in device_state.handlers and number not in device_state.repeated:
            flags |= HANDLED
        if flags:
            ops.set_op(f"aten::{name}", overload, flags)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    return attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)


@functools.cache
def hide_frames_of(module: str) -> None:
    """Do not count frames in the folder of a module as the user's code."""
    _own_folders.append(f"{Path(str(sys.modules[module].__file__)).parent}/")
    ops.set_own_folders(_own_folders)


def install_device() -> None:
    """Register the device and its kernels with PyTorch."""
    recorders.register()
    memory.register()
    generators.register()
    random_state.register()
    streams.register()
    storages.register()
    implement(synchronize=sync.synchronize)
    implement(attention=_attention, attention_backward=backward_on_cpu)
    send_upcalls_to(Upcalls())  # type: ignore[no-untyped-call]
    ops.set_own_folders(_own_folders)
    _set_flags()
    taps.show_ops = ops.watch_all
    ops.install_device()
    ops.register_kernels()


def register_device_module(module: Any) -> None:
    """Load the library, and create `torch.remote_accelerator`."""
    load()
    show_values()
    add_device_module(DEVICE_NAME, module)
