"""Failures on executors, raised as exceptions that name the user's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch

from djinn_core.errors import (
    DjinnError,
    ProgramStopped,
    RemoteError,
    RemoteIndexError,
    RemoteNotImplementedError,
    RemoteOutOfMemory,
    RemoteTypeError,
    RemoteValueError,
    SessionLost,
    public,
)
from djinn_core.ir.program import Program
from djinn_core.ir.values import TensorMeta
from djinn_core.system.lru import LruCache
from djinn_core.wire.message_base import Failure

REMEMBERED = 64  # limit of submissions with remembered failures; for older ones, errors name no line
_HINT = (
    "\n  the executor cannot do this op with these operands; move them to the CPU first, or let it be computed there: "
    "djinn.configure(client_fallback=True)"
)
SHOWN = 8  # further failures that one error mentions


_Run = tuple[int, int]  # the number of an executor, and of a submission to it
_Op = tuple[int, int]  # the id of a program, and the number of an op in it


class Failures:
    """Failures on executors, with the lines of the user's code.

    Attributes:
        unreported: failures that no fetch has reported, by executor, submission and instruction.
    """

    def __init__(self) -> None:
        self._programs: LruCache[_Run, tuple[Program, Sequence[int]]] = LruCache(REMEMBERED)
        self.unreported: dict[tuple[int, int, int], Failure] = {}
        # By op, the first executor that reported a failure. The program is stored, so that its id is not reused.
        self._reported: LruCache[_Op, tuple[int, Program]] = LruCache(REMEMBERED)
        self._readers: dict[int, Callable[[int], None]] = {}

    def register_reader(self, executor: int, read: Callable[[int], None]) -> None:
        """Register `read`, a function that reads an executor's messages until a submission is answered.

        `error` calls it, because these messages may arrive after another executor's reply that mentions the failure.
        """
        self._readers[executor] = read

    def note(self, run: _Run, failures: Sequence[Failure], program: Program, nodes: Sequence[int]) -> None:
        """Record the failures of a run, which executed `program`. An op that failed on several executors counts once.

        `nodes`: for each instruction of the run, its node in `program`.
        """
        self.remember(run, program, nodes)
        for failure in failures:
            if len(self.unreported) < REMEMBERED and not self._is_known(failure):
                self.unreported[_key(failure)] = failure

    def remember(self, run: _Run, program: Program, nodes: Sequence[int]) -> None:
        """Record the program of a run, so that errors of its failed values can name lines of the user's code."""
        self._programs.store(run, (program, nodes))

    def error(self, failure: Failure) -> DjinnError:
        """Return the error for a failed value, with op, shapes and the user's line."""
        if failure.executor in self._readers:
            self._readers[failure.executor](failure.sequence)
        self._mark_reported(failure)
        if failure.kind == "SessionLost":
            return SessionLost(failure.message)
        origin = self._origin(failure)
        where = f" (operands: {origin.operands})" if origin.operands else ""
        module = f"\n  in {origin.module}" if origin.module else ""
        line = f"\n  issued at {origin.site}" if origin.site else ""
        hint = _HINT if failure.kind == "NotImplementedError" else ""
        message = f"{failure.op or 'the executor'} failed{where}: {failure.message}{hint}{module}{line}"
        return remote_error(failure.kind, message, failure.op, origin.site, origin.path, failure.message)

    def _is_known(self, failure: Failure) -> bool:
        """Return True if the same op has already failed on another executor."""
        op = self._op(failure)
        if op is None or not failure.executor:
            return False
        earlier = [self._reported[op][0]] if op in self._reported else []
        earlier += [unreported.executor for unreported in self.unreported.values() if self._op(unreported) == op]
        return any(executor != failure.executor for executor in earlier)

    def _mark_reported(self, failure: Failure) -> None:
        """Mark a failure as reported, on every executor that ran its op."""
        self.unreported.pop(_key(failure), None)
        op = self._op(failure)
        if op is None or not failure.executor:
            return
        for key in [key for key, unreported in self.unreported.items() if self._op(unreported) == op]:
            del self.unreported[key]
        self._reported.store(op, (failure.executor, self._programs[_run(failure)][0]))

    def _op(self, failure: Failure) -> _Op | None:
        """Return the op that failed, or None if its program is not recorded."""
        program, nodes = self._programs.get(_run(failure), (None, ()))
        if program is None or not 0 <= failure.instruction < len(nodes):
            return None
        return id(program), nodes[failure.instruction]

    def _origin(self, failure: Failure) -> _Origin:
        program, nodes = self._programs.get(_run(failure), (None, ()))
        if program is None or not 0 <= failure.instruction < len(nodes):
            return _Origin()
        node = nodes[failure.instruction]
        path = program.module_path(node)
        module = str(path) if path is not None else "a backward pass" if program.is_backward(node) else ""
        operands = ", ".join(_describe(meta) for meta in program.calls[node].operands)
        return _Origin(program.site(node), operands, module, path.path if path is not None else "")

    def mark_unobserved(self, after: _Run) -> None:
        """Forget the unreported failures of submissions to the same executor after the submission `after`.

        The use of a failed value still raises the error.
        """
        executor, sequence = after
        self.unreported = {
            key: failure for key, failure in self.unreported.items() if key[0] != executor or key[1] <= sequence
        }

    def take_check(self, until: _Run) -> DjinnError | None:
        """Return the error of a failed check without results, such as an assertion, which no fetch will report.

        Return None if no check failed. `until`: (executor, number) of the last submission to consider.
        """
        for failure in self.unreported.values():
            if failure.executor != until[0] or failure.sequence > until[1]:
                continue
            program, nodes = self._programs.get(_run(failure), (None, ()))
            if program is not None and 0 <= failure.instruction < len(nodes):
                call = program.calls[nodes[failure.instruction]]
                if not call.new_count and not call.writes:
                    return self.error(failure)
        return None

    def take_unreported(self) -> DjinnError | None:
        """Return the error of the first failure that no fetch has reported, with further failures as notes, and forget them.

        Return None if every failure was reported.
        """
        if not self.unreported:
            return None
        unreported = list(self.unreported.values())
        self.unreported.clear()
        first_error, *later_errors = [self.error(failure) for failure in unreported]
        for error in later_errors[:SHOWN]:
            first_error.add_note(f"also: {error}")
        if len(later_errors) > SHOWN:
            first_error.add_note(f"and {len(later_errors) - SHOWN} more ops failed")
        return first_error


