"""PyTorch's operator database as programs for comparison, in several ways of calling ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_device_type import tol
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from evaluation.conformance.comparing import OTHER_FORMULAS, SEED, Tolerance, tolerance_of
from evaluation.conformance.samples import copies, lazily_conjugated, lazily_negated, with_gaps
from evaluation.conformance.verdicts import Program, Programs, Verdict, judge


def entries() -> Iterator[OpInfo]:
    """Return all entries."""
    return iter(op_db)


def name_of(op: OpInfo) -> str:
    """Return the entry's full name."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def first_dtype(op: OpInfo) -> torch.dtype:
    """Return float32, or the first CPU dtype of the entry."""
    dtypes = op.supported_dtypes("cpu") or {torch.float32}
    return torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)


def samples_of(
    op: OpInfo, count: int | None, dtype: torch.dtype | None = None, *, gradients: bool = False
) -> Iterator[SampleInput]:
    """Return the first `count` samples of an entry, or all samples if `count` is None."""
    # `op.sample_inputs` would seed every device and format a stack trace for each sample.
    torch.manual_seed(SEED)
    output = op.sample_inputs_func(op, "cpu", dtype or first_dtype(op), requires_grad=gradients)
    return itertools.islice(iter(output), count)


# --- programs for one sample on one device ----------------------------------------------------------------------------


def forward(op: OpInfo, sample: SampleInput, dress: Callable[..., Any] | None = None) -> Program:
    """Return a program that calls the op with a sample. `dress`: changes the layout of input tensors."""

    def program(device: str) -> Any:
        inputs = copies(op, device, **({"dressed": dress} if dress else {})).sample(sample)
        return inputs.output_process_fn_grad(op(inputs.input, *inputs.args, **inputs.kwargs))

    return program


def gradient(op: OpInfo, sample: SampleInput, function: Callable[..., Any] | None = None) -> Program:
    """Return a program that calls the op and runs its backward pass with gradients of ones."""

    def program(device: str) -> Any:
        inputs = copies(op, device).sample(sample)
        out = (function or op)(inputs.input, *inputs.args, **inputs.kwargs)
        outputs = pytree.tree_leaves(inputs.output_process_fn_grad(out))
        result = _gradients(outputs, inputs)
        if op.name in OTHER_FORMULAS:
            result = [g.contiguous() if g is not None else None for g in result]
        return [*outputs, *result]

    return program


def _gradients(outputs: list[Any], sample: SampleInput) -> list[torch.Tensor | None]:
    tensors = [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]
    inputs = [t for t in tensors if t.requires_grad and t.is_leaf]
    required = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not inputs or not required:
        return []
    return list(torch.autograd.grad(required, inputs, [torch.ones_like(t) for t in required], allow_unused=True))


