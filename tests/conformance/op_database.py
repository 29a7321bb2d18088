"""Runs PyTorch's own operator database locally and remotely, and compares."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DEVICE = "remote_accelerator:0"


@attrs.frozen
class Verdict:
    """What became of one entry: `ok`, `wrong` or `skipped`, and why."""

    name: str
    outcome: str
    reason: str = ""


def entries() -> Iterator[OpInfo]:
    """Entries with float32."""
    return (op for op in op_db if torch.float32 in op.dtypes)


def name_of(op: OpInfo) -> str:
    """The entry's full name."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def check(op: OpInfo, *, samples: int, gradient: bool) -> Verdict:
    """Compare the first samples of one entry."""
    name = name_of(op)
    checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = list(op.sample_inputs("cpu", torch.float32, requires_grad=gradient and op.supports_autograd))
        except Exception as error:
            return Verdict(name, "skipped", f"no samples: {error!r:.150}")
        for sample in given[:samples]:
            outcome = _check_sample(op, sample, gradient and op.supports_autograd)
            if outcome:
                return Verdict(name, "wrong", outcome)
            checked += outcome is not None
    return Verdict(name, "ok" if checked else "skipped", "" if checked else "no sample runs locally")


def _check_sample(op: OpInfo, sample: SampleInput, gradient: bool) -> str | None:
    """An empty string where both sides agree; None where the local side fails."""
    torch.manual_seed(7)
    try:
        expected = _outputs(op, sample)
        expected_gradients = _gradients(expected, sample) if gradient else []
    except Exception:
        return None
    torch.manual_seed(7)
    try:
        remote = _to_remote(sample)
        with torch.device(DEVICE):
            actual = _outputs(op, remote)
        actual_gradients = _gradients(actual, remote) if gradient else []
        _compare(expected, actual)
        _compare(expected_gradients, actual_gradients)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:400]
    return ""


def _outputs(op: OpInfo, sample: SampleInput) -> list[Any]:
    out = op(sample.input, *sample.args, **sample.kwargs)
    return pytree.tree_leaves(sample.output_process_fn_grad(out) if _differentiable(out) else out)


def _differentiable(out: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(out))


def _gradients(outputs: list[Any], sample: SampleInput) -> list[torch.Tensor | None]:
    tensors = [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]
    inputs = [t for t in tensors if t.requires_grad and t.is_leaf]
    wanted = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not inputs or not wanted:
        return []
    seeds = [torch.ones_like(t) for t in wanted]
    return list(torch.autograd.grad(wanted, inputs, seeds, allow_unused=True))


def _to_remote(sample: SampleInput) -> SampleInput:
    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(DEVICE).requires_grad_(value.requires_grad)
        if isinstance(value, torch.device):
            return torch.device(DEVICE)
        return DEVICE if value == "cpu" else value

    remote = sample.transform(move)
    if "device" in remote.kwargs:
        remote.kwargs["device"] = DEVICE
    return remote


def _compare(expected: list[Any], actual: list[Any]) -> None:
    assert len(expected) == len(actual), f"{len(expected)} results expected, {len(actual)} returned"
    for want, got in zip(expected, actual, strict=True):
        if isinstance(want, torch.Tensor):
            assert got.device.type == "remote_accelerator", f"the result is on {got.device}"
            assert want.dtype == got.dtype, f"{want.dtype} expected, {got.dtype} returned"
            if want.layout == torch.strided:
                assert want.shape == got.shape, f"{want.shape} expected, {got.shape} returned"
            torch.testing.assert_close(got.detach().cpu(), want.detach(), equal_nan=True)
        else:
            assert type(want) is type(got), f"{type(want)} expected, {type(got)} returned"
            assert want == got or want != want, f"{want} expected, {got} returned"  # noqa: PLR0124 - nan

