"""Sync points: ops whose result the Python program needs here and now."""

from __future__ import annotations

from typing import Any, Final

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.recording.fetch_prediction import LARGEST
from djinn_client.interception.recording.recorder import Recorder, SyncRequest, current, recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors import pending_copies
from djinn_client.interception.tensors.chunked_fetch import PART_BYTES, fetch_in_parts
from djinn_client.interception.tensors.element_copies import fetch_part, is_small_part
from djinn_client.interception.tensors.host_values import known_elements
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.parts_tensor import PartsTensor
from djinn_client.interception.tensors.printed_lists import shown_together
from djinn_client.interception.tensors.storage import Value
from djinn_client.interception.tensors.upload import upload_copy, upload_into_new
from djinn_core.errors import RemoteError, SessionLost
from djinn_core.ir.values import contiguous_strides

aten = torch.ops.aten
_AS_IT_IS: Final = (torch.preserve_format, torch.contiguous_format)  # formats in which row-major copies are row-major
LONGEST_LIST: Final = 1000  # tensors that are printed together with their elements: each is a round trip


@torch_dispatch.without_modes
def fetch(tensor: LazyTensor) -> torch.Tensor:
    """The tensor's elements on the CPU: sends what was recorded and waits, one round trip (more beyond `PART_BYTES`).

    Raises:
        RemoteError: the value could not be computed.
    """
    fetches = device_state.thread.expected
    expected = fetches.take(tensor.remote.handle) if fetches is not None else None
    if expected is not None:
        return expected
    if is_small_part(tensor):
        return fetch_part(tensor, _fetch_whole)
    if tensor.remote.meta.nbytes > PART_BYTES:
        return fetch_in_parts(tensor, _fetch_whole)
    return _fetch_whole(tensor)


def _fetch_whole(tensor: LazyTensor) -> torch.Tensor:
    """Elements that the caller may change: a copy of those that are remembered."""
    elements = read_only(tensor)
    return elements.clone() if tensor.remote.meta.nbytes <= LARGEST else elements


def read_only(tensor: LazyTensor) -> torch.Tensor:
    """Elements of a tensor, which the caller must not change: small ones are remembered."""
    return _read_only(tensor.remote)


def _read_only(value: Value) -> torch.Tensor:
    recorder = recorders.thread.recorder
    recorder.order_after(value.storage)
    fetches = recorder.fetches
    if recorder.captures or recorders.meta_only.storages:  # whose programs may not be sent, or refuse values
        fetched = _ask(value, recorder)
    else:
        known = fetches.take(value, recorder)
        if known is not None:
            return known
        entries = recorder.look(0) if recorder.unsent else ()  # another thread may send them meanwhile
        # With it come other small results that are expected to be fetched next.
        ahead = fetches.begin(entries, value.handle) if entries else ()
        try:
            fetched, *others = recorder.ask_unseen(SyncRequest((value.handle, *ahead))).tensors
        except (RemoteError, SessionLost):  # of this value, or of one that was not asked for
            if not ahead:
                raise
            fetches.failed()
            fetched = _ask(value, recorder)
        else:
            if ahead:
                fetches.came(ahead, others, recorder.epoch)
        if value.meta.nbytes <= LARGEST:
            fetches.remember(value.handle, fetched, recorder.epoch)
    if device_state.pending_copies:
        pending_copies.land_what_came()
    return fetched


def _ask(value: Value, recorder: Recorder) -> torch.Tensor:
    return recorder.ask_unseen(SyncRequest((value.handle,))).tensors[0]


def synchronize() -> None:
    """Send everything that was recorded, on all threads, and wait until the devices have finished it.

    Raises:
        RemoteError: an op failed since the last sync point.
    """
    current().ask(SyncRequest(synchronize=True))
    pending_copies.land_what_came(strict=True)


