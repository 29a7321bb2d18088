"""Clear memory that ops hand out without writing it.

PyTorch's CPU allocator returns freed memory of the process as it is: `torch.empty` would show a client whatever the executor held
before, its TLS key included. Three kinds of op are told apart, by schema and name:

- ops that return memory as they find it (`empty`, `resize_`): the new bytes are cleared after the call. Large blocks cost nothing.
- ops that are known to write every byte of their results: they run as they are.
- all others, `out=` overloads included: PyTorch's allocator clears memory while they run. `_ctc_loss`, for example, leaves gaps.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.ir.operators import resolve, split_name
from djinn_core.logs import get_logger
from djinn_core.system import memory

_FOUND: Final = frozenset({
    "_resize_output_",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
    "set_",
})  # fmt: skip
# Frequent ops, besides those that `_writes_everything` knows by their schemas. `tests/server/test_unwritten_memory.py` checks each.
_COMPLETE: Final = frozenset({
    "_log_softmax",
    "_log_softmax_backward_data",
    "_safe_softmax",
    "_softmax",
    "_softmax_backward_data",
    "_to_copy",
    "_unsafe_view",
    "addmm",
    "all",
    "amax",
    "any",
    "arange",
    "argmax",
    "baddbmm",
    "bmm",
    "cat",
    "clone",
    "convolution",
    "cumsum",
    "embedding",
    "full",
    "full_like",
    "gather",
    "index",
    "index_select",
    "linear",
    "matmul",
    "max",
    "mean",
    "min",
    "mm",
    "native_dropout",
    "native_layer_norm",
    "native_layer_norm_backward",
    "ones",
    "ones_like",
    "repeat",
    "scalar_tensor",
    "scaled_dot_product_attention",
    "select_backward",
    "slice_backward",
    "stack",
    "sum",
    "zeros",
    "zeros_like",
})  # fmt: skip
_log = get_logger("djinn.server")


class _Clearing:
    """A block in which PyTorch's CPU allocator clears all memory that it hands out, to any thread. Several threads may be in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    @functools.cached_property
    def _switch(self) -> Any:
        try:
            return torch_private.clearing_switch()
        except (OSError, ValueError) as error:
            _log.error("some ops return freed memory of this process: this PyTorch cannot clear it", error=str(error))
            return SimpleNamespace()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self._switch.value = True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._switch.value = False


cleared_allocations: Final = _Clearing()


def clearing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel`, which is called for the op `name`, so that none of its results shows freed memory."""
    if not needs_clearing(name):
        return kernel
    return functools.partial(_call_and_clear if _returns_as_found(name) else call_cleared, kernel)


@functools.cache
def needs_clearing(name: str) -> bool:
    """Return True if an op may leave bytes of its results unwritten."""
    return _returns_as_found(name) or not _writes_everything(name)


def _returns_as_found(name: str) -> bool:
    packet, overload = split_name(name)
    return packet in _FOUND and not overload.endswith("out")


def _writes_everything(name: str) -> bool:
    overload = resolve(name)
    schema = torch_private.schema_of(overload)
    if any(argument.is_out for argument in schema.arguments):  # memory before and after the result may be new as well
        return False
    packet, _ = split_name(name)
    allocates = any(result.alias_info is None for result in schema.returns)
    writes_all = torch.Tag.pointwise in overload.tags or packet in _COMPLETE or packet.startswith("_foreach_")
    return writes_all or not allocates


def call_cleared(kernel: Callable[..., Any], /, *positional: Any, **keywords: Any) -> Any:
    """Call `kernel` while PyTorch's CPU allocator clears all memory that it hands out."""
    with cleared_allocations:
        return kernel(*positional, **keywords)


def _call_and_clear(kernel: Callable[..., Any], /, *positional: Any, **keywords: Any) -> Any:
    """Call an op that returns one tensor, and clear the bytes that no operand had before."""
    if (
        torch.are_deterministic_algorithms_enabled()
    ):  # PyTorch fills what it returns, though not the gaps between elements
        return call_cleared(kernel, *positional, **keywords)
    operands = [one for one in (*positional, *keywords.values()) if isinstance(one, torch.Tensor)]
    before = {torch_private.storage_key(one): one.untyped_storage() for one in operands}
    sizes = {key: storage.nbytes() for key, storage in before.items()}
    try:
        made = kernel(*positional, **keywords)
    finally:  # `resize_` checks its memory format last: when it raises, the storage has grown
        for key, storage in before.items():
            clear(storage, sizes[key])
    if torch_private.storage_key(made) not in before:
        clear(made.untyped_storage())
    return made


def clear(storage: torch.UntypedStorage, start: int = 0) -> None:
    """Clear a storage from byte `start` on."""
    size = storage.nbytes() - start
    if size <= 0 or storage.device.type == "meta":
        return
    if storage.device.type == "cpu":
        memory.clear(storage.data_ptr() + start, size)
    else:
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,)).zero_()


def copied_with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Copy a tensor into memory with these strides, whose gaps are zero.

    Raises:
        RuntimeError: there is no memory for it.
    """
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    if laid.untyped_storage().nbytes() > tensor.nbytes:
        clear(laid.untyped_storage())
    return laid.copy_(tensor)
