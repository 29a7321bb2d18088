"""Recorded ops: their positions in the user's code, their memory, and equivalent ops on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn_client.interception.native.entries import site_of
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.module_calls import current_module
from djinn_client.interception.recording.recorder import SyncRequest, current
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.partial_fetch import PART_BYTES
from djinn_core import torch_private
from djinn_core.ir.arguments import call_arguments
from djinn_core.ir.module_path import ModuleCall, is_backward, module_path
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.ir.program import Call, Site, Slot

_HERE: Final = torch.device("cpu")


def user_line_of_op() -> tuple[Site, ModuleCall | None]:
    """Return the user's line that issued the present op, and its module call. Call this inside `Tap.recorded`."""
    return site_of(int(ops.site_of_last_op())), current_module(current())


def describe_module(module: ModuleCall | None) -> str:
    """Return a description of the module or backward pass that issued an op, or an empty text outside of both."""
    path = module_path(module)
    return str(path) if path is not None else "a backward pass" if is_backward(module) else ""


def is_own(call: Call) -> bool:
    """Return True if the op belongs to Djinn, not PyTorch."""
    return call.op in OWN_OPERATORS


def run_on_cpu(call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Any:
    """Return the results of the op of `call` on these CPU operands and scalars, as an executor would compute them.

    Raises:
        Exception: any error of PyTorch.
    """
    form = call.signature.form
    positional, keywords = call_arguments(form, operands, slots, _HERE)
    with torch.inference_mode():
        return torch_private.kernel_of(resolve(form.op))(*positional, **keywords)


def fetch_all(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """Return several tensors as CPU tensors, in as few round trips as their sizes allow.

    Raises:
        RemoteError: a tensor could not be computed.
    """
    tensors_fetched: list[torch.Tensor] = []
    group: list[LazyTensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.remote.meta.nbytes
        if group and size + nbytes > PART_BYTES:
            tensors_fetched += _fetch_group(group)
            group, size = [], 0
        group.append(tensor)
        size += nbytes
    return tensors_fetched + _fetch_group(group)


def _fetch_group(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    if len(tensors) < 2:
        return [fetch(tensor) for tensor in tensors]
    recorder = current()
    for tensor in tensors:
        recorder.order_after(tensor.remote.storage)
    return list(recorder.ask(SyncRequest(fetch=tuple(tensor.remote.handle for tensor in tensors))).tensors)
