"""Runs PyTorch's own operator database locally and remotely, and compares: values, gradients, layouts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.testing._internal.common_device_type import tol, toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DEVICE = "remote_accelerator:0"
SEED = 7

# Their results are whatever the memory held before: only the metadata can be compared.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

# Arguments that PyTorch wants on the CPU whatever the device, as it does for CUDA.
ON_THE_CPU: dict[str, Callable[[torch.Tensor], bool]] = {"tensor_split": lambda tensor: not tensor.is_floating_point()}


SPARSE = "sparse tensors stay on the CPU: remote_accelerator has strided tensors only"
JITERATOR = "compiles CUDA source, so there is nothing on the CPU to compare with"

# The entries that are not right, and why. An entry that starts to be right must be taken off.
LEFT_OUT = {
    "jiterator_2inputs_2outputs": JITERATOR,
    "jiterator_4inputs_with_extra_args": JITERATOR,
    "jiterator_binary": JITERATOR,
    "jiterator_binary_return_by_ref": JITERATOR,
    "jiterator_unary": JITERATOR,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
}


@attrs.frozen
class Verdict:
    """What became of one entry: `passed`, `failed` or `left out`, and why.

    Attributes:
        error: where it failed, the exception.
        samples, gradients: how many samples were compared, and for how many of them gradients, too.
    """

    name: str
    outcome: str
    reason: str = ""
    error: Exception | None = attrs.field(default=None, repr=False)
    samples: int = 0
    gradients: int = 0


def entries() -> Iterator[OpInfo]:
    """Entries with float32."""
    return (op for op in op_db if torch.float32 in op.dtypes)


def name_of(op: OpInfo) -> str:
    """The entry's full name."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def check(op: OpInfo, *, samples: int | None) -> Verdict:
    """Compare the first samples of one entry (None: all of them)."""
    name, compared, gradients = name_of(op), 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(_samples(op), samples):
            local = _Local.of(op, sample)
            if local is None:
                continue
            try:
                local.compare(op, sample)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                return Verdict(name, "failed", reason, error, compared, gradients)
            compared += 1
            gradients += local.gradients is not None
    outcome = "passed" if compared else "left out"
    return Verdict(name, outcome, "" if compared else "no sample runs on the CPU", None, compared, gradients)


def _samples(op: OpInfo) -> Iterator[SampleInput]:
    # Not `op.sample_inputs`, which seeds every device before each sample and formats a stack trace for each.
    torch.manual_seed(SEED)
    return iter(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=op.supports_autograd))


