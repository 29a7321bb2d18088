"""Copies of samples on the local or the remote device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

INDEX = "CONFORMANCE_INDEX"  # environment variable that `run_databases.py` sets for its processes
DEVICE = f"remote_accelerator:{os.environ.get(INDEX, '0')}"
LOCAL = "CONFORMANCE_LOCAL"  # environment variable with the local device, such as cuda:0
HERE = os.environ.get(LOCAL, "cpu")

# Arguments that PyTorch requires on the CPU for every device.
ON_THE_CPU: dict[str, Callable[[torch.Tensor], bool]] = {"tensor_split": lambda tensor: not tensor.is_floating_point()}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged."""
    return tensor


def lazily_conjugated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements with the conj bit set if they are complex."""
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() and tensor.layout == torch.strided else tensor


def lazily_negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements with the neg bit set if their dtype can be negated."""
    negatable = tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)
    if not negatable or tensor.layout != torch.strided:
        return tensor
    return torch._neg_view(tensor.neg())


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as every second element of a larger tensor."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    return wide.select(-1, 0).copy_(tensor)


@attrs.define
class Copies:
    """Copier of samples to a device, which preserves layouts and shared memory.

    Attributes:
        stays: function that returns True for tensors that are copied to the CPU instead.
        dressed: function that is applied to each copied input tensor of the op.
        storages: copied storages. tensors: copied tensors, by id of the original.
    """

    device: str
    stays: Callable[[torch.Tensor], bool] = lambda _: False
    dressed: Callable[[torch.Tensor], torch.Tensor] = plain
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = attrs.field(factory=dict)
    tensors: dict[int, torch.Tensor] = attrs.field(factory=dict)

    def sample(self, sample: SampleInput) -> SampleInput:
        """Return the sample with tensors and devices copied."""
        inputs, args, kwargs = pytree.tree_map(self.value, (sample.input, sample.args, sample.kwargs))
        duplicate = SampleInput(inputs, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad)
        if "device" in duplicate.kwargs:
            duplicate.kwargs["device"] = self.device
        return duplicate

    def value(self, value: Any) -> Any:
        """Return a copied argument."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                device = "cpu" if self.stays(value) else self.device
                duplicate = self.tensor(value, device)
                duplicate = self.dressed(duplicate.detach()).detach()
                self.tensors[id(value)] = duplicate.requires_grad_(value.requires_grad)
            return self.tensors[id(value)]
        if isinstance(value, torch.device) or value == "cpu":
            return torch.device(self.device)
        return value

    def tensor(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Return a copied tensor. Its whole storage is copied once."""
        inputs = tensor.detach()
        if inputs.layout != torch.strided or inputs.is_quantized or inputs.is_conj() or inputs.is_neg():
            return inputs.to(device, copy=True)
        storage = inputs.untyped_storage()
        key = (storage.data_ptr(), inputs.dtype)
        base = self.storages.get(key)
        if base is None or not storage.nbytes():
            whole = torch.empty(0, dtype=inputs.dtype, device="cpu").set_(
                storage, 0, (storage.nbytes() // inputs.element_size(),), (1,)
            )
            base = self.storages[key] = whole.to(device, copy=True)
        return base.as_strided(inputs.size(), inputs.stride(), inputs.storage_offset())


def copies(op: Any, device: str, dressed: Callable[[torch.Tensor], torch.Tensor] = plain) -> Copies:
    """Return the copier for an entry's samples to a device."""
    return Copies(device, ON_THE_CPU.get(op.name, lambda _: False), dressed)
