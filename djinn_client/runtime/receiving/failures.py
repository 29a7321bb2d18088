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
    """Failures on executors by run and instruction, with the user's lines."""

    def __init__(self) -> None:
        self._programs: LruCache[_Run, tuple[Program, Sequence[int]]] = LruCache(REMEMBERED)
        self.unseen: dict[tuple[int, int, int], Failure] = {}
        # By op, the executors that reported it. Programs are kept, so that their ids are not reused.
        self._told: LruCache[_Op, tuple[int, Program]] = LruCache(REMEMBERED)
        self._read: dict[int, Callable[[int], None]] = {}

    def read_by(self, executor: int, read: Callable[[int], None]) -> None:
        """Register `read`, a function that reads an executor's messages about a submission.

        The messages may arrive after other executors' replies.
        """
        self._read[executor] = read

    def note(self, run: _Run, failures: Sequence[Failure], program: Program, nodes: Sequence[int]) -> None:
        """Record the failures of a run. Instruction `i` of the run is node `nodes[i]` of `program`.

        An op that failed on several executors counts once.
        """
        self.remember(run, program, nodes)
        for failure in failures:
            if len(self.unseen) < REMEMBERED and not self._is_known(failure):
                self.unseen[_key(failure)] = failure

    def remember(self, run: _Run, program: Program, nodes: Sequence[int]) -> None:
        """Record an executed program, so that errors of its failed values can name lines."""
        self._programs.store(run, (program, nodes))

    def error(self, failure: Failure) -> DjinnError:
        """Return the error for a failed value, with op, shapes and the user's line."""
        if failure.executor in self._read:
            self._read[failure.executor](failure.sequence)
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
        earlier = [self._told[op][0]] if op in self._told else []
        earlier += [other.executor for other in self.unseen.values() if self._op(other) == op]
        return any(executor != failure.executor for executor in earlier)

    def _mark_reported(self, failure: Failure) -> None:
        """Mark a failure as reported, on every executor that ran its op."""
        self.unseen.pop(_key(failure), None)
        op = self._op(failure)
        if op is None or not failure.executor:
            return
        for key in [key for key, other in self.unseen.items() if self._op(other) == op]:
            del self.unseen[key]
        self._told.store(op, (failure.executor, self._programs[_run(failure)][0]))

    def _op(self, failure: Failure) -> _Op | None:
        """Return the failed op of a program, if known."""
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
        """Forget the unreported failures of an executor that come after the submission `after`.

        Using a failed value still raises.
        """
        executor, sequence = after
        self.unseen = {key: failure for key, failure in self.unseen.items() if key[0] != executor or key[1] <= sequence}

    def take_check(self, until: _Run) -> DjinnError | None:
        """Return a failure that no fetch will report, because its op is a check without results, such as an assertion.

        `until`: executor and number of a submission. Later submissions do not count.
        """
        for failure in self.unseen.values():
            if failure.executor != until[0] or failure.sequence > until[1]:
                continue
            program, nodes = self._programs.get(_run(failure), (None, ()))
            if program is not None and 0 <= failure.instruction < len(nodes):
                call = program.calls[nodes[failure.instruction]]
                if not call.new_count and not call.writes:
                    return self.error(failure)
        return None

    def take_unseen(self) -> DjinnError | None:
        """Return the first failure since the last call that no fetch has reported, with further failures as notes."""
        if not self.unseen:
            return None
        unseen = list(self.unseen.values())
        self.unseen.clear()
        error, *others = [self.error(failure) for failure in unseen]
        for other in others[:SHOWN]:
            error.add_note(f"also: {other}")
        if len(others) > SHOWN:
            error.add_note(f"and {len(others) - SHOWN} more ops failed")
        return error


class _Origin(msgspec.Struct, frozen=True):
    """Source location of an instruction as text; empty if unknown."""

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
    """Return the local exception for a remote failure of type name `kind`. Unknown kinds become `RemoteError`."""
    return _KINDS.get(kind, RemoteError)(message, op, site, module_path, words)
