"""Numerical comparison of two results of one op, and the message about a difference."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from djinn_core.torch_private import default_tolerances


@attrs.frozen
class Tolerance:
    """Tolerance of a comparison: `|remote - here| <= atol + rtol * |here|`.

    Attributes:
        rtol: relative tolerance; None: the default of `torch.testing.assert_close` for the dtype.
        atol: absolute tolerance; None: the default of `torch.testing.assert_close` for the dtype.
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
        module: the module that issued it, in words.
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


def distance(remote: torch.Tensor, here: torch.Tensor, tolerance: Tolerance) -> Distance | None:
    """Return the distance of `remote` from `here`; None if it is within the tolerance."""
    if remote.shape != here.shape or remote.dtype != here.dtype:
        return Distance(float("inf"), max(remote.numel(), 1))
    if not here.numel() or (not tolerance.bitwise and torch.equal(remote, here)):
        return None
    wrong = _differ_bitwise(remote, here) if tolerance.bitwise else _beyond_tolerance(remote, here, tolerance)
    differing = int(wrong.sum())
    if not differing:
        return None
    apart = (_wide(remote) - _wide(here)).abs()[wrong]
    return Distance(float(apart.nan_to_num(nan=float("inf")).max()), differing)


def _beyond_tolerance(remote: torch.Tensor, here: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    rtol, atol = tolerance.for_dtype(here.dtype)
    return ~torch.isclose(_wide(remote), _wide(here), rtol=rtol, atol=atol, equal_nan=True)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point or tensor.dtype is torch.bool else torch.int64)


def _differ_bitwise(remote: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    if remote.dtype.is_complex:
        return _differ_bitwise(torch.view_as_real(remote), torch.view_as_real(here)).any(-1)
    wrong = remote != here
    if remote.dtype.is_floating_point:
        wrong &= ~(remote.isnan() & here.isnan())
        wrong |= torch.signbit(remote) != torch.signbit(here)
    return wrong


def in_words(differences: Sequence[Difference], total: int) -> str:
    """Return a message about the first difference, and the number of further differences."""
    others = (
        f"\n{total - 1} more ops differ; `report.differences` has the first {len(differences)}" if total > 1 else ""
    )
    return f"{differences[0]}{others}"
