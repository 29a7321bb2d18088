"""What failed on the executor, as errors that name the user's line."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from djinn_core.errors import DjinnError, SessionLost, remote_error
from djinn_core.ir.program import Program
from djinn_core.wire.messages import Failure

REMEMBERED = 64  # submissions with failures whose dependants may still be fetched; beyond it a message loses its line


class Failures:
    """Failures by submission and instruction, with the lines that issued them."""

    def __init__(self) -> None:
        self._programs: OrderedDict[int, tuple[Program, Sequence[int]]] = OrderedDict()
        self._unseen: dict[tuple[int, int], Failure] = {}

    def note(self, sequence: int, failures: Sequence[Failure], program: Program, nodes: Sequence[int]) -> None:
        """Remember what failed in submission `sequence`, whose instruction `i` was number `nodes[i]` of `program`."""
        self._programs[sequence] = (program, nodes)
        while len(self._programs) > REMEMBERED:
            self._programs.popitem(last=False)
        for failure in failures:
            if len(self._unseen) < REMEMBERED:
                self._unseen[_key(failure)] = failure

    def error(self, failure: Failure) -> DjinnError:
        """The error to raise for a value that failed, with op, shapes and the user's line."""
        self._unseen.pop(_key(failure), None)
        if failure.kind == "SessionLost":
            return SessionLost(failure.message)
        site, shapes = self._origin(failure)
        where = f" (operands of shape {shapes})" if shapes else ""
        line = f"\n  issued at {site}" if site else ""
        message = f"{failure.op or 'the executor'} failed{where}: {failure.message}{line}"
        return remote_error(failure.kind, message, failure.op, site)

    def _origin(self, failure: Failure) -> tuple[str, str]:
        program, nodes = self._programs.get(failure.sequence, (None, ()))
        if program is None or not 0 <= failure.instruction < len(nodes):
            return "", ""
        node = nodes[failure.instruction]
        return program.site(node), ", ".join(str(list(m.shape)) for m in program.calls[node].operands)

    def take_unseen(self) -> DjinnError | None:
        """The first failure since the last call that no fetch has reported."""
        if not self._unseen:
            return None
        first = next(iter(self._unseen.values()))
        self._unseen.clear()
        return self.error(first)


def _key(failure: Failure) -> tuple[int, int]:
    return failure.sequence, failure.instruction
