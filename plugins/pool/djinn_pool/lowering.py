"""Convert a schedule for several executors to the steps that the client sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import attrs

from djinn_client.runtime.sending.template import make_template
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import RANDOM_STATE, storage_of
from djinn_core.ir.indexes import POOL, index_of_node
from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule, Fetch, Free, Receive, Run, Send, Step, Upload
from djinn_pool.parts import AwaitStep, FreeStep, PooledPlan, PoolStep, RunPart, TransferStep, UploadStep, own_values
from djinn_pool.value_locations import ValueLocations


@attrs.frozen
class ProgramPlacement:
    """Decisions of the planning stages about a program.

    Attributes:
        graph: graph of the program that runs.
        homes: executor of each value.
        executors: number of each executor, by device id.
        schedule: steps of each device.
        origin: graph of the recorded program. It differs from `graph` if a rewrite changed the program.
        names: handles of values derived from weights, by their value ids in `graph`.
    """

    graph: Graph
    homes: Mapping[int, int]
    executors: Mapping[str, int]
    schedule: ExecutionSchedule
    origin: Graph
    names: Mapping[int, int] = attrs.field(factory=dict)

    @property
    def values(self) -> tuple[int, ...]:
        """Return the values of the recorded program in order of appearance, then those of the rewritten program."""
        rewritten = self.schedule.rewritten
        return tuple(dict.fromkeys(self.origin.program.operands)) if rewritten is None else rewritten.values

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return the inputs of the recorded program, then further inputs of the rewritten program."""
        if self.schedule.rewritten is None:
            return self.graph.inputs
        return tuple(dict.fromkeys((*self.origin.inputs, *self.graph.inputs)))

    def called(self, values: Sequence[int]) -> list[int]:
        """Return the client's handles of the values with these ids."""
        return [self.names.get(v, v) for v in values] if self.names else list(values)


def build_plan(planned: ProgramPlacement, locations: ValueLocations, random: int | None) -> PooledPlan:
    """Return the plan of a program: its steps and their effects on locations.

    Args:
        planned: the decisions of the planning stages.
        locations: locations of the values before the program.
        random: the executor that has the random state, or None if no random op has run yet.
    """
    graph = planned.graph
    positions = {value: i for i, value in enumerate(planned.values)}
    writer = _Writer(planned, locations)
    parts = _interleaved({e: writer.write(e, steps) for e, steps in writer.steps.items()})
    drawing = {n.id for n in graph.nodes if n.random and index_of_node(graph, n) == POOL}
    draws = {e for e, steps in writer.steps.items() for s in steps if isinstance(s, Run) and drawing & set(s.nodes)}
    ledger = _Ledger(planned, locations)
    ledger.follow(parts)
    parts = _join_frees([*parts, *ledger.leftovers()])
    rewrite = next((p.prepared.rewrite for p in parts if isinstance(p, RunPart)), None)
    return PooledPlan(
        parts=tuple(_by_position(part, positions) for part in parts),
        inputs=tuple(positions[v] for v in planned.inputs),
        where=locations.of(planned.called(planned.inputs)),
        random=next(iter(draws), None),
        drew_from=random,
        equal_slots=planned.schedule.equal_slots if rewrite is None else (),
        made=tuple((positions[v], e, _nbytes(graph, v)) for v, e in ledger.made.items()),
        leaves=_left_behind(planned, ledger, locations),
        moved=tuple((positions[v], e) for v, e in ledger.moved.items()),
        copied=tuple((positions[v], e) for v, e in sorted(ledger.copied)),
        dropped=tuple((positions[v], e) for v, e in sorted(ledger.dropped)),
        written=tuple(positions[v] for v in ledger.written),
        dead=tuple(positions[v] for v in planned.inputs if v in ledger.dead),
        rewrite=rewrite,
        own=() if rewrite is None else own_values(rewrite.rewritten),
    )


def _nbytes(graph: Graph, value: int) -> int:
    meta = graph.meta(value)
    return meta.extent * meta.dtype.itemsize


def _left_behind(planned: ProgramPlacement, ledger: _Ledger, locations: ValueLocations) -> tuple[tuple[int, int], ...]:
    """Return pairs of an executor and the bytes that the program allocates on it and does not free."""
    sizes: dict[int, tuple[int, int]] = {}
    for value, executor in ledger.made.items():
        storage = storage_of(planned.names.get(value, value))
        if storage not in locations.homes:
            sizes[storage] = executor, max(_nbytes(planned.graph, value), sizes.get(storage, (0, 0))[1])
    remaining: dict[int, int] = defaultdict(int)
    for executor, nbytes in sizes.values():
        remaining[executor] += nbytes
    return tuple((executor, nbytes) for executor, nbytes in remaining.items() if nbytes)