@attrs.frozen
class _Local:
    """What the CPU says of a sample; `gradients` is None where it has none."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None] | None

    @classmethod
    def of(cls, op: OpInfo, sample: SampleInput) -> _Local | None:
        """None where the CPU refuses the sample."""
        torch.manual_seed(SEED)
        try:
            outputs = _outputs(op, sample, sample.args)
        except Exception:
            return None
        try:
            return cls(outputs, _gradients(op, outputs, sample, sample.args))
        except Exception:
            return cls(outputs, None)

    def compare(self, op: OpInfo, sample: SampleInput) -> None:
        """Run the sample remotely and compare.

        Raises:
            AssertionError: the results differ.
            Exception: the sample does not run.
        """
        remote = Move(ON_THE_CPU.get(op.name, lambda _: False)).sample(sample)
        torch.manual_seed(SEED)
        with torch.device(DEVICE):
            outputs = _outputs(op, remote, remote.args)
        gradients = _gradients(op, outputs, remote, remote.args) if self.gradients is not None else None
        expected, actual = [*self.outputs, *(self.gradients or ())], [*outputs, *(gradients or ())]
        compare(expected, actual, None if op.name in UNINITIALISED else tolerance_of(op))


def _outputs(op: OpInfo, sample: SampleInput, args: tuple[Any, ...]) -> list[Any]:
    out = op(sample.input, *args, **sample.kwargs)
    return pytree.tree_leaves(sample.output_process_fn_grad(out) if op.supports_autograd else out)


def _gradients(
    op: OpInfo, outputs: list[Any], sample: SampleInput, args: tuple[Any, ...]
) -> list[torch.Tensor | None] | None:
    tensors = [t for t in pytree.tree_leaves((sample.input, args, sample.kwargs)) if isinstance(t, torch.Tensor)]
    inputs = [t for t in tensors if t.requires_grad and t.is_leaf]
    wanted = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not op.supports_autograd or not inputs or not wanted:
        return None
    return list(torch.autograd.grad(wanted, inputs, [torch.ones_like(t) for t in wanted], allow_unused=True))


@attrs.define
class Move:
    """Moves samples to the remote device; tensors that share memory go on sharing it, with the same layout."""

    stays: Callable[[torch.Tensor], bool]
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = attrs.field(factory=dict)
    tensors: dict[int, torch.Tensor] = attrs.field(factory=dict)

    def sample(self, sample: SampleInput) -> SampleInput:
        """The sample with tensors and devices moved."""
        given, args, kwargs = pytree.tree_map(self.value, (sample.input, sample.args, sample.kwargs))
        moved = SampleInput(given, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad)
        if "device" in moved.kwargs:
            moved.kwargs["device"] = DEVICE
        return moved

    def value(self, value: Any) -> Any:
        """One argument."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                self.tensors[id(value)] = value if self.stays(value) else self.tensor(value)
            return self.tensors[id(value)]
        if isinstance(value, torch.device) or value == "cpu":
            return torch.device(DEVICE)
        return value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor: its whole storage moves, once."""
        plain = tensor.detach()
        if plain.layout != torch.strided or plain.is_conj() or plain.is_neg():
            return plain.to(DEVICE).requires_grad_(tensor.requires_grad)
        storage = plain.untyped_storage()
        key = (storage.data_ptr(), plain.dtype)
        base = self.storages.get(key)
        if base is None or not storage.nbytes():
            whole = torch.empty(0, dtype=plain.dtype).set_(
                storage, 0, (storage.nbytes() // plain.element_size(),), (1,)
            )
            base = self.storages[key] = whole.to(DEVICE)
        view = base.as_strided(plain.size(), plain.stride(), plain.storage_offset())
        return view.detach().requires_grad_(tensor.requires_grad)


def tolerance_of(op: OpInfo) -> tol:
    """PyTorch's own for float32: `assert_close`'s, or the wider one that the entry declares for CPUs."""
    declared = [
        override.d[torch.float32]
        for decorator in op.decorators
        if getattr(decorator, "device_type", None) in {None, "cpu"}
        for override in getattr(decorator, "decorators", [decorator])
        if isinstance(override, toleranceOverride) and torch.float32 in override.d
    ]
    return tol(max([1e-5, *(t.atol for t in declared)]), max([1.3e-6, *(t.rtol for t in declared)]))


def compare(expected: list[Any], actual: list[Any], tolerance: tol | None) -> None:
    """Compare results; without a tolerance their metadata only.

    Raises:
        AssertionError: they differ.
    """
    assert len(expected) == len(actual), f"{len(expected)} results expected, {len(actual)} returned"
    # Detached together: one program and one round trip, where each `.cpu()` by itself would take one of its own.
    remote = [t.detach() if isinstance(t, torch.Tensor) else t for t in actual]
    for want, got in zip(expected, remote, strict=True):
        if not isinstance(want, torch.Tensor):
            assert type(want) is type(got), f"{type(want)} expected, {type(got)} returned"
            assert want == got or want != want, f"{want} expected, {got} returned"  # noqa: PLR0124 - nan
            continue
        assert got.device.type == "remote_accelerator", f"the result is on {got.device}"
        assert want.dtype == got.dtype, f"{want.dtype} expected, {got.dtype} returned"
        assert want.shape == got.shape, f"{want.shape} expected, {got.shape} returned"
        fetched = got.cpu()
        if tolerance is not None:
            torch.testing.assert_close(
                fetched, want.detach(), atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True, check_stride=False
            )
