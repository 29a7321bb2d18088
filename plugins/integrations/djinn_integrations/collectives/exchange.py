"""Collectives of `torch.distributed` on remote tensors: their values pass through the clients.

Each process of the group is a client. Clients may have different servers. A collective fetches its inputs, runs on these CPU
copies with the group's CPU backend (gloo), and uploads its results. So a collective is synchronous, even with
`async_op=True`. Only `send` does not wait for its peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from djinn_client.interception.handler_support import LazyTensor, copy, fetch, upload_copy
from djinn_core.errors import UnsupportedOperation
from djinn_integrations.collectives.torch_work import await_collectives, finished_work

# Other collectives write their first argument and return it, or create tensors (`_c10d_functional`).
_READ_AND_WRITTEN: Final = frozenset(
    ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "all_reduce_", "all_reduce_coalesced_")
)
_WRITE_NOTHING: Final = frozenset(("barrier", "monitored_barrier_", "send"))


class _Copies:
    """CPU copies of remote tensors, one for each tensor."""

    def __init__(self) -> None:
        self._results: dict[int, torch.Tensor] = {}

    def of(self, tree: Any, make: Callable[[LazyTensor], torch.Tensor]) -> Any:
        """Return `tree` with copies in place of remote tensors. `make` creates the copies that do not exist yet."""
        return pytree.tree_map(lambda leaf: self._copy_of(leaf, make) if isinstance(leaf, LazyTensor) else leaf, tree)

    def _copy_of(self, tensor: LazyTensor, make: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in self._results:
            self._results[id(tensor)] = make(tensor).contiguous()
        return self._results[id(tensor)]

    def write_back(self, tree: Any) -> None:
        """Write the contents of the copies to the remote tensors in `tree`."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, LazyTensor):
                copy(torch.ops.aten.copy_.default, (leaf, self._results[id(leaf)]), {})


def _empty(tensor: LazyTensor) -> torch.Tensor:
    meta = tensor.remote.meta
    return torch.empty(meta.shape, dtype=meta.dtype, device="cpu")


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[[LazyTensor], torch.Tensor]
) -> Any:
    copies = _Copies()
    argument_copies, keyword_copies = copies.of(
        (args[1:], kwargs), fetch
    )  # first, because the copied tensor may be the written one
    results = func(copies.of(args[0], make), *argument_copies, **keyword_copies)
    leaves = pytree.tree_leaves(results)
    await_collectives(leaves)
    copies.write_back(args[0])
    if not isinstance(leaves[-1], torch.ScriptObject):
        return args[0]
    work = finished_work(pytree.tree_leaves(args[0]))
    return (args[0], work) if isinstance(results, (tuple, list)) else work


def _sending(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _Copies().of((args, kwargs), fetch)
    return func(*args, **kwargs)


def _functional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (device,) = {leaf.remote.meta.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)}
    args, kwargs = _Copies().of((args, kwargs), fetch)
    results = func(*args, **kwargs)
    await_collectives(pytree.tree_leaves(results))
    return pytree.tree_map(lambda result: upload_copy(result, device), results)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on CPU copies, and return its results.

    Raises:
        UnsupportedOperation: the call receives from any rank.
    """
    name = func.overloadpacket.__name__
    if name == "wait_tensor":  # collectives have waited
        return args[0]
    if name == "recv_any_source_":
        raise UnsupportedOperation(
            "torch.distributed.recv() into a remote tensor must name the sending rank: pass `src`, or receive into a CPU tensor"
        )
    if name in _WRITE_NOTHING:
        return _sending(func, args, kwargs)
    if name.endswith("_"):
        return _written(func, args, kwargs, fetch if name in _READ_AND_WRITTEN else _empty)
    return _functional(func, args, kwargs)