class _Writer:
    """Converts the scheduled steps of each executor to steps of the pool."""

    def __init__(self, planned: ProgramPlacement, locations: ValueLocations) -> None:
        self.planned = planned
        self.program = planned.schedule.program
        self.locations = locations
        self.steps = {planned.executors[device]: steps for device, steps in planned.schedule.steps.items()}
        self.moved: set[tuple[int, int]] = set()

    def write(self, executor: int, steps: Sequence[Step]) -> list[PoolStep]:
        self.parts: list[PoolStep] = []
        self.nodes: list[int] = []
        self.freed: list[int] = []
        self.executor = executor
        for step in steps:
            self._add_step(step)
        self._flush()
        return self.parts

    def _add_step(self, step: Step) -> None:
        if isinstance(step, Run):
            self.nodes += step.nodes
        elif isinstance(step, Free):
            self.freed += step.values
        elif isinstance(step, Upload):
            self.parts.append(UploadStep(self.executor, step.value))
        elif isinstance(step, Send):
            self._flush()
            carry = self._carry(self.executor, self.planned.executors[step.target], step.value)
            if carry is not None:
                self.parts.append(carry)
        elif isinstance(step, Receive):
            self._flush()
            carry = self._carry(self.planned.executors[step.source], self.executor, step.value)
            if carry is not None:
                self.parts.append(AwaitStep(self.executor, carry))
        else:
            assert isinstance(step, Fetch)

    def _carry(self, source: int, target: int, value: int) -> TransferStep | None:
        """Return the transfer of a value, or None if an earlier transfer of this executor moves the value's storage."""
        before = self.locations.homes.get(storage_of(self.planned.names.get(value, value)))
        move = before == source and self.planned.homes[value] == target
        if move:
            key = (storage_of(value), self.executor)
            if key in self.moved:
                return None
            self.moved.add(key)
        return TransferStep(source, target, value, move)

    def _flush(self) -> None:
        """Append the collected ops as one part that also frees values it uses. Other collected frees become a separate step."""
        freed, nodes = frozenset(self.freed), self.nodes
        self.freed, self.nodes = [], []
        if nodes:
            schedule = self.planned.schedule
            rewritten = schedule.rewritten
            equal = schedule.equal_slots if rewritten is not None else ()  # otherwise the plan checks these conditions
            template = make_template(self.program, nodes, schedule.replace, equal, freed, rewritten)
            graph, replace = self.planned.graph, schedule.replace
            inputs = {replace.get(v, v) for n in nodes for v in graph.nodes[n].inputs}
            inputs.update(v for n in nodes for v in graph.nodes[n].outputs)
            self.parts.append(RunPart(self.executor, template, tuple(freed & inputs)))
            freed -= inputs
        if freed:
            self.parts.append(FreeStep(self.executor, tuple(sorted(freed))))


def _interleaved(parts: Mapping[int, Sequence[PoolStep]]) -> list[PoolStep]:
    """Merge the steps of all executors into one list in which each transfer precedes the matching wait."""
    order: list[PoolStep] = []
    at = dict.fromkeys(parts, 0)
    pending_transfers: dict[TransferStep, int] = defaultdict(int)
    while any(at[e] < len(parts[e]) for e in parts):
        before = len(order)
        for executor, own in parts.items():
            while at[executor] < len(own):
                part = own[at[executor]]
                if isinstance(part, AwaitStep):
                    if not pending_transfers[part.carry]:
                        break
                    pending_transfers[part.carry] -= 1
                elif isinstance(part, TransferStep):
                    pending_transfers[part] += 1
                order.append(part)
                at[executor] += 1
        assert len(order) > before, "a verified schedule has no cycle of waits"
    return order


def _join_frees(parts: Sequence[PoolStep]) -> list[PoolStep]:
    """Attach each free to the executor's next part, because a separate message takes longer than a small op.

    The part frees the values before it runs. Frees after the last part remain separate steps. So do frees before an
    upload, which may need the memory, and before the arrival of a value of a freed storage.
    """
    merged_steps: list[PoolStep] = []
    waiting: dict[int, list[int]] = {}
    for part in parts:
        if isinstance(part, FreeStep):
            waiting.setdefault(part.executor, []).extend(part.values)
            continue
        if isinstance(part, RunPart):
            freed = tuple(waiting.pop(part.executor, ()))
            merged_steps.append(attrs.evolve(part, free=freed) if freed else part)
            continue
        if not isinstance(part, TransferStep) and part.executor in waiting:
            arriving = storage_of(part.carry.value) if isinstance(part, AwaitStep) else None
            if arriving is None or arriving in map(storage_of, waiting[part.executor]):
                merged_steps.append(FreeStep(part.executor, tuple(waiting.pop(part.executor))))
        merged_steps.append(part)
    return [*merged_steps, *(FreeStep(executor, tuple(values)) for executor, values in waiting.items())]


