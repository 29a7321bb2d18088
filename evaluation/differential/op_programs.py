"""Entries of PyTorch's operator databases as programs, with inputs in several memory layouts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.testing._internal import common_methods_invocations as databases
from torch.testing._internal.opinfo.core import ForeachFuncInfo, OpInfo, SampleInput
from torch.utils import _pytree as pytree

from evaluation.conformance.comparing import UNINITIALISED, tolerance_of
from evaluation.conformance.op_database import first_dtype, name_of
from evaluation.conformance.samples import copies, lazily_conjugated, lazily_negated, with_gaps
from evaluation.differential.program_runs import Names

SEED = 7
CALL = "result = call(op, inputs)"
PROGRAM = ("inputs = copied()", CALL, "gradients = differentiate(result, inputs)")
IN_PLACE = ("inputs = copied()", "with torch.no_grad(): result = call(op.inplace_variant, inputs)")
# `out=` is the input itself, or starts one element after it.
OUT = (
    "inputs, out = copied_with_out()",
    "with torch.no_grad(): result = call(op, inputs, out=out)",
    "with torch.no_grad(): result = call(op, inputs, out=inputs[0])",
)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor."""
    return tensor.contiguous()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in column-major order."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first element of each row, expanded."""
    return tensor[..., :1].expand(tensor.shape) if tensor.dim() and tensor.shape[-1] else tensor


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a slice of a larger tensor, with a storage offset."""
    wide = torch.zeros([size + 2 for size in tensor.shape], dtype=tensor.dtype, device=tensor.device)
    part = wide[tuple(slice(1, -1) for _ in tensor.shape)]
    return part.copy_(tensor) if tensor.dim() else torch.stack([tensor, tensor])[1]


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in channels-last order."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


def empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose first dimension has size 0."""
    return tensor[:0] if tensor.dim() else tensor


def zero_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Return one element as a 0-dim tensor."""
    return tensor.flatten()[0] if tensor.numel() else tensor


VARIANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "expanded": expanded,
    "sliced": sliced,
    "with gaps": with_gaps,
    "channels last": channels_last,
    "empty": empty,
    "0-dim": zero_dim,
    "conjugated": lazily_conjugated,
    "negated": lazily_negated,
}


# CPU kernels that read out of bounds and crash the process.
CRASHES = frozenset({("nn.functional.pdist", "empty")})


@attrs.frozen
class OpProgram:
    """A program that calls an op.

    Attributes:
        names: values of the names in its statements.
        close: function that returns True if two tensors are close enough.
    """

    name: str
    statements: tuple[str, ...]
    names: Names
    close: Callable[[torch.Tensor, torch.Tensor], bool]


def entries() -> list[OpInfo]:
    """Return the entries of op_db and of the foreach databases."""
    kinds = ("unary", "binary", "pointwise", "reduce", "other")
    return [*databases.op_db, *(op for kind in kinds for op in getattr(databases, f"foreach_{kind}_op_db"))]


def programs(op: OpInfo, count: int) -> Iterator[OpProgram]:
    """Yield programs of an entry's first samples: in each layout that changes a sample, with `out=`, and in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(_samples(op, count))
    close = _closeness(op)
    for number, sample in enumerate(samples):
        for variant, dress in VARIANTS.items():
            if (op.name, variant) not in CRASHES and (variant == "contiguous" or _changes(sample, dress)):
                name, names = f"{name_of(op)}, sample {number}, {variant}", _names(op, sample, dress)
                if not isinstance(op, ForeachFuncInfo) or op.supports_out:
                    yield OpProgram(name, PROGRAM, names, close)
                if op.supports_out and variant == "contiguous" and isinstance(sample.input, torch.Tensor):
                    yield OpProgram(f"{name}, out=", OUT, names, close)
                if op.inplace_variant is not None and not sample.broadcasts_input:
                    yield OpProgram(f"{name}, in place", IN_PLACE, names, close)


def _samples(op: OpInfo, count: int) -> Iterator[SampleInput]:
    torch.manual_seed(SEED)
    dtype = first_dtype(op)
    options = {"num_input_tensors": [3]} if isinstance(op, ForeachFuncInfo) else {}
    differentiable = op.supports_autograd and dtype.is_floating_point
    # `op.sample_inputs` would seed every device and format a stack trace for each sample.
    yield from itertools.islice(op.sample_inputs_func(op, "cpu", dtype, differentiable, **options), count)


def _tensors(sample: SampleInput) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _changes(sample: SampleInput, dress: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    def seen(t: torch.Tensor) -> Any:
        return t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()

    tensors = [t.detach() for t in _tensors(sample) if t.layout == torch.strided]
    return any(seen(dress(t)) != seen(t.contiguous()) for t in tensors)


def _names(op: OpInfo, sample: SampleInput, dress: Callable[[torch.Tensor], torch.Tensor]) -> Names:
    def dressed(tensor: torch.Tensor) -> torch.Tensor:
        return dress(tensor) if tensor.layout == torch.strided else tensor

    def copied(device: str) -> Callable[[], Any]:
        def make() -> Any:
            inputs = copies(op, device, dressed).sample(sample)
            return [inputs.input, list(inputs.args), inputs.kwargs]

        return make

    def call(_: str) -> Callable[[Any, Any], Any]:
        def make(op: Callable[..., Any], inputs: Any, **out: Any) -> Any:
            torch.manual_seed(SEED)
            result = sample.output_process_fn_grad(op(inputs[0], *inputs[1], **inputs[2], **out))
            return list(result) if isinstance(result, tuple) else result

        return make

    def copied_with_out(device: str) -> Callable[[], Any]:
        def make() -> Any:
            inputs, *others = copied(device)()
            inputs = inputs.detach()
            wide = torch.zeros(inputs.numel() + 1, dtype=inputs.dtype, device=device)
            first, second = wide[:-1].view(inputs.shape), wide[1:].view(inputs.shape)
            return [first.copy_(inputs), *others], second

        return make

    return {
        "copied": copied,
        "copied_with_out": copied_with_out,
        "op": lambda _: op,
        "call": call,
        "differentiate": lambda _: _differentiate,
    }


def _differentiate(result: Any, inputs: Any) -> Any:
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    sources = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs or not sources:
        return None
    return list(torch.autograd.grad(outputs, sources, [torch.ones_like(t) for t in outputs], allow_unused=True))


def _closeness(op: OpInfo) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    tolerance = tolerance_of(op)

    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        allowed = tolerance(one.dtype)
        if allowed is None or op.name in UNINITIALISED:
            return True
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.layout != torch.strided or not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        return torch.allclose(one, other, allowed.rtol, allowed.atol, equal_nan=True)

    return close
