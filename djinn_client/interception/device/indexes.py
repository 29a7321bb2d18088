"""Logical devices: the current index of each thread, and the index of a call.

All operands and results of an op are on one logical device, unless the call names a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from djinn_client.interception.native.library import ops
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, device_type, is_remote, logical_device
from djinn_core.ir.program import Call
from djinn_core.torch_private import schema_of


def current_device() -> int:
    """Return the current index of this thread."""
    return int(ops.current_index())


def set_current_device(index: int) -> int:
    """Make `index` current on this thread. Return the previous index."""
    before = current_device()
    ops.set_current_index(index)
    return before


def index_of(device: Any) -> int:
    """Return the index of a device, device name or index. None means the current index.

    Raises:
        ValueError: the device has another type.
        RuntimeError: the index does not exist.
    """
    if device is None:
        return current_device()
    logical = logical_device(device) if isinstance(device, int) else torch.device(device)
    if not is_remote(logical):
        raise ValueError(f"Expected a {device_type()} device, but got: {logical}")
    return existing_index(logical)


def existing_index(device: torch.device) -> int:
    """Return the index of a remote device.

    Raises:
        RuntimeError: the index does not exist. Other accelerators raise this error, too.
    """
    named_index: int | None = device.index
    index = current_device() if named_index is None else named_index
    if index == 0:
        return index
    count = port.device_count()
    if index >= count and port.counts_when_open():
        port.sink.open()  # only servers know the number of devices
        count = port.device_count()
    if not 0 < index < count:
        raise RuntimeError(f"there is no {device.type}:{index}; torch.{device.type}.device_count() is {count}")
    return index


_COPIES: Final = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default})  # noqa: SLF001 - PyTorch's name


def check_one_index(func: Any, operands: Sequence[LazyTensor]) -> None:
    """Refuse tensors on different logical devices, as kernels of other accelerators do. The program must copy them first.

    Raises:
        RuntimeError: the tensors are on different devices.
    """
    indexes = {operand.remote.meta.device for operand in operands}
    if len(indexes) < 2 or func in _COPIES:
        return
    first, second = (f"{device_type()}:{index}" for index in list(dict.fromkeys(_indexes(operands)))[:2])
    names = [a.name for a in schema_of(func).arguments if "Tensor" in str(a.type)]
    at = next(i for i, index in enumerate(_indexes(operands)) if index != operands[0].remote.meta.device)
    argument = names[min(at, len(names) - 1)]
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when checking argument for argument {argument} in method {func.name()})"
    )


def _indexes(operands: Sequence[LazyTensor]) -> list[int]:
    return [operand.remote.meta.device for operand in operands]


def index_of_call(call: Call) -> int:
    """Return the index of a call's results and written operands.

    A call without results and written operands has the device of its operands.
    """
    new_metas = (meta for meta, same in zip(call.results, call.inplace, strict=True) if meta is not None and same < 0)
    targets = (call.operands[i] for i in call.writes)
    return next((meta.device for meta in (*new_metas, *targets, *call.operands)), 0)


def leaves_index_open(kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call names the remote device without an index, and several indexes exist.

    At the next such call, the current index may differ.
    """
    device = kwargs.get("device")
    if not isinstance(device, torch.device):
        return False
    index: int | None = device.index
    return index is None and is_remote(device) and port.device_count() > 1