@handles(aten._local_scalar_dense.default)
def item(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """`tensor.item()`, `float(tensor)`, `bool(tensor)`."""
    tensor = args[0]
    value = tensor.remote
    known = known_elements(value) if value.storage.host is not None else None
    if known is not None:
        return known.item()
    if (
        value.storage.nbytes > value.meta.nbytes
        or device_state.thread.expected is not None
        or torch_dispatch.dispatch_modes()
    ):
        return fetch(tensor).item()
    return _read_only(value).item()


@handles(aten._linalg_check_errors.default)
def check_errors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`aten::_linalg_check_errors`: wait, and raise where a matrix is singular, as `torch.linalg.inv` does on CUDA."""
    func(fetch(args[0]), *args[1:], **kwargs)


def to_copy(source: LazyTensor, kwargs: dict[str, Any], *, waits: bool) -> torch.Tensor:
    """`source.to(...)` another device: converted remotely, then fetched, where that is the CPU."""
    if kwargs["device"].type != "cpu":
        return _to_other_device(source, kwargs)
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype != source.dtype:
        source = record(aten._to_copy.default, (source,), {"dtype": dtype})
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    late = None if waits else port.copy_later(source, memory_format)
    if late is not None:
        return late
    fetched, meta = fetch(source), source.remote.meta
    if memory_format in _AS_IT_IS and fetched.stride() == meta.stride == contiguous_strides(meta.shape):
        return fetched  # without the meta kernel of `empty_like`, which is written in Python
    return laid_out(fetched, stand_in(source), memory_format)


def stand_in(source: LazyTensor) -> torch.Tensor:
    """A meta tensor of the same shape, strides and dtype."""
    meta = source.remote.meta  # classes that the user derived may say other things of themselves
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def laid_out(fetched: torch.Tensor, source: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """`fetched` with the strides that PyTorch gives a copy of `source`."""
    stride = torch.empty_like(source, memory_format=memory_format).stride()
    if fetched.stride() == stride:
        return fetched
    return torch.empty_strided(source.shape, stride, dtype=source.dtype, device="cpu").copy_(fetched)


def _to_other_device(source: LazyTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    if kwargs["device"].type == "meta":
        return stand_in(source).to(kwargs.get("dtype") or source.dtype)
    return fetch(source).to(**kwargs)


@handles(aten.copy_.default)
def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target.copy_(source)`, in every combination of remote, CPU and a number."""
    target: Any = args[0]
    source: Any = args[1]
    if not isinstance(source, torch.Tensor):
        source = torch.tensor(source, device="cpu")
    if isinstance(source, PartsTensor):
        return port.dispatch_layout(func, args, kwargs)
    if not isinstance(target, LazyTensor):
        late = len(args) > 2 and args[2] and port.copy_into_later(target, source)
        return target if late else target.copy_(fetch(source))
    if isinstance(source, LazyTensor) or (source.dim() == 0 and target.dim() > 0):
        return record(func, (target, source), {})
    if upload_into_new(target, source):
        return target
    return record(func, (target, upload_copy(source, target.remote.meta.device)), {})


@handles(aten.is_pinned.default)
def is_pinned(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Remote tensors are never in pinned host memory."""
    return False


@handles(aten._has_compatible_shallow_copy_type.default)
def can_share_metadata(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """True if `a.data = b` may take over the metadata of `b`: only between remote tensors."""
    return all(isinstance(a, LazyTensor) for a in args)


def show(tensor: Any, contents: str | None) -> str:
    """The tensor as PyTorch prints it, with `contents` for its elements; fetches them where there are none.

    Within more than `LONGEST_LIST` others, as in the error that shows a list which an op was given, it is shown without them.
    """
    if contents is None and shown_together() > LONGEST_LIST:
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)})"
    if contents is None:
        contents = _elements(tensor)
    text = torch_dispatch.format_tensor(tensor, contents)
    heading = ""
    if text.startswith("Parameter("):
        heading, text = "Parameter containing:\n", text.removeprefix("Parameter(")[:-1]
    return heading + ("tensor(" + text.removeprefix("LazyTensor(") if text.startswith("LazyTensor(") else text)


def elements_in_words(tensor: Any) -> str:
    """The elements of a tensor as PyTorch prints them. Within more than `LONGEST_LIST` tensors that are printed together: dots."""
    return "..." if shown_together() > LONGEST_LIST else _elements(tensor)


def _elements(tensor: Any) -> str:
    if tensor.is_meta or tensor.numel() == 0:
        return "[]"
    with recorders.sending:
        if recorders.meta_only.has(tensor.remote.handle, current().entries):
            return "..."
    return torch_dispatch.format_elements(fetch(tensor.detach()), len("tensor("))


@handles(aten.is_same_size.default)
def _is_same_size(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Forward-mode differentiation asks this of tensors that may be on two devices; sizes are known here."""
    return bool(args[0].shape == args[1].shape)


@handles(aten._has_same_storage_numel.default)
def _has_same_storage_numel(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """As `_is_same_size`."""
    first, second = (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize for tensor in args[:2])
    return bool(first == second)
