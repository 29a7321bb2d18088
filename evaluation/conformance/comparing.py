"""Run a program on two devices, and compare results or exceptions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.testing._internal.common_device_type import tol, toleranceOverride
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

import djinn
from evaluation.conformance.samples import DEVICE

SEED = 7

# tolerance by dtype; None if only metadata can be compared
Tolerance = Callable[[torch.dtype], tol | None]

# Results are uninitialised memory: only metadata can be compared.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

# Autograd uses a different, data-independent formula for tensor subclasses: gradients may differ in rounding and
# layout.
OTHER_FORMULAS = frozenset(
    {
        "prod",
        "ormqr",
        "nn.functional.linear_cross_entropy",
    }
)
NARROW = {torch.bfloat16: tol(5e-3, 5e-2), torch.float16: tol(1e-3, 4e-3)}

# Exception types that callers distinguish, narrower ones first.
KINDS = (
    torch.linalg.LinAlgError,
    NotImplementedError,
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    ZeroDivisionError,
    RuntimeError,
    Exception,
)


def kind_of(error: BaseException) -> str:
    """Return the name of the narrowest type in `KINDS` that the exception has."""
    return next(kind.__name__ for kind in KINDS if isinstance(error, kind))


@attrs.frozen
class Outcome:
    """Outcome of a program: its fetched results, or the exception.

    Attributes:
        results: fetched tensors, and numbers. layouts: memory layout of each result on its device.
        error: the exception, or None. late: True if the fetch raised it, not the op.
    """

    results: tuple[Any, ...] = ()
    layouts: tuple[Any, ...] = ()
    error: Exception | None = None
    late: bool = False


def outcome_of(program: Callable[[str], Any], device: str) -> Outcome:
    """Run `program` on a device with the fixed seed."""
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device(device):
                # Fetched together in one round trip.
                results = tuple(
                    t.detach() if isinstance(t, torch.Tensor) else t for t in pytree.tree_leaves(program(device))
                )
        except Exception as error:
            _forget_failures(device)
            return Outcome(error=error)
        try:
            local_tensors = tuple(t.cpu() if isinstance(t, torch.Tensor) else t for t in results)
            if device == DEVICE:
                djinn.synchronize()
        except Exception as error:
            _forget_failures(device)
            return Outcome(error=error, late=True)
    return Outcome(local_tensors, tuple(map(layout_of, results)))


def _forget_failures(device: str) -> None:
    if device == DEVICE:
        with contextlib.suppress(Exception):
            djinn.synchronize()


def layout_of(result: Any) -> Any:
    """Return a result's memory layout and dtype, without strides of dimensions of size 1, or a non-tensor's type."""
    if not isinstance(result, torch.Tensor):
        return type(result)
    if result.layout != torch.strided:
        return str(result.layout)
    steps = [
        step if size > 1 and result.numel() else 0 for size, step in zip(result.shape, result.stride(), strict=True)
    ]
    return tuple(result.shape), tuple(steps), result.dtype, result.is_conj(), result.is_neg()


def check_same(expected: Outcome, actual: Outcome, tolerance: Tolerance) -> None:
    """Compare two outcomes of a program.

    Raises:
        AssertionError: they differ. An unexpected error of the program is raised itself.
    """
    if actual.error is not None and expected.error is None:
        raise actual.error
    if expected.error is not None:
        required, actual_value = kind_of(expected.error), "nothing" if actual.error is None else kind_of(actual.error)
        if required != actual_value:
            raise AssertionError(
                f"{required} expected ({_short(expected.error)}), {actual_value} raised ({_short(actual.error)})"
            ) from actual.error
        return
    assert len(expected.results) == len(actual.results), f"{len(actual.results)} results, not {len(expected.results)}"
    for want, actual_value in zip(expected.layouts, actual.layouts, strict=True):
        assert want == actual_value, f"{_readable(want)} expected, {_readable(actual_value)} returned"
    for want, actual_value in zip(expected.results, actual.results, strict=True):
        _check_value(want, actual_value, tolerance)


def _check_value(want: Any, got: Any, tolerance: Tolerance) -> None:
    if not isinstance(want, torch.Tensor):
        assert want == got or want != want, f"{want} expected, {got} returned"  # noqa: PLR0124 - nan
        return
    allowed = tolerance(want.dtype)
    if allowed is not None:
        torch.testing.assert_close(
            got, want, atol=allowed.atol, rtol=allowed.rtol, equal_nan=True, check_stride=False, check_layout=True
        )


def _short(error: BaseException | None) -> str:
    return str(error).partition("\n")[0][:160] if error is not None else ""


def _readable(layout: Any) -> str:
    if isinstance(layout, str):
        return layout
    if isinstance(layout, type):
        return layout.__name__
    shape, steps, dtype, conj, neg = layout
    bits = ", conj" * conj + ", neg" * neg
    return f"{dtype} of {shape} with steps {steps}{bits}"


def tolerance_of(op: OpInfo) -> Tolerance:
    """Return PyTorch's tolerance by dtype: the default of `assert_close`, or a wider tolerance of the entry for CPUs."""
    tolerances: dict[torch.dtype, list[tol]] = {}
    for decorator in op.decorators:
        if getattr(decorator, "device_type", None) in {None, "cpu"}:
            for override in getattr(decorator, "decorators", [decorator]):
                if isinstance(override, toleranceOverride):
                    for dtype, allowed in override.d.items():
                        tolerances.setdefault(dtype, []).append(allowed)

    def tolerance(dtype: torch.dtype) -> tol | None:
        if op.name in UNINITIALISED:
            return None
        rtol, atol = torch.testing._comparison.default_tolerances(dtype)
        wider: Sequence[tol] = tolerances.get(dtype, ())
        if op.name in OTHER_FORMULAS and dtype in NARROW:
            wider = [*wider, NARROW[dtype]]
        return tol(max([atol, *(t.atol for t in wider)]), max([rtol, *(t.rtol for t in wider)]))

    return tolerance