def in_place(op: OpInfo, sample: SampleInput, dress: Callable[..., Any] | None = None) -> Program:
    """Return a program that calls the in-place variant, and checks that it writes and returns only its input."""

    def program(device: str) -> Any:
        inputs = copies(op, device, **({"dressed": dress} if dress else {})).sample(sample)
        out = op.inplace_variant(inputs.input, *inputs.args, **inputs.kwargs)
        base = inputs.input._base if inputs.input._base is not None else inputs.input
        whole = torch.as_strided(base, (base.untyped_storage().nbytes() // base.itemsize,), (1,), 0)
        return [out, out is inputs.input, whole, inputs.args, inputs.kwargs]

    return program


def in_place_gradient(op: OpInfo, sample: SampleInput) -> Program:
    """Return a program that runs the in-place variant and its backward pass."""
    return gradient(op, sample, lambda given, *args, **kwargs: op.inplace_variant(given.clone(), *args, **kwargs))


def out(op: OpInfo, sample: SampleInput, make: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    """Return a program that calls the op with `out=`. `make`: makes an output tensor from each expected result."""

    def program(device: str) -> Any:
        inputs = copies(op, device).sample(sample)
        expected = op(inputs.input, *inputs.args, **inputs.kwargs)
        targets = pytree.tree_map(lambda t: make(t) if isinstance(t, torch.Tensor) else t, expected)
        outputs = op(inputs.input, *inputs.args, **inputs.kwargs, out=targets)
        leaves, required = pytree.tree_leaves(outputs), pytree.tree_leaves(targets)
        return [*leaves, [a is b for a, b in zip(leaves, required, strict=True)], required]

    return program


def _same_layout(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t).fill_(1)


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(t, memory_format=torch.contiguous_format).mT.contiguous().mT if t.dim() > 1 else with_gaps(t)


def _empty(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(0)


def _too_large(t: torch.Tensor) -> torch.Tensor:
    return t.new_ones([n + 1 for n in t.shape] or [2])


def _too_narrow(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=torch.bool if t.dtype != torch.bool else torch.uint8, device=t.device)


def _wider(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=torch.complex128, device=t.device)


OUT_TENSORS = {
    "right": _same_layout,
    "other strides": _transposed,
    "empty": _empty,
    "wrong shape": _too_large,
    "narrower dtype": _too_narrow,
    "wider dtype": _wider,
}


# --- ways of calling --------------------------------------------------------------------------------------------------


def forwards(op: OpInfo, count: int | None) -> Programs:
    for number, sample in enumerate(samples_of(op, count)):
        yield f"sample {number}", forward(op, sample)


def gradients(op: OpInfo, count: int | None) -> Programs:
    if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
        for number, sample in enumerate(samples_of(op, count, gradients=True)):
            yield f"sample {number}", gradient(op, sample)


def in_places(op: OpInfo, count: int | None) -> Programs:
    if op.inplace_variant is None:
        return
    for number, sample in enumerate(samples_of(op, count)):
        if not sample.broadcasts_input and isinstance(sample.input, torch.Tensor):
            yield f"sample {number}", in_place(op, sample)
            yield f"sample {number} as a view", in_place(op, sample, with_gaps)
    if op.supports_autograd and op.supports_inplace_autograd:
        for number, sample in enumerate(samples_of(op, count, gradients=True)):
            if not sample.broadcasts_input:
                yield f"sample {number} with gradient", in_place_gradient(op, sample)


def outs(op: OpInfo, count: int | None) -> Programs:
    if op.supports_out:
        for number, sample in enumerate(samples_of(op, count)):
            for which, make in OUT_TENSORS.items():
                yield f"sample {number}, {which}", out(op, sample, make)


def errors(op: OpInfo, count: int | None) -> Programs:
    del count
    if op.error_inputs_func is not None:
        for number, wrong in enumerate(op.error_inputs("cpu")):
            yield f"error {number}", forward(op, wrong.sample_input)


def dtypes(op: OpInfo, count: int | None) -> Programs:
    supported = sorted(op.supported_dtypes("cpu"), key=str)
    for dtype in supported:
        if dtype != first_dtype(op):
            for number, sample in enumerate(samples_of(op, count, dtype)):
                yield f"{dtype}, sample {number}", forward(op, sample)
    for dtype in sorted(op.supported_backward_dtypes("cpu"), key=str):
        if dtype != torch.float32 and op.supports_autograd:
            for number, sample in enumerate(samples_of(op, count, dtype, gradients=True)):
                yield f"{dtype}, sample {number} with gradient", gradient(op, sample)


# The CPU kernel ignores the neg bit and returns wrong numbers.
CPU_IGNORES_NEG = frozenset({"nn.functional.max_pool1d"})


def views(op: OpInfo, count: int | None) -> Programs:
    supported = op.supported_dtypes("cpu")
    complex_ = next((d for d in (torch.complex64, torch.complex128) if d in supported), None)
    if complex_ is not None:
        for number, sample in enumerate(samples_of(op, count, complex_)):
            yield f"conj, sample {number}", forward(op, sample, lazily_conjugated)
            yield f"neg of complex, sample {number}", forward(op, sample, lazily_negated)
    for number, sample in enumerate(samples_of(op, count) if op.name not in CPU_IGNORES_NEG else ()):
        yield f"neg, sample {number}", forward(op, sample, lazily_negated)


WAYS: dict[str, Callable[[OpInfo, int | None], Programs]] = {
    "op_db forward": forwards,
    "op_db gradient": gradients,
    "op_db in-place": in_places,
    "op_db out=": outs,
    "op_db errors": errors,
    "op_db dtypes": dtypes,
    "op_db conj and neg": views,
}


def check(op: OpInfo, way: str, *, samples: int | None) -> Verdict:
    """Return the verdict on an entry that is called in the way `way` of `WAYS`."""
    tolerance = tolerance_of(op)
    if way == "op_db out=":  # a wider `out` tensor gets results that were computed in the sample's dtype
        tolerance = _at_least(tolerance(first_dtype(op)), tolerance)
    return judge(name_of(op), WAYS[way](op, samples), tolerance)


def _at_least(least: tol | None, given: Tolerance) -> Tolerance:
    def tolerance(dtype: torch.dtype) -> tol | None:
        allowed = given(dtype)
        return allowed and least and tol(max(allowed.atol, least.atol), max(allowed.rtol, least.rtol))

    return tolerance
