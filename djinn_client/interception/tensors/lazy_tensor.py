"""LazyTensor: a tensor whose memory is on an executor."""

from __future__ import annotations

import functools
from typing import Any

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME, device_state
from djinn_client.interception.native.library import ops
from djinn_client.interception.tensors.storage import Storage, Value
from djinn_client.torch_dispatch import has_python_key, is_transformed
from djinn_core.ir.values import TensorMeta


def is_remote(device: torch.device) -> bool:
    """Return True if tensors on `device` are remote."""
    return device.type in device_state.names


def device_type() -> str:
    """Return the user's name of the remote device: `remote_accelerator`, or `cuda` under `djinn run`."""
    return device_state.names[-1]


def set_shown_name(name: str) -> None:
    """Show the remote device as `name` from now on. Its own name stays valid."""
    device_state.names.append(name)


@functools.cache
def logical_device(index: int) -> torch.device:
    """Return the device `remote_accelerator:<index>`."""
    return torch.device(DEVICE_NAME, index)


def is_remote_tensor(tensor: Any) -> bool:
    """Return True if `tensor` is a plain tensor of the device: no subclass, tracer or transform."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type not in device_state.names:
        return False
    return not has_python_key(tensor) and not is_transformed(tensor) and tensor.layout is torch.strided


class _RemoteTensorMeta(type(torch.Tensor)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return is_remote_tensor(instance)


class LazyTensor(torch.Tensor, metaclass=_RemoteTensorMeta):
    """A tensor on `remote_accelerator`. Every tensor on the device is an instance."""

    __module__ = "torch.remote_accelerator"
    remote: Value

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:  # type: ignore[misc]
        """Return a parameter, because libraries recreate parameters as `type(parameter)(data, requires_grad)`."""
        return torch.nn.Parameter(data, requires_grad)


def show_values() -> None:
    """Make `tensor.remote` return the value of a tensor of the device."""
    torch.Tensor.remote = property(Value.of)  # type: ignore[attr-defined]


def wrap(value: Value) -> LazyTensor:
    """Return a tensor for `value`, without autograd history."""
    twin: LazyTensor = ops.twin(value.holder)
    return twin


def fresh(meta: TensorMeta, storage: Storage) -> LazyTensor:
    """Return a tensor for a new value over `storage`."""
    return wrap(Value.begin(storage, meta))


def change(tensor: torch.Tensor, meta: TensorMeta) -> None:
    """Set the metadata of `tensor`, which an op changed. Grow its storage if the metadata need more bytes."""
    ops.set_meta(tensor, meta.shape, meta.stride, meta.offset, meta.extent * meta.dtype.itemsize)
