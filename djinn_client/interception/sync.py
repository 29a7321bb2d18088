"""Sync points: ops whose result the Python program needs immediately."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import Recorder, SyncRequest, current, recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tap import Cause, taps, waiting_for
from djinn_client.interception.tensors.known_contents import MAX_VALUE_BYTES, known_contents
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote
from djinn_client.interception.tensors.partial_fetch import PART_BYTES, SHARED_BYTES, fetch_in_parts, part_of
from djinn_client.interception.tensors.storage import Value
from djinn_client.interception.tensors.upload import upload_copy, upload_into_new
from djinn_client.tracebacks import for_users
from djinn_core.errors import RemoteError, SessionLost
from djinn_core.ir.values import contiguous_strides

aten = torch.ops.aten
_AS_IT_IS: Final = (torch.preserve_format, torch.contiguous_format)  # formats in which row-major copies stay row-major


@torch_dispatch.without_modes
def fetch(tensor: LazyTensor) -> torch.Tensor:
    """Return the tensor's elements on the CPU. Sends the recorded ops and waits: one round trip, or more above `PART_BYTES`.

    Raises:
        RemoteError: the value could not be computed.
    """
    value = tensor.remote
    fetches = device_state.thread.predicted_fetches
    predicted_elements = fetches.take(value.handle) if fetches is not None else None
    if predicted_elements is not None:
        return predicted_elements
    nbytes = value.meta.nbytes
    if nbytes > PART_BYTES:
        return fetch_in_parts(tensor, read_only)
    elements = _fetch_elements(value)
    return elements.clone() if nbytes <= SHARED_BYTES else elements


def _fetch_elements(value: Value) -> torch.Tensor:
    """Return the elements of a value, perhaps by fetching the page that contains them. The caller must not change them."""
    captures = recorders.thread.recorder.captures  # the taps must see that the program waits
    part = None if captures else part_of(value, read_only)
    return read_only(value) if part is None else part


def read_only(value: Value) -> torch.Tensor:
    """Return the elements of a value, which the caller must not change. Small values are cached."""
    recorder = recorders.thread.recorder
    # a capture, which sends no programs, or a plan, which has no data
    if recorder.captures or recorders.meta_only.storages:
        elements = _request(value, recorder)
    elif value.meta.nbytes > MAX_VALUE_BYTES:
        elements = _request_with_predicted(value, recorder)
    else:
        contents = value.storage.contents
        recorder.fetches.note_fetch(value.handle, recorder.unsent)
        copy = contents.copies.get(value.handle)
        if copy is not None:
            return copy
        elements = _request_with_predicted(value, recorder)
        contents.keep(value.handle, elements)
    if device_state.pending_copies:
        device_state.land_copies()
    return elements


def _request_with_predicted(value: Value, recorder: Recorder) -> torch.Tensor:
    """Fetch the elements of `value`, together with other small results that the program probably fetches next."""
    recorder.order_after(value.storage)
    request = SyncRequest((value.handle,), predicts=True)
    try:
        elements, *predicted = recorder.ask_unseen(request).tensors
    except (RemoteError, SessionLost):  # this value or a predicted value could not be computed
        if len(request.fetch) == 1:
            raise
        recorder.fetches.drop_prediction()
        return _request(value, recorder)
    if not predicted:
        return elements
    for (handle, contents), tensor in zip(recorder.fetches.predicted_contents.items(), predicted, strict=True):
        contents.keep(handle, tensor.clone())  # the tensor shares the memory of a complete reply
    return elements.clone()


def _request(value: Value, recorder: Recorder) -> torch.Tensor:
    recorder.order_after(value.storage)
    return recorder.ask_unseen(SyncRequest((value.handle,))).tensors[0]


def known_elements(value: Value) -> torch.Tensor | None:
    """Return the elements of a value if the client knows them. The caller must not change them.

    Return None if a tap or a dispatch mode must see the read, or if a capture records the program. Also return None
    before a session begins, because the first read shows whether a server can be reached.
    """
    if not port.is_open() or taps.recorded or torch_dispatch.dispatch_modes() or recorders.thread.recorder.captures:
        return None
    elements: torch.Tensor | None = ops.known_elements(value.holder)
    contents = known_contents.get(value.storage.id) if elements is None else None
    if contents is not None and contents.test is not None and value.meta.dtype is torch.bool:
        func, number, version = contents.test
        if number.storage.version == version:
            return func(read_only(number)).view(value.meta.shape)  # type: ignore[no-any-return]
    return elements


def tolist(plain: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Return a replacement of `Tensor.tolist` that needs no round trip if the client knows the elements."""

    @functools.wraps(plain)
    def listed(self: torch.Tensor) -> Any:
        elements = known_elements(self.remote) if isinstance(self, LazyTensor) else None
        return plain(self if elements is None else elements)

    return for_users(listed)


