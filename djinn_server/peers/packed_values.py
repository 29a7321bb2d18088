"""Serialize values for a transfer between executors. Views and shared memory are preserved."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import msgspec
import torch

from djinn_core import torch_private
from djinn_core.errors import ProtocolError
from djinn_core.ir.handles import storage_of
from djinn_core.wire.frames import allocate
from djinn_core.wire.message_base import Failure
from djinn_core.wire.peer_messages import Item, View
from djinn_core.wire.tensors import dtype_from_name, dtype_name, extent
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.limited import in_memory
from djinn_server.memory.room import is_out_of_memory
from djinn_server.memory.spill import bytes_on_device
from djinn_server.running.random_state import set_state, state_from_bytes, state_to_bytes
from djinn_server.running.uninitialized_memory import copy_with_strides
from djinn_server.running.values import Poison, Stored, ValueTable, no_such_value

# Copy a slice with the memory between its elements if it spans at most this many times its size: its strides remain.
_GAPS = 1.25
Packed = tuple[Item, memoryview | torch.Tensor]  # a tensor of bytes is in device memory


def pack_copies(
    handles: Sequence[int], values: ValueTable, runtime: DeviceRuntime, executor: int, *, on_device: bool = False
) -> list[Packed]:
    """Return a packed copy of each value, each with its own memory.

    `executor`: number of this executor, for the origin of failures. `on_device`: True to leave the copies in device memory if
    it has enough free bytes.
    """
    with torch.inference_mode():
        return [
            _pack_copy(handle, _value_or_poison(values, handle), runtime, executor, on_device) for handle in handles
        ]


def pack_storages(
    handles: Sequence[int], values: ValueTable, runtime: DeviceRuntime, executor: int, *, on_device: bool = False
) -> list[Packed]:
    """Return packed copies of the storages of values, each with descriptions of all its views.

    `executor`, `on_device`: as in `pack_copies`.
    """
    packed: list[Packed] = []
    with torch.inference_mode():
        for item, tensor in storages_of_values(handles, values, executor):
            try:
                data = _copy_memory(tensor, runtime, on_device) if tensor is not None else memoryview(b"")
            except torch.OutOfMemoryError as error:
                packed.append(_pack_failure([view.handle for view in item.views], _out_of_memory(error), executor))
            else:
                packed.append((msgspec.structs.replace(item, size=len(data)), data))
    return packed


def storages_of_values(
    handles: Sequence[int], values: ValueTable, executor: int
) -> Iterator[tuple[Item, torch.Tensor | None]]:
    """Yield an item for each storage of these values, and a tensor with that storage. Nothing is copied.

    The item describes all views of the storage, and has its present size. The tensor is None for a value without memory.
    """
    storages = {storage_of(handle) for handle in handles}
    handles_by_storage: dict[int, list[int]] = {storage: [] for storage in storages}
    for handle in dict.fromkeys((*handles, *values.handles_of_storages(storages))):
        handles_by_storage[storage_of(handle)].append(handle)
    for storage_handles in handles_by_storage.values():
        yield from _storages(storage_handles, values, executor)


def _value_or_poison(values: ValueTable, handle: int) -> Stored:
    return values[handle] if handle in values else Poison(no_such_value(0, handle))


def _pack_copy(handle: int, value: Stored, runtime: DeviceRuntime, executor: int, on_device: bool) -> Packed:
    if not _is_sendable(value):
        return _pack_failure((handle,), value, executor)
    try:
        with in_memory(value, runtime):
            return _pack_dense(handle, value, runtime, on_device)
    except torch.OutOfMemoryError as error:
        return _pack_failure((handle,), _out_of_memory(error), executor)


def _pack_dense(handle: int, value: torch.Tensor, runtime: DeviceRuntime, on_device: bool) -> Packed:
    tensor = value.resolve_conj().resolve_neg()
    shape, stride = tuple(tensor.shape), tensor.stride()
    elements = extent(shape, stride)
    if dense := elements > _GAPS * tensor.numel():
        tensor, elements = tensor.contiguous(), tensor.numel()
    flat = tensor.as_strided((elements,), (1,))
    data = _snapshot(flat, runtime, on_device)
    view = View(handle, dtype_name(tensor.dtype), shape, stride)
    return Item(len(data), (view,), dense), data


def _storages(handles: Sequence[int], values: ValueTable, executor: int) -> Iterator[tuple[Item, torch.Tensor | None]]:
    by_address: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for handle in handles:
        value = _value_or_poison(values, handle)
        if _is_sendable(value):  # one storage of the client may be several storages here, for example after `set_`
            address = value.untyped_storage().data_ptr() or -torch_private.storage_key(value)
            by_address.setdefault(address, []).append((handle, value))
        elif isinstance(value, torch.Generator):
            yield Item(0, (View(handle),), generator=state_to_bytes(value.get_state())), None
        else:
            yield _pack_failure((handle,), value, executor)[0], None
    for entries in by_address.values():
        views = tuple(
            View(h, dtype_name(t.dtype), tuple(t.shape), t.stride(), int(t.storage_offset())) for h, t in entries
        )
        tensor = entries[0][1]
        yield Item(tensor.untyped_storage().nbytes(), views), tensor


def _out_of_memory(error: torch.OutOfMemoryError) -> Poison:
    return Poison(Failure(0, -1, "transfer", "OutOfMemoryError", str(error)))


def _copy_memory(tensor: torch.Tensor, runtime: DeviceRuntime, on_device: bool) -> memoryview | torch.Tensor:
    with in_memory(tensor, runtime):
        return _snapshot(_bytes_on_device(tensor), runtime, on_device)


def host_memory(tensor: torch.Tensor, runtime: DeviceRuntime) -> memoryview:
    """Return the storage of a tensor in host memory. A storage that is in host memory is not copied."""
    with torch.inference_mode():
        return bytes_of(runtime.deliver(_bytes_on_device(tensor)))


def _bytes_on_device(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return bytes_on_device(storage, storage.device)


def can_move(value: Stored) -> bool:
    """Return True if a value can be serialized and restored without changes."""
    return _is_sendable(value) or isinstance(value, torch.Generator | Poison)


def _is_sendable(value: Stored) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def _pack_failure(handles: Sequence[int], value: Stored, executor: int) -> Packed:
    if isinstance(value, Poison):
        failure = value.failure
    else:
        reason = f"a {type(value).__name__} cannot be sent to another executor"
        failure = Failure(0, -1, "transfer", "TypeError", reason)
    if not failure.executor:
        failure = Failure(failure.sequence, failure.instruction, failure.op, failure.kind, failure.message, executor)
    return Item(0, tuple(View(handle) for handle in handles), failure=failure), memoryview(b"")


def _snapshot(flat: torch.Tensor, runtime: DeviceRuntime, on_device: bool) -> memoryview | torch.Tensor:
    """Return a copy of the bytes of a dense tensor. Later ops may write into the tensor.

    `on_device`: True to copy on the device if it has enough free bytes.
    """
    if not flat.numel():
        return memoryview(b"")
    if on_device:
        with contextlib.suppress(torch.OutOfMemoryError):
            return flat.clone().view(torch.uint8)
    host = runtime.deliver(flat)
    if host.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
        host = host.clone()
    return bytes_of(host)


def bytes_of(host: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory."""
    return memoryview(host.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def unpack_item(item: Item, data: memoryview | torch.Tensor, runtime: DeviceRuntime) -> Iterator[tuple[int, Stored]]:
    """Yield the handles and values of an item. The caller has a turn on the device."""
    if item.failure is not None:
        for view in item.views:
            yield view.handle, Poison(item.failure)
        return
    if item.generator:
        yield item.views[0].handle, _generator(item.generator, runtime)
        return
    with torch.inference_mode():
        try:
            memory = data if isinstance(data, torch.Tensor) else runtime.receive(_octets(data))
        except torch.OutOfMemoryError as error:
            poison = _out_of_memory(error)
            yield from ((view.handle, poison) for view in item.views)
            return
        for view in item.views:
            typed = memory.view(dtype_from_name(view.dtype))
            if item.dense:
                yield view.handle, _with_strides(typed.view(view.shape), view)
            else:
                yield view.handle, typed.as_strided(view.shape, view.stride, view.offset)


def _octets(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def _generator(state: bytes, runtime: DeviceRuntime) -> Stored:
    generator = torch.Generator(device=runtime.device)
    try:
        set_state(generator, state_from_bytes(state))
    except (RuntimeError, TypeError) as error:
        return Poison(Failure(0, -1, "transfer", "RuntimeError", str(error)))
    return generator


def _with_strides(dense: torch.Tensor, view: View) -> Stored:
    """Return a copy of a dense tensor with the strides of `view`, or poison if the copy fails."""
    try:
        return copy_with_strides(dense, view.stride)
    except RuntimeError as error:
        if is_out_of_memory(error):
            reason = f"no memory for a layout of strides {view.stride}: {error}"
            return Poison(Failure(0, -1, "transfer", "OutOfMemoryError", reason))
        return Poison(Failure(0, -1, "transfer", type(error).__name__, str(error)))


def check_layout(item: Item) -> None:
    """Check that an item has views, and that the views lie within its memory.

    Raises:
        ProtocolError: the check failed.
    """
    if item.failure is None and (not item.views or ((item.dense or item.generator) and len(item.views) != 1)):
        raise ProtocolError("a transferred item has memory, but not the one value that it needs")
    _check_views(item)


def allocate_item(item: Item) -> memoryview:
    """Check an item's views, and return new host memory for its bytes.

    Raises:
        ProtocolError: the check failed, or the memory cannot be allocated.
    """
    check_layout(item)
    try:
        return allocate(item.size) if item.size else memoryview(b"")
    except (MemoryError, ValueError) as error:
        raise ProtocolError(f"cannot allocate {item.size:,} bytes for a transfer") from error


def check_item(item: Item, nbytes: int) -> None:
    """Check that `nbytes` bytes have arrived for an item, and that its views lie within them.

    Raises:
        ProtocolError: the check failed.
    """
    if item.size != nbytes:
        raise ProtocolError(f"a transferred item announced {item.size:,} bytes, but {nbytes:,} arrived")
    _check_views(item)


def _check_views(item: Item) -> None:
    for view in item.views if item.failure is None and not item.generator else ():
        _check_view(item, view)


def _check_view(item: Item, view: View) -> None:
    itemsize = dtype_from_name(view.dtype).itemsize
    if len(view.shape) != len(view.stride) or min((*view.shape, *view.stride, 0)) < 0:
        raise ProtocolError(f"transferred value {view.handle} has an invalid layout")
    elements = math.prod(view.shape)
    least_elements = elements if item.dense or not elements else view.offset + extent(view.shape, view.stride)
    if least_elements * itemsize > item.size or item.size % itemsize:
        raise ProtocolError(
            f"value {view.handle} needs {least_elements * itemsize} bytes, but its item has {item.size}"
        )
