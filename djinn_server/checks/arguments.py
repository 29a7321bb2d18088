"""Access to the arguments of an op call by name, and helpers for rules that check arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch


class Arguments:
    """Arguments of an op call, by the names in its schema. Omitted arguments have their defaults."""

    def __init__(self, op: str, by_name: dict[str, Any]) -> None:
        self.op = op
        self._by_name = by_name

    def __getattr__(self, name: str) -> Any:
        return self._by_name.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def refuse(self, reason: str) -> NoReturn:
        """Raise `RuntimeError` with the op's name and `reason`."""
        raise RuntimeError(f"{self.op}: {reason}")

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the call with `reason` unless `condition` is True."""
        if not condition:
            self.refuse(reason)

    def same_shape(self, *names: str) -> None:
        """Check that the tensors with these names have the same shape. Omitted tensors are skipped."""
        shapes = [tuple(self._by_name[name].shape) for name in names if self._by_name.get(name) is not None]
        if len(set(shapes)) > 1:
            self.refuse(f"{', '.join(names)} must have the same shape, not {shapes}")

    def count(self, name: str, numel: int) -> None:
        """Check that the tensor with this name has `numel` elements. An omitted tensor is valid."""
        tensor = self._by_name.get(name)
        if tensor is not None and tensor.numel() != numel:
            self.refuse(f"{name} must have {numel} elements, not {tensor.numel()}")

    def computed_in(self, name: str, dtype: torch.dtype) -> None:
        """Check that the tensor with this name has `dtype` or float32, in which kernels accumulate short dtypes."""
        tensor = self._by_name.get(name)
        if tensor is not None and tensor.dtype not in {dtype, torch.float32}:
            self.refuse(f"{name} must be {dtype} or float32, not {tensor.dtype}")

    def within(self, name: str, stop: int, start: int = 0, ignored: int | None = None) -> None:
        """Check that all elements of an integer tensor are in `range(start, stop)`, or equal `ignored`."""
        tensor = self._by_name.get(name)
        if tensor is not None:
            self.elements_within(name, tensor, stop, start, ignored)

    def elements_within(
        self, name: str, tensor: torch.Tensor, stop: int, start: int = 0, ignored: int | None = None
    ) -> None:
        """Check the elements of `tensor` as `within` does. `name`: its name in the error.

        Other devices than CPUs are skipped: their kernels check bounds, and a check here would synchronize.
        """
        self.integral(name, tensor)
        if tensor.device.type != "cpu":
            return
        if ignored is not None:
            tensor = tensor[tensor != ignored]
        if tensor.numel():
            least, greatest = (int(bound) for bound in torch.aminmax(tensor))
            if not (start <= least and greatest < stop):
                self.refuse(f"{name} must have elements from {start} to {stop - 1}, not {least} to {greatest}")

    def integral(self, name: str, tensor: torch.Tensor) -> None:
        """Check that a tensor has dtype int64 or int32."""
        if tensor.dtype not in {torch.int64, torch.int32}:
            self.refuse(f"{name} must be int64 or int32, not {tensor.dtype}")


Rule = Callable[[Arguments], None]


def product(sizes: Sequence[int]) -> int:
    """Return the number of elements of a tensor with these sizes."""
    return math.prod(sizes)