@torch_dispatch.without_modes
def synchronize() -> None:
    """Send the recorded ops of all threads, and wait until the devices have finished them.

    Raises:
        RemoteError: an op failed since the last sync point.
    """
    with waiting_for(Cause.SYNCHRONIZE):
        current().ask_unseen(SyncRequest(synchronize=True))
        device_state.land_copies(strict=True)


@handles(aten._local_scalar_dense.default)
def item(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Implement `tensor.item()`, `float(tensor)` and `bool(tensor)`."""
    tensor = args[0]
    value = tensor.remote
    elements = known_elements(value)
    if elements is not None:
        return elements.item()
    with waiting_for(Cause.NUMBER):
        if device_state.thread.predicted_fetches is not None or torch_dispatch.dispatch_modes():
            return fetch(tensor).item()
        return _fetch_elements(value).item()


@handles(aten._linalg_check_errors.default)
def check_errors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Implement `aten::_linalg_check_errors`: wait, and raise if a matrix is singular, as `torch.linalg.inv` does on CUDA."""
    with waiting_for(Cause.CHECK):
        errors = fetch(args[0])
    func(errors, *args[1:], **kwargs)


@handles(aten._to_copy.default, repeats=True)
def to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement `source.to(...)`: record the op. If the target is the CPU, convert remotely, then fetch."""
    source, device, waits = args[0], kwargs.get("device"), not kwargs.get("non_blocking")
    kwargs = {k: v for k, v in kwargs.items() if k not in {"non_blocking", "pin_memory"}}
    if device is None or is_remote(device):
        return record(func, args, kwargs)
    if device.type != "cpu":
        return _to_other_device(source, kwargs)
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype != source.dtype:
        source = record(aten._to_copy.default, (source,), {"dtype": dtype})
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    late = None if waits else device_state.copy_later(source, memory_format)
    if late is not None:
        return late
    with waiting_for(Cause.COPY):
        elements, meta = fetch(source), source.remote.meta
    if memory_format in _AS_IT_IS and elements.stride() == meta.stride == contiguous_strides(meta.shape):
        return elements  # faster than the meta kernel of `empty_like`, which is written in Python
    return laid_out(elements, meta_like(source), memory_format)


def meta_like(source: LazyTensor) -> torch.Tensor:
    """Return a meta tensor with the shape, strides and dtype of `source`."""
    meta = source.remote.meta  # the user's subclasses may override these properties
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def laid_out(elements: torch.Tensor, source: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return `elements` with the strides that PyTorch gives a copy of `source`."""
    stride = torch.empty_like(source, memory_format=memory_format).stride()
    if elements.stride() == stride:
        return elements
    return torch.empty_strided(source.shape, stride, dtype=source.dtype, device="cpu").copy_(elements)


def _to_other_device(source: LazyTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    if kwargs["device"].type == "meta":
        return meta_like(source).to(kwargs.get("dtype") or source.dtype)
    with waiting_for(Cause.COPY):
        return fetch(source).to(**kwargs)


@handles(aten.copy_.default, repeats=True)
def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement `target.copy_(source)` for remote tensors, CPU tensors and numbers."""
    target: Any = args[0]
    source: Any = args[1]
    if not isinstance(source, torch.Tensor):
        source = torch.tensor(source, device="cpu")
        args = target, source
    if not isinstance(target, LazyTensor):
        late = len(args) > 2 and args[2] and device_state.copy_into_later(target, source)
        with waiting_for(Cause.COPY):
            return target if late else target.copy_(fetch(source))
    if isinstance(source, LazyTensor) or (source.dim() == 0 and target.dim() > 0):
        return record(func, args[:2], {})  # both must be the same tuple object
    if upload_into_new(target, source):
        return target
    return record(func, (target, upload_copy(source, target.remote.meta.device)), {})


@handles(aten.is_same_size.default)
def _is_same_size(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Return True if two tensors have equal sizes. Forward-mode differentiation asks this of tensors on two devices."""
    return bool(args[0].shape == args[1].shape)


@handles(aten._has_same_storage_numel.default)
def _has_same_storage_numel(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Return True if the storages of two tensors have equal sizes, possibly on two devices."""
    first, second = (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize for tensor in args[:2])
    return bool(first == second)
