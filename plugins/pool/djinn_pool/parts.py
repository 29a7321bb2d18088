"""Instructions of a plan for several executors (upload, run, transfer, await, free), in the client's sending order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_client.runtime.sending.template import PreparedTemplate, Relied, TemplateRewrite, are_as_they_were
from djinn_core.ir.handles import make_handle, new_storage, storage_of, storages_of, views_of
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program, conditions_hold
from djinn_core.ir.substitution import RewrittenProgram
from djinn_pool.value_locations import Made, ValueLocations, Where

# By value: the number of its storage in the plan; the position of a value of the recorded program that looks into the same
# memory, or -1; and its number among those that do.
Own = tuple[tuple[int, int, int], ...]


@attrs.frozen
class UploadStep:
    """An upload that waits goes to an executor."""

    executor: int
    value: int


@attrs.frozen
class RunPart:
    """An executor runs a part of the program, after which it has forgotten what is `dead`; with it goes what to `free`."""

    executor: int
    prepared: PreparedTemplate
    dead: tuple[int, ...] = ()
    free: tuple[int, ...] = ()


@attrs.frozen
class TransferStep:
    """A value, or the memory that it looks into, goes from one executor to another."""

    source: int
    target: int
    value: int
    move: bool


@attrs.frozen
class AwaitStep:
    """An executor waits for what `carry` brings."""

    executor: int
    carry: TransferStep


@attrs.frozen
class FreeStep:
    """An executor forgets values."""

    executor: int
    values: tuple[int, ...]


PoolStep = UploadStep | RunPart | TransferStep | AwaitStep | FreeStep


_ON_NOTHING: Final[Relied] = ((), ())


@attrs.define(eq=False)
class PooledPlan:
    """A program planned for several executors, good for every program of its structure whose inputs are where they were.

    Values are positions among the program's values by first appearance.

    Attributes:
        parts: what to do, in order.
        inputs: the values that the program does not make. where: where they were.
        random: where random ops run; None if there are none. drew_from: where the random state was before.
        equal_slots: pairs of slots that have to be equal.
        made: new values that outlive the program, where, and their bytes when it was planned.
        leaves: executors that have more bytes afterwards, and how many; crowded: whether one had no room for them all the same.
        moved: values whose memory is elsewhere now, and where.
        copied: values of which there are copies, and where. dropped: copies that are gone.
        written: values whose memory is written. dead: inputs that the program holds no more afterwards.
        rewrite: how the program came of the recorded one, where it did. own: the values that it has beside that one's.
        turn: whose turn it was when it was made, where that makes a difference.
        link_changes: how often links had changed then. profile: what the first program was about.
        relied: instructions and slots that have to be what they were, as in `relied_on`.
        alone: whether it keeps to one executor where several were predicted to be faster.
        executors: those that run its parts, in their order. uploads: whether uploads that wait are sent for it.
        last_runs: by executor its last part, where that runs something: what is asked for can be asked for there.
    """

    parts: tuple[PoolStep, ...]
    inputs: tuple[int, ...]
    where: Where
    random: int | None
    drew_from: int | None
    equal_slots: tuple[tuple[int, int], ...]
    made: Made
    leaves: tuple[tuple[int, int], ...]
    moved: tuple[tuple[int, int], ...]
    copied: tuple[tuple[int, int], ...]
    dropped: tuple[tuple[int, int], ...]
    written: tuple[int, ...]
    dead: tuple[int, ...]
    rewrite: TemplateRewrite | None = None
    own: Own = ()
    turn: int | None = None
    link_changes: int = 0
    crowded: bool = False
    profile: WorkloadProfile | None = attrs.field(default=None, repr=False)
    relied: Relied = _ON_NOTHING
    alone: bool = False
    executors: tuple[int, ...] = attrs.field(init=False)
    uploads: bool = attrs.field(init=False)
    last_runs: Mapping[int, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.executors = tuple(part.executor for part in self.runs())
        self.uploads = any(isinstance(part, UploadStep) for part in self.parts)
        last = {part.executor: i for i, part in enumerate(self.parts) if not isinstance(part, TransferStep)}
        last |= {
            p.source: i for i, p in enumerate(self.parts) if isinstance(p, TransferStep) and i > last.get(p.source, -1)
        }
        self.last_runs = {e: i for e, i in last.items() if isinstance(self.parts[i], RunPart)}

    def holds_for(self, program: Program, values: Sequence[int], locations: ValueLocations, random: int | None) -> bool:
        """True if the values are on the executors that the plan expects, and the scalars have the values that it relies on."""
        if self.random is not None and self.drew_from != random:
            return False
        if self.relied != _ON_NOTHING and not are_as_they_were(program, *self.relied):
            return False
        where = locations.of(map(values.__getitem__, self.inputs))
        return where == self.where and (not self.equal_slots or conditions_hold(self.equal_slots, program.slots))

    def runs(self) -> Iterator[RunPart]:
        """The parts of the program."""
        return (part for part in self.parts if isinstance(part, RunPart))


# --- values that only a rewritten program has: each run allots them new handles ----------------------------------------


def own_values(rewritten: RewrittenProgram) -> Own:
    """Those of a rewritten program that come after the recorded ones and the derived ones, in the order of its values."""
    recorded = dict.fromkeys(rewritten.origin.operands)
    derived = {value for recipe in rewritten.recipes for value in recipe.makes}
    anchors: dict[int, int] = {}
    for position, value in enumerate(recorded):
        anchors.setdefault(storage_of(value), position)
    own = [v for v in rewritten.values if v not in recorded and v not in derived]
    return tuple((s, anchors.get(s, -1), view) for s, view in zip(storages_of(own), views_of(own), strict=True))


def named(own: Own, values: Sequence[int]) -> list[int]:
    """Handles for the values of a run, of which those of the recorded program are `values`."""
    storages: dict[int, int] = {}
    made = []
    for storage, anchor, view in own:
        there = storages.get(storage)
        if there is None:
            there = storages[storage] = storage_of(values[anchor]) if anchor >= 0 else new_storage()
        made.append(make_handle(there, view))
    return made
