"""Observer interface for every op that a thread records, and what observers ask: places, memory, and the same op on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from djinn_client.interception.native.entries import site_of
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.module_calls import module_now
from djinn_client.interception.recording.recorder import SyncRequest, current
from djinn_client.interception.recording.unflatten_call import call_arguments
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.chunked_fetch import PART_BYTES
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core import torch_private
from djinn_core.errors import DjinnError
from djinn_core.ir.module_path import ModuleCall, is_backward, module_path
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.ir.program import Call, Site, Slot

_HERE: Final = torch.device("cpu")


class OpObserver(Protocol):
    """Observer that is called before and after each op of a thread is recorded. Its own ops are not reported to it."""

    def before(self, call: Call, operands: Sequence[LazyTensor]) -> None:
        """`call` is about to be recorded with these operands."""

    def after(
        self,
        call: Call,
        slots: Sequence[Slot],
        operands: Sequence[LazyTensor],
        results: Sequence[torch.Tensor | None],
    ) -> None:
        """`call` was recorded with these scalars, and `results` stand for what it returns (for operands that it writes: themselves)."""


@contextmanager
def watch_ops(observer: OpObserver, block: str) -> Iterator[None]:
    """Tell `observer` of each op that this thread records in the block, which an error calls `block`, such as `djinn.verify()`.

    Raises:
        DjinnError: ops of this thread are watched already, or the block is inside a `djinn.capture()`.
    """
    recorder = current()
    if recorder.watcher is not None or recorder.captures:
        raise DjinnError(f"{block} works neither inside another one nor inside djinn.capture()")
    recorder.watcher = observer
    try:
        yield
    finally:
        recorder.watcher = None


@contextmanager
def unwatched() -> Iterator[None]:
    """Tell no observer of what this thread records in the block."""
    recorder = current()
    watcher, recorder.watcher = recorder.watcher, None
    try:
        yield
    finally:
        recorder.watcher = watcher


def place_of_op() -> tuple[Site, ModuleCall | None]:
    """The line of the user's program that issued the op, and the call of a module that it is in; asked by `OpObserver.after` itself."""
    return site_of(int(ops.site_of_last_op())), module_now(current())


def module_in_words(module: ModuleCall | None) -> str:
    """The module that an op was issued in, or the backward pass; empty for neither."""
    found = module_path(module)
    return str(found) if found is not None else "a backward pass" if is_backward(module) else ""


def is_own(call: Call) -> bool:
    """True if the op is Djinn's and not PyTorch's."""
    return call.op in OWN_OPERATORS


def run_here(call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Any:
    """Run the op of `call` on these CPU operands and scalars, as an executor would.

    Raises:
        Exception: whatever PyTorch raises here.
    """
    form = call.signature.form
    positional, keywords = call_arguments(form, operands, slots, _HERE)
    with torch.inference_mode():
        return torch_private.kernel_of(resolve(form.op))(*positional, **keywords)


def fetch_all(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """The elements of several tensors on the CPU, in as few round trips as their sizes allow.

    Raises:
        RemoteError: one of them could not be computed.
    """
    fetched: list[torch.Tensor] = []
    group: list[LazyTensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.remote.meta.nbytes
        if group and size + nbytes > PART_BYTES:
            fetched += _fetch_group(group)
            group, size = [], 0
        group.append(tensor)
        size += nbytes
    return fetched + _fetch_group(group)


def _fetch_group(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    if len(tensors) < 2:
        return [fetch(tensor) for tensor in tensors]
    recorder = current()
    for tensor in tensors:
        recorder.order_after(tensor.remote.storage)
    return list(recorder.ask(SyncRequest(fetch=tuple(tensor.remote.handle for tensor in tensors))).tensors)
