"""The private torch functions that make tensors what Python programs expect of objects: classes, copies, storages, files.

The other private functions are in `torch_private`, and so is the list of all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.graph
import torch.nn
import torch.overrides
import torch.utils.dlpack


def of_own_class(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one of PyTorch's own class, where the user's may say other things of it."""
    if type(tensor) is torch.Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def poison_gradient_node(tensor: torch.Tensor, refuse: Callable[[Any], Any]) -> None:
    """Have `refuse` called where a graph that was recorded already would accumulate a gradient into `tensor`."""
    if tensor.is_leaf and tensor.requires_grad and tensor._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(refuse)


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Whatever is called before and after the forward pass of `module`, hooks for all modules included."""
    every = torch.nn.modules.module
    kept = (every._global_forward_hooks, every._global_forward_pre_hooks)
    return [hook for hooks in (*kept, module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()]


def writes_to(tensor: torch.Tensor) -> int:
    """Version counter of the tensor: PyTorch's writes to its memory; 0 if it does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def unseen_by_function_modes() -> AbstractContextManager[None]:
    """Blocks in which functions on tensors are called as they are, whatever modes are entered."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def wrap_element_printing(wrap: Callable[[Callable[..., str]], Callable[..., str]]) -> None:
    """Replace the function that prints the elements of a tensor, given the tensor and its indent."""
    printing: Any = importlib.import_module("torch._tensor_str")
    printing._tensor_str = wrap(printing._tensor_str)
