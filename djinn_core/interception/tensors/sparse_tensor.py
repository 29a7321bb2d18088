"""SparseTensor: a sparse COO tensor whose indices and values are on an executor.

It is two strided remote tensors, and its shape: all that is known of sparse tensors here. Its values lie on the executor like those
of every other tensor, so memory limits, journals and failures hold for them without a word about layouts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.tracebacks import for_users, shorten


class SparseTensor(torch.Tensor):
    """A sparse COO tensor on `remote_accelerator`.

    Attributes:
        held_indices: remote int64 tensor of (sparse_dim, nnz). held_values: remote tensor of (nnz, *dense sizes).
        coalesced: whether indices are known to be sorted and unique.
        in_place: as the result of an op in place, that the op wrote into the memory of the values that were there.
    """

    held_indices: LazyTensor
    held_values: LazyTensor
    coalesced: bool
    in_place = False

    __torch_function__ = torch_private.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    @torch_private.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run or record `func`; see `dispatch_sparse`."""
        try:
            return port.dispatch_sparse(func, args, kwargs or {})
        except BaseException as error:
            shorten(error)
            raise

    @for_users  # type: ignore[arg-type] # it is called `self` in no Protocol
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        here = torch_private.format_whole(self.detach().cpu())
        before, _, after = here.rpartition("size=(")
        history = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn else ", requires_grad=True"
        return f"{before}device='{self.device}', size=({after[:-1]}{history if self.requires_grad else ''})"

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        # As PyTorch saves sparse tensors of every device.
        plain = self.detach()
        parts = (*torch_private.sparse_parts(plain), plain.size(), plain.is_coalesced())
        return torch_private.rebuild_sparse, (torch.sparse_coo, parts)

    @for_users
    def __deepcopy__(self, memo: dict[int, Any]) -> SparseTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]


def wrap_sparse(indices: LazyTensor, values: LazyTensor, shape: Sequence[int], coalesced: bool) -> SparseTensor:
    """A sparse tensor of these parts, which are not checked."""
    made: SparseTensor = torch_private.make_sparse_wrapper(SparseTensor, shape, values.dtype, values.device)
    made.held_indices, made.held_values, made.coalesced = indices, values, coalesced
    return made


def holds_sparse(arguments: Iterable[Any]) -> bool:
    """True if a remote sparse tensor is among the arguments of an op."""
    return any(holds_sparse(a) if isinstance(a, (list, tuple)) else isinstance(a, SparseTensor) for a in arguments)
