"""Copies of remote tensors that Python makes: deep copies, and pickles by way of the CPU."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from djinn_core import torch_private

if TYPE_CHECKING:
    from djinn_core.interception.lazy_tensor import LazyTensor


def deep_copy(tensor: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
    """A tensor of its own with the same elements, attributes and gradient; nothing is fetched.

    Raises:
        RuntimeError: `tensor` has a history; as in PyTorch, only leaves can be copied.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    with torch.no_grad():
        copied: Any = tensor.detach().clone(memory_format=torch.preserve_format)
    memo[id(tensor)] = copied
    for name, attribute in vars(tensor).items():
        if name != "remote":
            setattr(copied, name, copy.deepcopy(attribute, memo))
    copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    return copied  # type: ignore[no-any-return]


def reduce(tensor: LazyTensor) -> tuple[Any, ...]:
    """How to pickle `tensor`: by way of the CPU, in a form that `torch.load(weights_only=True)` accepts."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch_private.rebuild_parameter(), (tensor.detach(), tensor.requires_grad, OrderedDict())
    location = str(tensor.device)
    return torch_private.rebuild_from_cpu(), (tensor.detach().cpu(), tensor.dtype, location, tensor.requires_grad)
