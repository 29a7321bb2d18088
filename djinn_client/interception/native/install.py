"""Registers the device in C++ with PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from djinn_client import torch_objects
from djinn_client.interception import sync
from djinn_client.interception.device.device_state import DEVICE_NAME, device_state
from djinn_client.interception.dispatch import forget_calls
from djinn_client.interception.native import device, generators, storages, streams
from djinn_client.interception.native.library import CalledFromCpp, implement, load, ops, send_upcalls_to
from djinn_client.interception.ops.attention import attention, backward_on_cpu
from djinn_client.interception.ops.default_dtype import with_default_dtype
from djinn_client.interception.recording import recorder as recorders
from djinn_client.interception.recording.append import asked
from djinn_client.interception.recording.module_calls import report_node
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.float_arg_cache import infers_for_any_float
from djinn_client.interception.tensors.lazy_tensor import is_remote_tensor, show_values
from djinn_client.torch_backend import add_device_module, overloads_of
from djinn_client.torch_dispatch import never_compiled
from djinn_client.tracebacks import for_users, shorten

HANDLED, FOLDS, ANY_FLOAT, FOLDS_INTEGERS, FOLDS_ANY = 1, 2, 4, 16, 32  # flags of ops
_HERE: Final = Path(__file__).resolve().parents[2]

# Ops that Python handles where the client knows the contents of an operand.
_folds: set[int] = set()
# Ops whose handlers only record them.
_recorded: set[int] = set()


class Upcalls(CalledFromCpp):
    """The mode that C++ calls with each op that it does not know."""

    _default_dtype = torch.get_default_dtype()

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if torch.get_default_dtype() is not self._default_dtype:
                self._default_dtype = torch.get_default_dtype()
                forget_calls()  # C++ has the default dtype in its keys
            number = id(func)
            handler = device_state.handlers.get(number)
            asked.func = func if handler is None or number in _folds or number in _recorded else None
            asked.args = id(args)
            kwargs = kwargs or {}
            if handler is None:
                handler, kwargs = port.record, with_default_dtype(func, args, kwargs)
            around = port.around
            return handler(func, args, kwargs) if around is None else around(handler, func, args, kwargs)
        except BaseException as error:
            shorten(error)
            raise


def _folding_flag(func: Any, handler: Any) -> int:
    from djinn_client.interception.ops import constant_folding

    if handler is constant_folding.fold_index:
        return FOLDS_ANY
    return FOLDS if constant_folding.of_any_dtype(func) else FOLDS_INTEGERS


def _set_flags() -> None:
    from djinn_client.interception.ops import attention, composite, constant_folding, factories

    factories.handle_factories()

    folding = {
        constant_folding.fold,
        constant_folding.fold_index,
        constant_folding.fold_in_place,
        constant_folding.find_nonzero,
        constant_folding.fold_copy,
    }
    recorded = {attention.whole}
    evaluated = {id(func) for func in composite.IN_EVALUATION}
    for name, overload, func in overloads_of(torch.ops.aten):
        handler = device_state.handlers.get(id(func))
        flags = ANY_FLOAT if infers_for_any_float(func) else 0
        if handler in folding:
            flags |= _folding_flag(func, handler)
            _folds.add(id(func))
        elif handler in recorded or id(func) in evaluated or name in {"empty", "empty_strided"}:
            _recorded.add(id(func))
        elif handler is not None:
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


def own_folders() -> Sequence[str]:
    """Folders whose frames are no lines of the user's."""
    torch_folder = Path(torch.__file__).resolve().parent
    return [f"{torch_folder}/", f"{_HERE}/interception/", f"{_HERE}/runtime/", f"{_HERE}/tracebacks.py"]


def install_device() -> None:
    """Make the device known to PyTorch, with its kernels."""
    recorders.register()
    device.register()
    generators.register()
    streams.register()
    storages.register()
    implement(synchronize=sync.synchronize, at_node=report_node)
    implement(attention=_attention, attention_backward=backward_on_cpu)
    send_upcalls_to(Upcalls())  # type: ignore[no-untyped-call]
    ops.set_own_folders(own_folders())
    _set_flags()
    torch_objects.wrap_element_printing(_printing_fetched)
    port.show_all_ops = ops.watch_all
    ops.install_device()
    ops.register_kernels()


def _printing_fetched(plain: Callable[..., str]) -> Callable[..., str]:
    @for_users
    @functools.wraps(plain)
    def elements(tensor: torch.Tensor, indent: int) -> str:
        if not is_remote_tensor(tensor):
            return plain(tensor, indent)
        words = sync.elements_in_words(tensor)
        return f"{words}, size={tuple(tensor.shape)}" if words == "..." else words

    return elements


def register_device_module(module: Any) -> None:
    """Load the library, and make `torch.remote_accelerator`."""
    load()
    show_values()
    add_device_module(DEVICE_NAME, module)
