"""Collectives of `torch.distributed` on remote tensors: their values pass through the clients.

Each process of the group is a client, perhaps of a server of its own. A collective sends what was recorded, fetches its inputs, runs
on their copies with the group's CPU backend (gloo), and uploads its results. So it returns when it is done, even with `async_op=True`.
Only `send` does not wait for the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import Handler
from djinn_client.interception.dispatch import handles
from djinn_client.interception.native.library import set_kernel
from djinn_client.interception.sync import copy, fetch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.upload import upload_copy
from djinn_core.errors import UnsupportedOperation

# All ops write their first argument. These read it as well.
_READ_AND_WRITTEN: Final = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "all_reduce_", "all_reduce_coalesced_",
)  # fmt: skip
_WRITTEN: Final = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "alltoall_", "alltoall_base_", "gather_", "recv_", "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_", "scatter_",
)  # fmt: skip
_WRITE_NOTHING: Final = ("barrier", "monitored_barrier_", "send")
_FUNCTIONAL: Final = (
    "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce_coalesced", "all_to_all_single",
    "broadcast", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class _Copies:
    """Copies of remote tensors on the CPU, one of each."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def of(self, tree: Any, make: Callable[[LazyTensor], torch.Tensor]) -> Any:
        """`tree` with copies in place of remote tensors; `make` makes those that there are not."""
        return pytree.tree_map(lambda leaf: self._of(leaf, make) if isinstance(leaf, LazyTensor) else leaf, tree)

    def _of(self, tensor: LazyTensor, make: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = make(tensor).contiguous()
        return self._made[id(tensor)]

    def write_back(self, tree: Any) -> None:
        """Give the remote tensors of `tree` the elements that their copies have now."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, LazyTensor):
                copy(torch.ops.aten.copy_.default, (leaf, self._made[id(leaf)]), {})


def _empty(tensor: LazyTensor) -> torch.Tensor:
    meta = tensor.remote.meta
    return torch.empty(meta.shape, dtype=meta.dtype, device="cpu")


def _writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _written(func, args, kwargs, _empty)


def _updating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _written(func, args, kwargs, fetch)


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[[LazyTensor], torch.Tensor]
) -> Any:
    copies = _Copies()
    rest, named = copies.of((args[1:], kwargs), fetch)  # first: what is read may be what is written
    results = func(copies.of(args[0], make), *rest, **named)
    leaves = pytree.tree_leaves(results)
    torch_dispatch.await_collectives(leaves)
    copies.write_back(args[0])
    if not isinstance(leaves[-1], torch.ScriptObject):
        return args[0]
    work = torch_dispatch.finished_work(pytree.tree_leaves(args[0]))
    return (args[0], work) if isinstance(results, (tuple, list)) else work


def _sending(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _Copies().of((args, kwargs), fetch)
    return func(*args, **kwargs)


def _functional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (device,) = {leaf.remote.meta.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)}
    args, kwargs = _Copies().of((args, kwargs), fetch)
    results = func(*args, **kwargs)
    torch_dispatch.await_collectives(pytree.tree_leaves(results))
    return pytree.tree_map(lambda result: upload_copy(result, device), results)


def _waiting(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """`_c10d_functional::wait_tensor`: collectives have waited."""
    return args[0]


def _refused(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperation(
        "torch.distributed.recv() into a remote tensor needs the rank that sends: pass `src`, or receive into a CPU tensor"
    )


def register() -> None:
    """Have these called for collectives, where PyTorch has them."""
    if not torch.distributed.is_available():
        return
    kinds: tuple[tuple[Sequence[str], Handler], ...] = (
        (_READ_AND_WRITTEN, _updating),
        (_WRITTEN, _writing),
        (_WRITE_NOTHING, _sending),
        (_FUNCTIONAL, _functional),
    )
    for names, handler in kinds:
        _handle(names, handler)
    _handle(("wait_tensor",), _waiting)
    _handle(("recv_any_source_",), _refused)


def _handle(names: Sequence[str], handler: Handler) -> None:
    found = torch_dispatch.collectives(names)
    handles(*found)(handler)
    for op in found:
        set_kernel(op.name(), _kernel(op, handler), "PrivateUse1")


def _kernel(op: Any, handler: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(op, args, kwargs)
