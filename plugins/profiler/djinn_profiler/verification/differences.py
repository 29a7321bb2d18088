"""Numerical comparison of an op's results on the remote device and on the CPU, and the message about a difference."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from djinn_core.torch_private import default_tolerances


@attrs.frozen
class Tolerance:
    """Tolerance of a comparison: `|remote - local| <= atol + rtol * |local|`.

    Attributes:
        rtol: relative tolerance. None means the default of `torch.testing.assert_close` for the dtype.
        atol: absolute tolerance. None means the default of `torch.testing.assert_close` for the dtype.
        bitwise: True if results must have equal bits, even the sign of zeros; NaN equals NaN.
    """

    rtol: float | None = None
    atol: float | None = None
    bitwise: bool = False

    def for_dtype(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return `rtol` and `atol` for results of this dtype."""
        if self.bitwise:
            return 0.0, 0.0
        rtol, atol = default_tolerances(dtype)
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@attrs.frozen
class Difference:
    """An op whose results differ.

    Attributes:
        op: overload name.
        site: `file:line in function` of the user's code.
        module: description of the module that issued it; empty outside of modules.
        operands: shape and dtype of each operand.
        result: position of the result that differs.
        largest: the largest absolute difference.
        differing: number of elements out of tolerance.
        elements: number of all elements.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """

    op: str
    site: str
    module: str
    operands: tuple[str, ...]
    result: int
    largest: float
    differing: int
    elements: int
    rtol: float
    atol: float

    def __str__(self) -> str:
        where = f"\n  in {self.module}" if self.module else ""
        return (
            f"{self.op} (operands: {', '.join(self.operands)}) differs in {self.differing} of {self.elements} elements of "
            f"result {self.result}, by up to {self.largest:.3g} (allowed: rtol {self.rtol:g}, atol {self.atol:g})"
            f"{where}\n  issued at {self.site}"
        )


@attrs.frozen
class Distance:
    """Difference between two tensors: its largest absolute value, and the number of elements out of tolerance."""

    largest: float
    differing: int


def distance(remote: torch.Tensor, local: torch.Tensor, tolerance: Tolerance) -> Distance | None:
    """Return the distance of `remote` from the CPU result `local`, or None if it is within the tolerance."""
    if remote.shape != local.shape or remote.dtype != local.dtype:
        return Distance(float("inf"), max(remote.numel(), 1))
    if not local.numel() or (not tolerance.bitwise and torch.equal(remote, local)):
        return None
    wrong = _differ_bitwise(remote, local) if tolerance.bitwise else _beyond_tolerance(remote, local, tolerance)
    differing = int(wrong.sum())
    if not differing:
        return None
    differences = (_widen(remote) - _widen(local)).abs()[wrong]
    return Distance(float(differences.nan_to_num(nan=float("inf")).max()), differing)


def _beyond_tolerance(remote: torch.Tensor, local: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    rtol, atol = tolerance.for_dtype(local.dtype)
    return ~torch.isclose(_widen(remote), _widen(local), rtol=rtol, atol=atol, equal_nan=True)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point or tensor.dtype is torch.bool else torch.int64)


def _differ_bitwise(remote: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if remote.dtype.is_complex:
        return _differ_bitwise(torch.view_as_real(remote), torch.view_as_real(local)).any(-1)
    wrong = remote != local
    if remote.dtype.is_floating_point:
        wrong &= ~(remote.isnan() & local.isnan())
        wrong |= torch.signbit(remote) != torch.signbit(local)
    return wrong


def format_differences(differences: Sequence[Difference], total: int) -> str:
    """Return a message about the first difference, and the number of further differences."""
    summary = (
        f"\n{total - 1} more ops differ; `report.differences` has the first {len(differences)}" if total > 1 else ""
    )
    return f"{differences[0]}{summary}"
