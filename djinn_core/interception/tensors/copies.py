"""Copies of remote tensors that Python makes: deep copies, and what is pickled or saved.

Both are what PyTorch does for its other devices: a storage and the tensors that look into it, so that what shared memory
shares it afterwards. Deep copies are made remotely; saving fetches each storage once.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from djinn_core import torch_objects, torch_private

if TYPE_CHECKING:
    from djinn_core.interception.tensors.lazy_tensor import LazyTensor

_OWN = ("remote", "_is_param")  # attributes that are not the user's


def deep_copy(tensor: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
    """A tensor of its own with the same elements, attributes and gradient; nothing is fetched.

    Raises:
        RuntimeError: `tensor` has a history; as in PyTorch, only leaves can be copied.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    parameter = isinstance(tensor, torch.nn.Parameter)
    with torch.no_grad():
        copied: Any = _copy_elements(tensor, memo, alone=parameter)
        if type(copied) is not type(tensor):
            copied = copied.as_subclass(type(tensor))
        elif parameter:
            copied = torch.nn.Parameter(copied)
    copied.requires_grad_(tensor.requires_grad)
    if not parameter:  # as PyTorch: copies of parameters have no gradient and no attributes, and are not made by `set_`
        torch.autograd.graph.increment_version(copied)
        if tensor.grad is not None:
            copied.grad = copy.deepcopy(tensor.grad, memo)
        for name, attribute in _attributes(tensor).items():
            setattr(copied, name, copy.deepcopy(attribute, memo))
    memo[id(tensor)] = copied
    return copied  # type: ignore[no-any-return]


def _copy_elements(tensor: LazyTensor, memo: dict[int, Any], alone: bool) -> torch.Tensor:
    """A copy of the storage, shared by all tensors over it that are copied together, and the same view of that."""
    meta = tensor.remote.meta
    storages: dict[int, Any] = memo.setdefault("torch", {})  # type: ignore[call-overload]
    number = tensor.remote.storage.id
    fills = not meta.offset and meta.nbytes == tensor.remote.storage.nbytes == meta.extent * meta.dtype.itemsize
    if alone or (fills and number not in storages):
        copied = tensor.detach().clone(memory_format=torch.preserve_format)
        if not alone and not meta.conj and not meta.neg:
            storages[number] = copied.untyped_storage()
        return copied
    if number not in storages:
        storages[number] = tensor.untyped_storage().clone()
    whole = storages[number].look_as(meta.dtype)
    looked: LazyTensor = whole.as_strided(meta.shape, meta.stride, meta.offset)
    view: torch.Tensor = looked.without_base()
    view = view.conj_physical() if meta.conj else view
    return view.neg() if meta.neg else view


def _attributes(tensor: LazyTensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name not in _OWN}


def reduce(tensor: LazyTensor) -> tuple[Any, ...]:
    """Reduce `tensor` for pickling, in a form that `torch.load(weights_only=True)` accepts, on machines without Djinn, too."""
    warn_if_has_hooks(tensor)
    state = _attributes(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch_objects.rebuild_parameter(tensor.detach(), tensor.requires_grad, state)
    cls = getattr(type(tensor), "of_user", torch.Tensor)
    with torch_private.no_torch_functions():
        plain = tensor.detach().resolve_conj().resolve_neg()
    rebuild, arguments = torch_objects.rebuild_tensor(plain, tensor.requires_grad)
    if not state and cls is torch.Tensor:
        return rebuild, arguments
    return torch_objects.rebuild_with_state(rebuild, cls, arguments, state)
