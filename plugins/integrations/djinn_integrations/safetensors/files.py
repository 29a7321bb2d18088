"""Open safetensors files on the remote device.

safetensors knows a few device types by name. The adapter passes the device's number, which PyTorch takes for the remote
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from djinn.hooks import rebind
from djinn.weights import RemoteWeights, open_weights, save_weights
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.batched_fetch import fetched_together
from djinn_client.interception.tensors.lazy_tensor import device_type, is_remote, logical_device
from djinn_integrations.weights.open_weights import WeightSlice
from djinn_integrations.weights.server_files import address_in, place_of, saved_at, write_pointer_file

_USERS = ("accelerate", "diffusers", "peft", "safetensors", "sentence_transformers", "transformers")


class OnCpu:
    """Weights at a server address whose tensors are fetched to the client. It has the interface of `safe_open`'s object."""

    def __init__(self, weights: RemoteWeights) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing. The server owns the opened files."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, fetched to the client."""
        return self._weights[name].cpu()

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, fetched in one round trip."""
        tensors = self._weights.get_tensors()
        with fetched_together(tensors.values()):
            return {name: tensor.cpu() for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> _SliceOnCpu:
        """Return a slice of the tensor called `name`. Indexing it reads and fetches only the indexed rows."""
        return _SliceOnCpu(self._weights.get_slice(name))


class _SliceOnCpu:
    def __init__(self, inner: WeightSlice) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._inner[index].cpu()


def adapt_reading(module: Any) -> None:
    """Adapt `safetensors`: `safe_open` and `load_file` accept `remote_accelerator:0`."""
    open_file = module.safe_open

    @functools.wraps(open_file, updated=())
    def safe_open(filename: Any, framework: str, device: Any = None, **options: Any) -> Any:
        address = saved_at(filename)
        if address is not None:
            place = place_of(device)
            return OnCpu(open_weights(address)) if place is None else open_weights(address, place)
        if _names_remote(device):
            device = torch.device(device).index or 0
        return open_file(filename, framework, **({} if device is None else {"device": device}), **options)

    rebind(open_file, safe_open, _USERS)


def adapt_saving(module: Any) -> None:
    """Adapt `safetensors.torch`: tensors to save are fetched in one round trip. At a server address, the server saves them."""
    rebind(module.save, _fetching_together(module.save), _USERS)
    rebind(module.save_file, _at_address(_fetching_together(module.save_file)), _USERS)


def _at_address(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None) -> Any:
        address = address_in(filename)
        if address is None:
            return save(tensors, filename, metadata=metadata)
        if not any(is_remote(tensor.device) for tensor in tensors.values()):
            tensors = {name: tensor.to(logical_device(0)) for name, tensor in tensors.items()}
        save_weights(tensors, address, metadata)
        write_pointer_file(address, address)
        return None

    return saved


def _fetching_together(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(tensors: Mapping[str, torch.Tensor], *args: Any, **options: Any) -> Any:
        with fetched_together(tensors.values()):
            return save(tensors, *args, **options)

    return saved


def _names_remote(device: Any) -> bool:
    if isinstance(device, torch.device):
        return is_remote(device)
    return isinstance(device, str) and device.partition(":")[0] in {DEVICE_NAME, device_type()}
