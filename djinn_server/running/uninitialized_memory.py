"""Zero-fill memory that ops return uninitialized.

PyTorch's CPU allocator reuses freed memory without clearing it. So `torch.empty` could show a client old contents of the
process, such as its TLS key. There are three kinds of ops, by schema and name:

- After ops that return uninitialized memory (`empty`, `resize_`), new bytes are zero-filled. Large blocks cost nothing.
- Ops that write every byte of their results run unchanged.
- During all other ops, and all `out=` overloads, PyTorch's allocator zero-fills memory. Example: `_ctc_loss` leaves gaps.
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
from djinn_server.system import memory

_UNINITIALIZED: Final = frozenset({
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
# Frequent ops that write every byte of their results, which schemas do not show. `test_uninitialized_memory.py` checks each.
_FULLY_WRITTEN: Final = frozenset({
    "_adaptive_avg_pool2d",
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
    "avg_pool2d",
    "baddbmm",
    "batch_norm",
    "bmm",
    "cat",
    "clone",
    "constant_pad_nd",
    "convolution",
    "convolution_backward",
    "cumprod",
    "cumsum",
    "embedding",
    "embedding_dense_backward",
    "flip",
    "full",
    "full_like",
    "gather",
    "group_norm",
    "index",
    "index_put",
    "index_select",
    "layer_norm",
    "linalg_vector_norm",
    "linear",
    "logsumexp",
    "masked_fill",
    "matmul",
    "max",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "mean",
    "min",
    "mm",
    "multinomial",
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_dropout",
    "native_group_norm",
    "native_group_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "nll_loss2d_backward",
    "nll_loss2d_forward",
    "nll_loss_backward",
    "nll_loss_forward",
    "ones",
    "ones_like",
    "prod",
    "repeat",
    "rms_norm",
    "roll",
    "scalar_tensor",
    "scaled_dot_product_attention",
    "scatter",
    "select_backward",
    "slice_backward",
    "sort",
    "stack",
    "std",
    "sum",
    "topk",
    "tril",
    "triu",
    "var",
    "zeros",
    "zeros_like",
})  # fmt: skip
_log = get_logger("djinn.server")


class _ZeroFilledAllocations:
    """Context in which PyTorch's CPU allocator zero-fills memory for all threads. Thread-safe and reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0

    @functools.cached_property
    def _switch(self) -> Any:
        try:
            return torch_private.zero_fill_switch()
        except (OSError, ValueError) as error:
            _log.error(
                "some ops can return freed memory of this process to clients: this PyTorch cannot zero-fill memory; install "
                "a supported version of PyTorch",
                error=str(error),
            )
            return SimpleNamespace()

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            self._switch.value = True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._switch.value = False


zero_filled_allocations: Final = _ZeroFilledAllocations()


def zero_filling(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `kernel`, the kernel of the op `name`, whose results contain no uninitialized bytes."""
    if not needs_zero_fill(name):
        return kernel
    return functools.partial(_call_and_zero_fill if _returns_uninitialized(name) else call_with_zero_fill, kernel)


@functools.cache
def needs_zero_fill(name: str) -> bool:
    """Return True if an op may leave bytes of its results unwritten."""
    return _returns_uninitialized(name) or not _writes_everything(name)


def _returns_uninitialized(name: str) -> bool:
    packet, overload = split_name(name)
    return packet in _UNINITIALIZED and not overload.endswith("out")


def _writes_everything(name: str) -> bool:
    overload = resolve(name)
    schema = torch_private.schema_of(overload)
    if any(argument.is_out for argument in schema.arguments):  # resizing `out` may add bytes outside of the result
        return False
    packet, _ = split_name(name)
    allocates = any(result.alias_info is None for result in schema.returns)
    if overload.namespace != "aten":
        return not allocates
    writes_all = torch.Tag.pointwise in overload.tags or packet in _FULLY_WRITTEN or packet.startswith("_foreach_")
    return writes_all or not allocates


def call_with_zero_fill(kernel: Callable[..., Any], /, *positional: Any, **keywords: Any) -> Any:
    """Return the result of `kernel`, called while PyTorch's CPU allocator zero-fills allocations."""
    with zero_filled_allocations:
        return kernel(*positional, **keywords)


def _call_and_zero_fill(kernel: Callable[..., Any], /, *positional: Any, **keywords: Any) -> Any:
    """Call an op that returns one tensor, and zero-fill new bytes of the storages of operands and result."""
    if torch.are_deterministic_algorithms_enabled():  # PyTorch fills elements with nan, but not the gaps between them
        return call_with_zero_fill(kernel, *positional, **keywords)
    operands = [operand for operand in (*positional, *keywords.values()) if isinstance(operand, torch.Tensor)]
    before = {torch_private.storage_key(operand): operand.untyped_storage() for operand in operands}
    sizes = {key: storage.nbytes() for key, storage in before.items()}
    try:
        result = kernel(*positional, **keywords)
    finally:  # `resize_` checks its memory format last: when it raises, the storage has grown
        for key, storage in before.items():
            zero_fill(storage, sizes[key])
    if torch_private.storage_key(result) not in before:
        zero_fill(result.untyped_storage())
    return result


def zero_fill(storage: torch.UntypedStorage, start: int = 0) -> None:
    """Zero-fill a storage from byte number `start` to its end."""
    size = storage.nbytes() - start
    if size <= 0 or storage.device.type == "meta":
        return
    if storage.device.type == "cpu":
        memory.zero_fill(storage.data_ptr() + start, size)
    else:
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,)).zero_()


def copy_with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor with these strides, in elements. Gaps between elements are zero-filled.

    Raises:
        RuntimeError: the memory cannot be allocated.
    """
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    if copy.untyped_storage().nbytes() > tensor.nbytes:
        zero_fill(copy.untyped_storage())
    return copy.copy_(tensor)
