"""Logical devices in calls: all tensors of an op are on one, and so are its results, unless the call names a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, device_type, is_remote
from djinn_core.ir.program import Call
from djinn_core.torch_private import schema_of

_COPIES: Final = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default})


def check_one_index(func: Any, operands: Sequence[LazyTensor]) -> None:
    """Refuse tensors of several logical devices, as kernels of other accelerators do; copies are what copies are for.

    Raises:
        RuntimeError: they are on several.
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
    """The logical device on which a call makes and writes; where it does neither, the one that it looks at."""
    made = (meta for meta, same in zip(call.results, call.inplace, strict=True) if meta is not None and same < 0)
    written = (call.operands[i] for i in call.writes)
    return next((meta.device for meta in (*made, *written, *call.operands)), 0)


def leaves_index_open(kwargs: Mapping[str, Any]) -> bool:
    """True if a call names the remote device without an index. The current index may differ the next time."""
    device = kwargs.get("device")
    if not isinstance(device, torch.device):
        return False
    index: int | None = device.index
    return index is None and is_remote(device) and port.device_count() > 1
