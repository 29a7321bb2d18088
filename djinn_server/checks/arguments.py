"""The arguments of an op call by name, and helpers with which rules check them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch


class Arguments:
    """Arguments of an op call, by the names of its schema; omitted ones have their defaults."""

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        self.op = op
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return self._given.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def refuse(self, reason: str) -> NoReturn:
        """Raises the error that PyTorch should have raised."""
        raise RuntimeError(f"{self.op}: {reason}")

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the call unless `condition`."""
        if not condition:
            self.refuse(reason)

    def same_shape(self, *names: str) -> None:
        """The tensors of these names have one shape."""
        shapes = [tuple(self._given[name].shape) for name in names if self._given.get(name) is not None]
        if len(set(shapes)) > 1:
            self.refuse(f"{', '.join(names)} must have the same shape, not {shapes}")

    def count(self, name: str, numel: int) -> None:
        """The tensor of that name, if there is one, has `numel` elements."""
        tensor = self._given.get(name)
        if tensor is not None and tensor.numel() != numel:
            self.refuse(f"{name} must have {numel} elements, not {tensor.numel()}")

    def computed_in(self, name: str, dtype: torch.dtype) -> None:
        """The tensor of that name, if there is one, is of `dtype`, or of float32, in which sums of shorter ones are taken."""
        tensor = self._given.get(name)
        if tensor is not None and tensor.dtype not in {dtype, torch.float32}:
            self.refuse(f"{name} must be {dtype}, not {tensor.dtype}")

    def within(self, name: str, stop: int, start: int = 0, besides: int | None = None) -> None:
        """All elements of an integral tensor lie in `start` to `stop` - 1, or are `besides`."""
        tensor = self._given.get(name)
        if tensor is not None:
            self.inside(name, tensor, stop, start, besides)

    def inside(self, name: str, tensor: torch.Tensor, stop: int, start: int = 0, besides: int | None = None) -> None:
        """As `within`. Kernels of other devices than CPUs look themselves; looking here would wait for the device."""
        self.integral(name, tensor)
        if tensor.device.type != "cpu":
            return
        if besides is not None:
            tensor = tensor[tensor != besides]
        if tensor.numel():
            least, most = (int(bound) for bound in torch.aminmax(tensor))
            if not (start <= least and most < stop):
                self.refuse(f"{name} must lie in {start} to {stop - 1}")

    def integral(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor has indices."""
        if tensor.dtype not in {torch.int64, torch.int32}:
            self.refuse(f"{name} must be int64 or int32, not {tensor.dtype}")


Rule = Callable[[Arguments], None]


def product(sizes: Sequence[int]) -> int:
    """Elements of a tensor of these sizes."""
    return math.prod(sizes)
