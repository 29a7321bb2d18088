"""`djinn.verify()`: every op also runs on the CPU, and the first op that differs is named.

The CPU op gets the remote device's operands, so a difference does not propagate to later ops. Ops are batched, and
their operands and results are fetched together. Before an op writes memory that batched ops used, the batch is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident

import attrs
import torch

from djinn.compat import LazyTensor
from djinn.errors import DjinnError, VerificationError
from djinn.hooks import get_logger
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.tap import Tap, taps
from djinn_client.interception.tensors.partial_fetch import view_of
from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Call, Site, Slot, describe_site
from djinn_profiler.verification.cpu_copies import CpuCopies, UsedValue
from djinn_profiler.verification.differences import Difference, Tolerance, distance, format_differences
from djinn_profiler.verification.recorded_ops import describe_module, is_own, run_on_cpu, user_line_of_op

log = get_logger("djinn.verify")

BATCH_OPS = 256  # maximum number of ops per check
BATCH_BYTES = 64 << 20  # maximum bytes of their results
COPIES_BYTES = 1 << 30  # bytes of device memory to keep on the CPU between checks
DIFFERENCES = 64  # maximum number of differences in a report; the report counts all
_UNINITIALISED = ("empty", "new_empty", "resize_", "set_", "_resize_output")
_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_")


@attrs.define
class Verification:
    """Result of `verify()`.

    Attributes:
        checked: number of ops that ran on both sides.
        unchecked: number of ops that were not checked, by reason.
        differences: the first differences, in program order.
        differing: number of ops that differed.
    """

    checked: int = 0
    unchecked: Counter[str] = attrs.field(factory=Counter)
    differences: list[Difference] = attrs.field(factory=list)
    differing: int = 0

    @property
    def first(self) -> Difference | None:
        """Return the first op that differed."""
        return self.differences[0] if self.differences else None


@contextmanager
def verify(*, rtol: float | None = None, atol: float | None = None, bitwise: bool = False) -> Iterator[Verification]:
    """Context manager that also runs every op of this thread on the CPU, and compares the results.

    Args:
        rtol: relative tolerance. None means the default of `torch.testing.assert_close` for the dtype.
        atol: absolute tolerance. None means the default of `torch.testing.assert_close` for the dtype.
        bitwise: True if results must be equal to the last bit.

    Raises:
        VerificationError: at the end of the block, if an op differed; the message names the first.
        RemoteError: an op failed on the executor.
        DjinnError: the block is inside another `verify()` or a `capture()` of this thread.
    """
    thread = get_ident()
    if current().captures or any(isinstance(tap, _Checker) and tap.thread == thread for tap in taps.all):
        raise DjinnError("djinn.verify() cannot run inside another djinn.verify() or djinn.capture()")
    checker = _Checker(Tolerance(rtol, atol, bitwise), thread)
    with taps.subscribed(checker):
        try:
            yield checker.report
            checker.check()
        except BaseException as error:
            checker.explain(error)
            raise
    if checker.report.differing:
        raise VerificationError(format_differences(checker.report.differences, checker.report.differing))


@attrs.frozen
class _UncheckedOp:
    """An op that was recorded and not checked yet.

    Attributes:
        operands: its operands, with metadata from right after the op.
        results: its results, with metadata from right after the op; None for objects that are no tensors.
        written: its written tensors, with metadata from right after the op.
        before: copies of storages that it wrote, from before the write, by storage.
    """

    call: Call
    slots: Sequence[Slot]
    site: Site
    module: ModuleCall | None
    operands: tuple[UsedValue, ...]
    results: tuple[UsedValue | None, ...]
    written: tuple[UsedValue, ...]
    before: dict[int, torch.Tensor]

    def used_values(self) -> Iterator[UsedValue]:
        """Yield every tensor whose memory the check needs: operands, written tensors and results."""
        yield from self.operands
        yield from self.written
        for used_value in self.results:
            if used_value is not None:
                yield used_value


class _Checker(Tap):
    """Tap that checks the ops of one thread, except its own fetches."""

    def __init__(self, tolerance: Tolerance, thread: int) -> None:
        self.report = Verification()
        self.thread = thread
        self._loading = False
        self._tolerance = tolerance
        self._copies = CpuCopies(COPIES_BYTES)
        self._batch: list[_UncheckedOp] = []
        self._used: set[int] = set()  # storages that batched ops read, wrote or created
        self._nbytes = 0
        self._former_values: dict[int, torch.Tensor] = {}

    def recording(self, call: Call, operands: Sequence[LazyTensor]) -> None:
        """Fetch memory before `call` writes it, as `Tap.recording`."""
        if self._loading or get_ident() != self.thread:
            return
        self._former_values = {}
        if not call.writes:
            return
        targets = {operands[i].remote.storage.id for i in call.writes}
        if not targets.isdisjoint(self._used):
            self.check()
        operand_metas = [(o.remote, o.remote.meta) for o in operands if o.remote.storage.id in targets]
        if not _reason_to_skip(call) and not (len(operand_metas) == 1 and _names_op(call.op, _OVERWRITE)):
            self._load(operand_metas)
        for value, meta in operand_metas:
            if value.storage.id not in self._former_values:
                copy = self._copies.pop(value.storage.id)
                if copy is None:  # all of the memory is overwritten, or it is not compared
                    copy = torch.zeros(meta.extent, dtype=meta.dtype, device="cpu")
                self._former_values[value.storage.id] = copy

    def recorded(
        self, call: Call, slots: Sequence[Slot], operands: Sequence[LazyTensor], results: Sequence[torch.Tensor | None]
    ) -> None:
        """Add a recorded op to the batch, as `Tap.recorded`."""
        if self._loading or get_ident() != self.thread:
            return
        reason = _reason_to_skip(call)
        if reason:
            if reason != _VIEW:
                self.report.unchecked[reason] += 1
            return
        op = _UncheckedOp(
            call,
            slots,
            *user_line_of_op(),
            tuple((o.remote, meta) for o, meta in zip(operands, call.operands, strict=True)),
            tuple((r.remote, r.remote.meta) if isinstance(r, LazyTensor) else None for r in results),
            tuple((operands[i].remote, operands[i].remote.meta) for i in call.writes),
            self._former_values,
        )
        self._batch.append(op)
        self._used.update(value.storage.id for value, _ in op.used_values())
        self._nbytes += sum(call.nbytes)
        if len(self._batch) >= BATCH_OPS or self._nbytes >= BATCH_BYTES:
            self.check()

    def _load(self, used_values: Iterable[UsedValue]) -> None:
        self._loading = True
        try:
            self._copies.load(used_values)
        finally:
            self._loading = False

    def check(self) -> None:
        """Run the batched ops on the CPU, and compare.

        Raises:
            RemoteError: an op failed on the executor.
        """
        pending, self._batch = self._batch, []
        self._used, self._nbytes = set(), 0
        self._load(look for op in pending for look in op.used_values())
        for op in pending:
            self._check_one(op)

    def _check_one(self, op: _UncheckedOp) -> None:
        call = op.call
        used_values: dict[int, torch.Tensor] = {}
        for value, meta in op.operands:
            copy = op.before.get(value.storage.id)
            used_values[value.handle] = view_of(
                copy if copy is not None else self._copies.copy_of(value.storage.id), meta
            )
        operands = [used_values[value.handle] for value, _ in op.operands]
        try:
            out = run_on_cpu(call, operands, op.slots)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            log.warning("an op cannot run on this machine and is not verified", op=call.op, error=str(error))
            self.report.unchecked["cannot run here"] += 1
            return
        self.report.checked += 1
        results = list(out) if call.sequence else [out]
        for index, (local, remote) in enumerate(zip(results, op.results, strict=True)):
            if isinstance(local, torch.Tensor) and remote is not None and self._compare(op, index, local, remote):
                return
        for index, look in zip(call.writes, op.written, strict=True):
            if self._compare(op, index, operands[index], look):
                return

    def _compare(self, op: _UncheckedOp, index: int, local: torch.Tensor, used_value: UsedValue) -> bool:
        """Compare result `index` of an op with the CPU's result `local`. Return True, and record it, if they differ."""
        value, meta = used_value
        remote = view_of(self._copies.copy_of(value.storage.id), meta)
        with torch.inference_mode():
            distance_found = distance(
                remote.resolve_conj().resolve_neg(), local.resolve_conj().resolve_neg(), self._tolerance
            )
        if distance_found is None:
            return False
        self.report.differing += 1
        if len(self.report.differences) < DIFFERENCES:
            rtol, atol = self._tolerance.for_dtype(local.dtype)
            words = describe_module(op.module)
            shapes = tuple(f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in op.call.operands)
            numbers = (distance_found.largest, distance_found.differing, local.numel(), rtol, atol)
            self.report.differences.append(
                Difference(op.call.op, describe_site(op.site), words, shapes, index, *numbers)
            )
        return True

    def explain(self, error: BaseException) -> None:
        """If an op differed, name it in a note on the block's exception `error`, as a possible cause."""
        if isinstance(error, Exception):
            try:
                self.check()
            except Exception as failed:
                log.debug("the batched ops cannot be checked", reason=str(failed))
        if self.report.differing:
            error.add_note(f"djinn.verify(): {format_differences(self.report.differences, self.report.differing)}")


_VIEW = "a view"


def _reason_to_skip(call: Call) -> str:
    if is_own(call):
        return "of Djinn's own"
    if _names_op(call.op, _UNINITIALISED):
        return "makes memory without content"
    if call.random:
        return "random"
    if not call.writes and all(alias >= 0 or meta is None for meta, alias, _, _ in call.outcome):
        return _VIEW
    return ""


def _names_op(op: str, names: Sequence[str]) -> bool:
    packet = op.removeprefix("aten::").partition(".")[0]
    return any(packet == name or (not name.endswith("_") and packet.startswith(f"{name}_")) for name in names)
