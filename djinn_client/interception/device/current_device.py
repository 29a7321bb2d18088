"""The index that `remote_accelerator` without an index stands for, by thread."""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.native.library import ops
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import device_type, is_remote, logical_device


def current_device() -> int:
    """The present thread's index."""
    return int(ops.current_index())


def set_current_device(index: int) -> int:
    """Make `index` the present thread's; returns the one before."""
    before = current_device()
    ops.set_current_index(index)
    return before


def index_of(device: Any) -> int:
    """The index that a device, its name, its index or None (the present one) stands for.

    Raises:
        ValueError: it is a device of another type.
        RuntimeError: there is no such device.
    """
    if device is None:
        return current_device()
    found = logical_device(device) if isinstance(device, int) else torch.device(device)
    if not is_remote(found):
        raise ValueError(f"Expected a {device_type()} device, but got: {found}")
    return existing_index(found)


def existing_index(device: torch.device) -> int:
    """The index of a remote device.

    Raises:
        RuntimeError: there is no such device, as for an invalid ordinal of any accelerator.
    """
    given: int | None = device.index
    index = current_device() if given is None else given
    if index == 0:
        return index
    count = port.device_count()
    if index >= count and port.counts_when_open():
        port.runtime()  # servers say how many devices they have
        count = port.device_count()
    if not 0 < index < count:
        raise RuntimeError(f"there is no {device.type}:{index}; torch.{device.type}.device_count() is {count}")
    return index
