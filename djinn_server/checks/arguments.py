"""Access to the arguments of an op call by name, and helpers for rules that check arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch


class Arguments:
    """Arguments of an op call, by the names in its schema. Omitted arguments have their defaults."""

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        self.op = op
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return self._given.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error for an invalid argument. Rules call this for arguments that PyTorch does not check."""
        raise RuntimeError(f"{self.op}: {reason}")

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the call unless `condition`."""
        if not condition:
            self.refuse(reason)

    def same_shape(self, *names: str) -> None:
        """Check that the tensors with these names have one shape."""
        shapes = [tuple(self._given[name].shape) for name in names if self._given.get(name) is not None]
        if len(set(shapes)) > 1:
            self.refuse(f"{', '.join(names)} must have the same shape, not {shapes}")

    def count(self, name: str, numel: int) -> None:
        """Check that the tensor with this name, if given, has `numel` elements."""
        tensor = self._given.get(name)
        if tensor is not None and tensor.numel() != numel:
            self.refuse(f"{name} must have {numel} elements, not {tensor.numel()}")

    def computed_in(self, name: str, dtype: torch.dtype) -> None:
        """Check that the tensor with this name, if given, has `dtype`, or float32 as the accumulator of shorter dtypes."""
        tensor = self._given.get(name)
        if tensor is not None and tensor.dtype not in {dtype, torch.float32}:
            self.refuse(f"{name} must be {dtype}, not {tensor.dtype}")

    def within(self, name: str, stop: int, start: int = 0, besides: int | None = None) -> None:
        """Check that all elements of an integer tensor are in `range(start, stop)`, or equal `besides`."""
        tensor = self._given.get(name)
        if tensor is not None:
            self.inside(name, tensor, stop, start, besides)

    def inside(self, name: str, tensor: torch.Tensor, stop: int, start: int = 0, besides: int | None = None) -> None:
        """Check elements as `within` does, on CPUs only. Other kernels check bounds, and a check would synchronize."""
        self.integral(name, tensor)
        if tensor.device.type != "cpu":
            return
        if besides is not None:
            tensor = tensor[tensor != besides]
        if tensor.numel():
            least, greatest = (int(bound) for bound in torch.aminmax(tensor))
            if not (start <= least and greatest < stop):
                self.refuse(f"{name} must lie in {start} to {stop - 1}")

    def integral(self, name: str, tensor: torch.Tensor) -> None:
        """Check that a tensor has dtype int64 or int32."""
        if tensor.dtype not in {torch.int64, torch.int32}:
            self.refuse(f"{name} must be int64 or int32, not {tensor.dtype}")


Rule = Callable[[Arguments], None]


def product(sizes: Sequence[int]) -> int:
    """Return the number of elements of a tensor with these sizes."""
    return math.prod(sizes)