class _Ledger:
    """Tracks how the steps of a plan change the locations of values. Pairs are of value and executor.

    Attributes:
        dead: values that the user's program frees.
        written: values that ops write.
        made: new values with their executor.
        moved: values whose storage moves, with their new executor.
        before: pairs of copies before the program.
        held: pairs of inputs and copies that are still in memory.
        copied: pairs of new copies that are valid after the program.
        dropped: pairs of earlier copies that the program frees.
    """

    def __init__(self, planned: ProgramPlacement, locations: ValueLocations) -> None:
        self.planned = planned
        self.graph = planned.graph
        self.dead = planned.schedule.program.dead | planned.origin.program.dead
        nodes = [n for steps in planned.schedule.steps.values() for s in steps if isinstance(s, Run) for n in s.nodes]
        self.nodes = [self.graph.nodes[n] for n in sorted(nodes)]
        self.written = list(dict.fromkeys(v for n in self.nodes for v in n.writes))
        self.made = {v: planned.homes[v] for n in self.nodes for v in n.outputs if v not in self.dead}
        self.moved: dict[int, int] = {}
        handles = dict(zip(planned.inputs, planned.called(planned.inputs), strict=True))
        self.before = {(v, e) for v, name in handles.items() for e in locations.copies(name) or ()}
        homes = {v: planned.homes.get(v, locations.homes.get(storage_of(name))) for v, name in handles.items()}
        self.held = {(v, home) for v, home in homes.items() if home is not None} | self.before
        self.copied: set[tuple[int, int]] = set()
        self.dropped: set[tuple[int, int]] = set()

    def follow(self, parts: Sequence[PoolStep]) -> None:
        stale = {storage_of(v) for v in self.written}
        for part in parts:
            if isinstance(part, UploadStep):
                self.made[part.value] = part.executor
            elif isinstance(part, TransferStep) and part.move:
                self.moved[part.value] = part.target
            elif isinstance(part, TransferStep):
                self.copied.add((part.value, part.target))
            elif isinstance(part, FreeStep):
                self._forget(part.values, part.executor)
            elif isinstance(part, RunPart):
                self._forget(part.dead, part.executor)
        self.out_of_date = {(v, e) for v, e in self.copied if storage_of(v) in stale}
        self.copied -= self.out_of_date

    def leftovers(self) -> list[FreeStep]:
        """Return the steps that free outdated copies, and inputs that the user's program has freed."""
        leftovers = self.out_of_date | {(v, e) for v, e in self.held | self.copied if v in self.dead}
        self.copied -= leftovers
        by_executor: dict[int, list[int]] = defaultdict(list)
        for value, executor in sorted(leftovers):
            by_executor[executor].append(value)
        return [FreeStep(executor, tuple(values)) for executor, values in by_executor.items()]

    def _forget(self, values: Sequence[int], executor: int) -> None:
        for value in values:
            self.copied.discard((value, executor))
            self.held.discard((value, executor))
            if (value, executor) in self.before:
                self.dropped.add((value, executor))


def _by_position(part: PoolStep, positions: Mapping[int, int]) -> PoolStep:
    """Return a step with positions in place of value ids. `positions`: position of each value id in the plan."""
    if isinstance(part, UploadStep | TransferStep):
        return attrs.evolve(part, value=positions[part.value])
    if isinstance(part, AwaitStep):
        return attrs.evolve(part, carry=attrs.evolve(part.carry, value=positions[part.carry.value]))
    if isinstance(part, FreeStep):
        return attrs.evolve(part, values=tuple(positions[v] for v in part.values))
    return attrs.evolve(part, dead=(), free=tuple(positions[v] for v in part.free))


def resident(program: Program, graph: Graph, locations: ValueLocations, random: int | None) -> dict[int, int]:
    """Return the executor that holds the memory of each input. `random`: the executor that has the random state, or None."""
    homes = {v: locations.homes.get(storage_of(v)) for v in graph.inputs}
    if random is not None and any(call.random for call in program.calls):
        homes[RANDOM_STATE] = random
    return {value: home for value, home in homes.items() if home is not None}
