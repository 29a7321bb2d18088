"""A router of a stranger's: each op runs on the executor that has the memory that it writes, views or reads first."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from djinn.hooks import Executors, Part, Router, Submission, hookimpl
from djinn.planning import Instruction, Program, storage_of

djinn_api_version = "2.0"
NOTHING = Program((), (), ())


class ByMemory(Router):
    """Uploads and new values go to executors in turn, or to the executor of the device that the program names."""

    name = "by_memory"

    def begin(self, executors: Executors, existing_values: Iterable[tuple[int, int]] | None = None) -> None:
        super().begin(executors)
        self._homes = {storage_of(value): 0 for value, _ in existing_values or ()}
        self._turns = itertools.count()

    def home(self, storage: int) -> int | None:
        return self._homes.get(storage)

    def upload(self, handle: int, source, device: int = 0) -> None:
        number = self.executors.number_at(device) if device else self._turn()
        self._homes[storage_of(handle)] = number
        self.executors.members[number].upload(handle, source)

    def join(self, numbers: Sequence[int]) -> None:
        """Let all executors take turns from now on."""

    def _turn(self) -> int:
        return self.executors.present[next(self._turns) % len(self.executors.present)]

    def _executor(self, op: Instruction) -> int:
        """Return the executor of an op. All random ops run on one executor."""
        aliased = [op.inputs[i] for i in {*op.call.writes, *op.call.aliases} - {-1}]
        found = {self._homes[storage_of(value)] for value in aliased}
        if len(found) > 1:
            raise NotImplementedError(f"{op.op} writes memory of several executors: move its tensors to one device")
        known = [self._homes[storage_of(value)] for value in op.inputs]
        if op.call.random:
            return 0
        return next(iter(found or known), None) if found or known else self._turn()

    def route(self, submission: Submission) -> list[Part]:
        places: list[int] = []
        for op in submission.program.instructions():
            places.append(self._executor(op))
            for value in op.outputs:
                self._homes.setdefault(storage_of(value), places[-1])
        starts = [i for i in range(1, len(places)) if places[i] != places[i - 1]]
        parts, rest = [], defaultdict(list)
        for first, piece in zip([0, *starts] if places else (), submission.program.cut(starts), strict=False):
            parts.append(self._part(piece, places[first], rest))
        for value in submission.free:
            if storage_of(value) in self._homes:  # otherwise it is of an earlier session
                rest[self._homes[storage_of(value)], "free"].append(value)
        for name in ("fetch", "describe"):
            for value in getattr(submission, name):
                rest[self._homes[storage_of(value)], name].append(value)
        for number in self.executors.present:
            asked = {name: tuple(rest[number, name]) for name in ("free", "fetch", "describe")}
            if submission.synchronize or any(asked.values()):
                later = submission.later if asked["fetch"] else None
                last = Submission(NOTHING, **asked, synchronize=submission.synchronize, later=later)
                parts.append(Part(number, last))
        return parts

    def _part(self, piece: Program, number: int, rest: dict[tuple[int, str], list[int]]) -> Part:
        """Return the part of the program for one executor. Copies of other executors' values are freed after it."""
        made, brings = set(), {}
        for op in piece.instructions():
            made.update(op.outputs)
            for value in set(op.inputs) - made:
                if (home := self._homes[storage_of(value)]) != number:
                    brings[value] = home
        for value in piece.dead & brings.keys():
            rest[brings[value], "free"].append(value)
        return Part(number, Submission(piece, free=tuple(brings.keys() - piece.dead)), tuple(brings.items()))


@hookimpl
def djinn_register_routers() -> list[Router]:
    return [ByMemory()]