class _Origin(msgspec.Struct, frozen=True):
    """Origin of an instruction, as texts that are empty if unknown.

    Attributes:
        site: file and line in the user's code.
        operands: dtypes and shapes of the operands.
        module: the module call or backward pass, for messages.
        path: path of the module.
    """

    site: str = ""
    operands: str = ""
    module: str = ""
    path: str = ""


def _describe(meta: TensorMeta) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"


def _run(failure: Failure) -> _Run:
    return failure.executor, failure.sequence


def _key(failure: Failure) -> tuple[int, int, int]:
    return failure.executor, failure.sequence, failure.instruction


@public("remote-linalg")
class RemoteLinAlgError(RemoteError, torch.linalg.LinAlgError):  # type: ignore[name-defined, misc]
    """An op failed on the executor with a `torch.linalg.LinAlgError`, such as for a singular matrix."""


@public("remote-torch-out-of-memory")
class RemoteTorchOutOfMemory(RemoteOutOfMemory, torch.OutOfMemoryError):
    """The executor's device ran out of memory.

    This class is used if PyTorch is imported, otherwise `RemoteOutOfMemory`.
    """


@public("remote-accelerator")
class RemoteAcceleratorError(RemoteError, torch.AcceleratorError):
    """The executor's device reported an error, such as a device-side assert."""


_KINDS: Final[Mapping[str, type[RemoteError]]] = {
    "IndexError": RemoteIndexError,
    "ValueError": RemoteValueError,
    "TypeError": RemoteTypeError,
    "NotImplementedError": RemoteNotImplementedError,
    "UnsupportedOperation": RemoteNotImplementedError,
    "ProgramStopped": ProgramStopped,
    "_LinAlgError": RemoteLinAlgError,
    "LinAlgError": RemoteLinAlgError,
    "OutOfMemoryError": RemoteTorchOutOfMemory,
    "AcceleratorError": RemoteAcceleratorError,
}


def remote_error(
    kind: str, message: str, op: str = "", site: str = "", module_path: str = "", words: str = ""
) -> RemoteError:
    """Return the local exception for an executor's exception of the class `kind`, by default a `RemoteError`.

    `words`: the executor's own message. The other parameters are as in `RemoteError`.
    """
    return _KINDS.get(kind, RemoteError)(message, op, site, module_path, words)
