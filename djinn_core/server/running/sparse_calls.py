"""Ops with sparse tensors: made of the session's strided values for the time of one op, and taken apart again.

Values that a client sends make sparse tensors whose invariants PyTorch's kernels take for granted, so each is checked.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import resolve_sparse
from djinn_core.ir.sparse_operators import (
    CONVERSIONS,
    COO,
    COO_RESULT,
    COO_WRITTEN,
    NO_RESULT,
    PLACES,
    STRIDED_RESULT,
)


def sparse_call(name: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The results of op `name`, `PLACES` tensors for each; nothing that it is given is written.

    Raises:
        UnsupportedOperation: it is not among the ops that take sparse tensors, or it is given none.
        RuntimeError: a sparse tensor among the arguments is not valid, or what the op raises.
    """
    op = resolve_sparse(str(name))
    made = _Arguments()
    positional = [made.make(a) for a in args]
    named = {key: made.make(a) for key, a in kwargs.items()}
    if not made.sparse and name not in CONVERSIONS:
        raise UnsupportedOperation(f"{name} was called for sparse tensors, and is given none")
    schema = torch_private.schema_of(op)
    for index, argument in enumerate(schema.arguments[: len(positional)]):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positional[index] = made.own_for_writing(positional[index])
    out = op(*positional, **named)
    results = list(out) if len(schema.returns) > 1 else [out]
    return [place for result in results for place in made.take_apart(result)]


class _Arguments:
    """Arguments of one op; remembers the memory of the tensors among them."""

    def __init__(self) -> None:
        self.sparse = 0
        self._memory: set[int] = set()
        self._written: tuple[Any, ...] = ()

    def make(self, argument: Any) -> Any:
        """The argument, with sparse tensors in place of what describes them."""
        if isinstance(argument, torch.Tensor):
            if argument.dim() or argument.device.type != "cpu":
                self._memory.add(argument.untyped_storage().data_ptr())
            return argument
        if not isinstance(argument, (list, tuple)):
            return argument
        if argument and isinstance(argument[0], str) and argument[0] == COO:
            return self._make_sparse(*argument[1:])
        return [self.make(a) for a in argument]

    def _make_sparse(self, coalesced: bool, size: Any, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.sparse += 1
        self._memory |= {indices.untyped_storage().data_ptr(), values.untyped_storage().data_ptr()}
        return torch.sparse_coo_tensor(
            indices, values, tuple(size), device=values.device, check_invariants=True, is_coalesced=bool(coalesced)
        )

    def own_for_writing(self, argument: torch.Tensor) -> torch.Tensor:
        """A copy, which the op may write."""
        copied = argument.clone()
        self._written = _values_of(copied)
        return copied

    def take_apart(self, result: Any) -> list[torch.Tensor]:
        """The tensors that stand for a result. None shares memory with an argument, so that no write is hidden."""
        if result is None:
            return [torch.tensor([NO_RESULT]), *[torch.empty(0) for _ in range(PLACES - 1)]]
        if result.layout is torch.strided:
            return [torch.tensor([STRIDED_RESULT]), self._own(result), torch.empty(0)]
        if result.layout is not torch.sparse_coo:
            raise UnsupportedOperation(f"the result has layout {result.layout}, which remote_accelerator does not have")
        kind = COO_WRITTEN if self._written and self._written == _values_of(result) else COO_RESULT
        header = torch.tensor([kind, int(result.is_coalesced()), *result.shape])
        return [header, *[self._own(part) for part in torch_private.sparse_parts(result)]]

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._memory else tensor


def _values_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identity of a sparse tensor's values: where they lie, and what they look like."""
    if tensor.layout is torch.strided:
        return ()
    _, values = torch_private.sparse_parts(tensor)
    return values.data_ptr(), values.shape, values.dtype
