"""PartsTensor: base class of non-strided tensors that consist of strided remote tensors.

The parts are ordinary values on the executor, so memory limits, journals and failures apply to them unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.handler_support import Handler
from djinn_client.tracebacks import for_users, shorten
from djinn_layouts import torch_layouts


class PartsTensor(torch.Tensor):
    """A non-strided tensor on `remote_accelerator`.

    Attributes:
        dispatch: function that runs an op with a non-strided tensor among its arguments. `djinn_layouts.dispatch` sets it.
        in_place: True if the tensor is the result of an in-place op that wrote into the memory of its argument's values.
    """

    in_place = False
    dispatch: ClassVar[Handler]

    __torch_function__ = torch_dispatch.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    @torch_dispatch.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return cls.dispatch(func, args, kwargs or {})
        except BaseException as error:
            shorten(error)
            raise

    def to_argument(self) -> list[Any]:
        """Return the tensor as an argument of `LAYOUT_CALL`: a list of its layout's name, sizes, parameters and parts."""
        raise NotImplementedError

    def take_parts_of(self, other: Any) -> None:
        """Replace the parts of this tensor by those of another tensor of the same class."""
        raise NotImplementedError

    @for_users  # type: ignore[arg-type] # it is called `self` in no Protocol
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        text = torch_layouts.format_whole(self.detach().cpu())
        before, _, after = text.rpartition("size=(")
        history = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn else ", requires_grad=True"
        return f"{before}device='{self.device}', size=({after[:-1]}{history if self.requires_grad else ''})"

    @for_users
    def __deepcopy__(self, memo: dict[int, Any]) -> PartsTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            duplicate: Any = self.detach().clone()
            if self.requires_grad:
                duplicate.requires_grad_()
            if self.grad is not None:
                duplicate.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = duplicate
        return duplicate  # type: ignore[no-any-return]


def first_of_parts(arguments: Iterable[Any]) -> PartsTensor | None:
    """Return the first non-strided remote tensor among the arguments of an op and in lists of them, or None."""
    for argument in arguments:
        candidate = first_of_parts(argument) if isinstance(argument, (list, tuple)) else argument
        if isinstance(candidate, PartsTensor):
            return candidate
    return None
