"""Steps of a plan for several executors (upload, run, transfer, await, free), in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_client.runtime.sending.template import Dependencies, PreparedTemplate, TemplateRewrite, are_unchanged
from djinn_core.ir.handles import make_handle, new_storage, storage_of, storages_of, views_of
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program, conditions_hold
from djinn_core.ir.substitution import RewrittenProgram
from djinn_pool.value_locations import Made, ValueLocations, Where

# By value: number of its storage in the plan; position of a recorded value with the same storage, or -1; number of the
# value among those of the storage.
Own = tuple[tuple[int, int, int], ...]


@attrs.frozen
class UploadStep:
    """Send a deferred upload to an executor."""

    executor: int
    value: int


@attrs.frozen
class RunPart:
    """Run a part of the program on an executor, which frees the values `free` before and the values `dead` afterwards."""

    executor: int
    prepared: PreparedTemplate
    dead: tuple[int, ...] = ()
    free: tuple[int, ...] = ()


@attrs.frozen
class TransferStep:
    """Send a value from executor `source` to executor `target`. If `move` is True, its storage moves with all views."""

    source: int
    target: int
    value: int
    move: bool


@attrs.frozen
class AwaitStep:
    """Make an executor wait for the values of the transfer `carry`."""

    executor: int
    carry: TransferStep


@attrs.frozen
class FreeStep:
    """Free values on an executor."""

    executor: int
    values: tuple[int, ...]


PoolStep = UploadStep | RunPart | TransferStep | AwaitStep | FreeStep


_ON_NOTHING: Final[Dependencies] = ((), ())


@attrs.define(eq=False)
class PooledPlan:
    """A plan over several executors for all programs of one structure whose inputs are at the same locations.

    Values are numbered by their first appearance in the program.

    Attributes:
        parts: the steps, in order.
        inputs: values that the program does not compute.
        where: locations of the inputs.
        random: executor that runs the random ops, or None if the program has none.
        drew_from: executor that had the random state when the plan was made, or None.
        equal_slots: pairs of slots whose numbers must be equal.
        made: new values that outlive the program, with executor and planned bytes.
        leaves: pairs of executor and additional bytes in use after the program.
        crowded: True if an executor had too little free memory for these bytes when the plan was made.
        moved: pairs of a value whose storage moves and its new executor.
        copied: pairs of a value and an executor that gets a copy.
        dropped: pairs of a value and an executor whose copy the plan frees.
        written: values whose memory the program writes.
        dead: inputs that the user's program has freed.
        rewrite: rewrite of the recorded program, or None if the plan runs it unchanged.
        own: values that exist only in the rewritten program.
        proposed: the executor that load balancing proposed, or None if the plan does not depend on a proposal.
        link_changes: number of link changes when the plan was made. The plan is valid while this number stays.
        profile: workload profile of the first program, or None.
        relied: instructions and slots that must be unchanged, as in `plan_dependencies`.
        alone: True if the plan uses one executor although several were predicted to be faster.
        executors: executors that run parts, in order.
        uploads: True if the plan sends deferred uploads.
        last_runs: index of the last part of each executor that ends with a run. Requests for values can be attached to it.
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
    proposed: int | None = None
    link_changes: int = 0
    crowded: bool = False
    profile: WorkloadProfile | None = attrs.field(default=None, repr=False)
    relied: Dependencies = _ON_NOTHING
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
        """Return True if the plan is valid: inputs and random state are where planned, and slots and calls as required.

        Args:
            program: a program of the plan's structure.
            values: handles of its values, by the plan's numbers.
            locations: present locations of all values.
            random: executor that has the random state, or None.
        """
        if self.random is not None and self.drew_from != random:
            return False
        if self.relied != _ON_NOTHING and not are_unchanged(program, *self.relied):
            return False
        where = locations.of(map(values.__getitem__, self.inputs))
        return where == self.where and (not self.equal_slots or conditions_hold(self.equal_slots, program.slots))

    def runs(self) -> Iterator[RunPart]:
        """Yield the steps that run parts of the program."""
        return (part for part in self.parts if isinstance(part, RunPart))


# --- values that only a rewritten program has: each run allocates new handles for them -------------------------------


def own_values(rewritten: RewrittenProgram) -> Own:
    """Return the values that exist only in a rewritten program: neither recorded nor derived from weights.

    Each is a triple of storage, position of a recorded value with the same storage (or -1), and view number.
    """
    recorded_values = dict.fromkeys(rewritten.origin.operands)
    derived_values = {value for recipe in rewritten.recipes for value in recipe.placeholders}
    anchors: dict[int, int] = {}
    for position, value in enumerate(recorded_values):
        anchors.setdefault(storage_of(value), position)
    own = [v for v in rewritten.values if v not in recorded_values and v not in derived_values]
    return tuple((s, anchors.get(s, -1), view) for s, view in zip(storages_of(own), views_of(own), strict=True))


def named(own: Own, values: Sequence[int]) -> list[int]:
    """Allocate handles for the values of `own_values` in one run. `values`: handles of the recorded program's values."""
    storages: dict[int, int] = {}
    names = []
    for storage, anchor, view in own:
        known_storage = storages.get(storage)
        if known_storage is None:
            known_storage = storages[storage] = storage_of(values[anchor]) if anchor >= 0 else new_storage()
        names.append(make_handle(known_storage, view))
    return names
