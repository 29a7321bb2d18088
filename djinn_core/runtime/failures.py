"""What failed on the executor, as errors that name the user's line."""

from __future__ import annotations

from collections import OrderedDict

from djinn_core.errors import DjinnError, RemoteError, remote_error
from djinn_core.ir.program import Program
from djinn_core.wire.messages import Failure

REMEMBERED = 4096  # failures whose dependants may still be fetched; beyond it a message loses its line


class Failures:
    """Failures by submission and instruction, with the lines that issued them."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], tuple[str, str]] = OrderedDict()
        self._unseen: list[Failure] = []

    def note(self, failure: Failure, program: Program, index: int) -> None:
        """Remember a failure of instruction `index` of `program`."""
        shapes = ", ".join(str(list(m.shape)) for m in program.calls[index].operands) if index >= 0 else ""
        self._known[failure.sequence, failure.instruction] = (program.site(index), shapes)
        self._unseen.append(failure)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def error(self, failure: Failure) -> DjinnError:
        """The error to raise for a value that failed, with op, shapes and the user's line."""
        self._unseen = [f for f in self._unseen if _key(f) != _key(failure)]
        site, shapes = self._known.get(_key(failure), ("", ""))
        where = f" (operands of shape {shapes})" if shapes else ""
        line = f"\n  issued at {site}" if site else ""
        message = f"{failure.op or 'the executor'} failed{where}: {failure.message}{line}"
        return remote_error(failure.kind, message, failure.op, site)

    def take_unseen(self) -> RemoteError | None:
        """The first failure since the last call that no fetch has reported."""
        if not self._unseen:
            return None
        first, self._unseen = self._unseen[0], []
        error = self.error(first)
        return error if isinstance(error, RemoteError) else RemoteError(str(error))


def _key(failure: Failure) -> tuple[int, int]:
    return failure.sequence, failure.instruction
