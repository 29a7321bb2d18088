"""Templates of programs: the constant part of repeated programs, and the positions of the variable part."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from djinn_core.ir.form import Form
from djinn_core.ir.program import Call, Instruction, Program, Slot, conditions_hold, interchangeable
from djinn_core.ir.slot_arrays import Words
from djinn_core.wire.messages import Template, ValueHints
from djinn_core.wire.templates import digest_of

if TYPE_CHECKING:
    from djinn_core.ir.graph import Graph
    from djinn_core.ir.plan import Rewrite
    from djinn_core.ir.profile import WorkloadProfile
    from djinn_core.ir.result import PipelineResult
    from djinn_core.ir.substitution import Recipe, RewrittenProgram


class TemplateRewrite(msgspec.Struct, frozen=True, eq=False):
    """Additions of a prepared template that came from a rewritten program.

    Attributes:
        rewritten: the rewrite.
        calls: calls that the rewrite added, by instruction of the template.
        constants: slots that the rewrite added.
        fixed_slots: (position among the program's slots, number) of numbers that must not change.
        recipes: recipes, each with its identity and the positions of its source weights among the program's values.
    """

    rewritten: RewrittenProgram
    calls: Mapping[int, Call]
    constants: tuple[Slot, ...]
    fixed_slots: tuple[tuple[int, Slot], ...]
    recipes: tuple[tuple[Recipe, Hashable, tuple[int, ...]], ...]

    def holds_for(self, program: Program) -> bool:
        """Return True if `program` equals the original in every rewritten instruction, including sizes and numbers."""
        return are_unchanged(program, self.rewritten.required_calls, self.fixed_slots)


def are_unchanged(
    program: Program, relied_calls: Iterable[tuple[int, Call]], fixed_slots: Iterable[tuple[int, Slot]]
) -> bool:
    """Return True if `program` has equal operand metadata in these calls, and equal numbers in these slots.

    `relied_calls` and `fixed_slots` are as in `PreparedTemplate`.
    """
    calls, slots = program.calls, program.slots
    return all(calls[node] is call or calls[node].operands == call.operands for node, call in relied_calls) and all(
        interchangeable(slots[position], slot) for position, slot in fixed_slots
    )


def rewritten_nodes(graph: Graph, rewrites: Iterable[Rewrite]) -> tuple[int, ...]:
    """Return, in order, the nodes that rewrites drop, and the nodes of replaced values and of their replacements."""
    nodes: set[int] = set()
    for rewrite in rewrites:
        nodes.update(rewrite.drop)
        makers = (graph.producer(value) for pair in rewrite.replace.items() for value in pair)
        nodes.update(maker.id for maker in makers if maker is not None)
    return tuple(sorted(nodes))


Dependencies = tuple[tuple[tuple[int, Call], ...], tuple[tuple[int, Slot], ...]]


def plan_dependencies(program: Program, result: PipelineResult, unsure: Container[str]) -> Dependencies:
    """Return the fields `relied_calls` and `fixed_slots` of a prepared template for the plan `result` of `program`.

    They contain the nodes that the optimizations named in `unsure` have rewritten. If the program was recorded again,
    they contain all nodes, because the new program's nodes have other numbers.
    """
    results = result.plan.results if result.plan is not None else ()
    rewrites = [r.rewrite for r in results if r.applied and r.optimization in unsure]
    if not rewrites:
        return (), ()
    from djinn_core.ir.graph import Graph  # imported here, because only planning needs it

    rerecorded = result.schedule is not None and result.schedule.rewritten is not None
    nodes = range(len(program)) if rerecorded else rewritten_nodes(Graph(program), rewrites)
    _, starts = _laid_out(program)
    positions = [p for node in nodes for p in range(starts[node], starts[node + 1])]
    return tuple((node, program.calls[node]) for node in nodes), tuple((p, program.slots[p]) for p in positions)


class PreparedTemplate(msgspec.Struct, eq=False):
    """The template of a program, planned once and used for every program of the same structure.

    Attributes:
        template: the template for the executor.
        digest: digest of the template.
        inputs: positions of the template's inputs among the program's values, in order of first use.
        outputs: positions of the template's outputs among these values.
        nodes: for each instruction of the template, its index in the program.
        slots: positions of the template's slots among the program's slots. None: all slots, in order.
        equal_slots: pairs of slot positions that must hold equal numbers.
        unused: positions of dying values that no instruction of the template uses, because their instructions do not
            run. They are freed separately.
        claims: instructions with predicted layouts that no executor has confirmed yet.
        written: positions of the program's values that are written.
        rewrite: additions of a template of a rewritten program. Positions and nodes are then those of the original
            program, and negative positions of slots count `rewrite.constants` from the end.
        predicted_seconds: estimated seconds of a run, or None without a cost model.
        calibrated: True if the estimate uses measured speeds.
        note_seconds: called with the executor's seconds of each run, or None.
        relied_calls: (node, call) of calls whose operand metadata must not change, because a rewrite may depend on them.
        fixed_slots: (position among the program's slots, number) of numbers on which a rewrite may depend.
        size_bound: names of the optimizations that restrict the template to exact sizes.
        hints: kinds of the template's values, for an executor that may evict, or None.
        hints_sent: True once the hints were sent.
        profile: workload profile of the template's first program, or None if it was not analysed.
        is_planned: True if the template comes from a plan. False if it runs the program as recorded.
    """

    template: Template
    digest: bytes
    inputs: Words
    outputs: Words
    nodes: tuple[int, ...]
    slots: Words | None
    equal_slots: tuple[tuple[int, int], ...]
    claims: tuple[int, ...]
    written: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    rewrite: TemplateRewrite | None = None
    predicted_seconds: float | None = None
    calibrated: bool = False
    note_seconds: Callable[[float], None] | None = None
    relied_calls: tuple[tuple[int, Call], ...] = ()
    fixed_slots: tuple[tuple[int, Slot], ...] = ()
    size_bound: tuple[str, ...] = ()
    hints: ValueHints | None = None
    hints_sent: bool = False
    profile: WorkloadProfile | None = None
    is_planned: bool = False

    def __repr__(self) -> str:
        return f"PreparedTemplate({self.digest.hex()})"  # a longer text would take time proportional to the program

    @property
    def depends_on_sizes(self) -> bool:
        """Return True if the template is valid only for the exact sizes of some instructions."""
        return self.rewrite is not None or bool(self.relied_calls)

    def holds_for(self, program: Program) -> bool:
        """Return True if the template is valid for `program`, which has the template's structure."""
        if self.rewrite is not None and not self.rewrite.holds_for(program):
            return False
        if self.relied_calls and not are_unchanged(program, self.relied_calls, self.fixed_slots):
            return False
        return not self.equal_slots or conditions_hold(self.equal_slots, program.slots)

    def call(self, instruction: int, program: Program) -> Call:
        """Return the call of the template's instruction `instruction` in a run for `program`."""
        if self.rewrite is not None and (new_call := self.rewrite.calls.get(instruction)) is not None:
            return new_call
        return program.calls[self.nodes[instruction]]


def make_template(
    program: Program,
    nodes: Sequence[int],
    replace: Mapping[int, int],
    equal_slots: tuple[tuple[int, int], ...],
    dead: Container[int] | None = None,
    rewritten: RewrittenProgram | None = None,
) -> PreparedTemplate:
    """Return the template that runs `nodes` of `program`, with values replaced as in the plan.

    Args:
        program: the program.
        nodes: the nodes that run, in order.
        replace: for each replaced value, its replacement.
        equal_slots: pairs of positions of slots that must hold equal numbers.
        dead: values to free after the template. None: the values that die with the program.
        rewritten: the rewrite that created `program`, or None. The template is then for runs of the original program.
    """
    builder = _Builder(program, replace, program.dead if dead is None else dead)
    instructions, starts = _laid_out(program)
    for index in nodes:
        builder.add(instructions[index])
    slots = _slot_positions(instructions, starts, nodes)
    if rewritten is None:
        values: Iterable[int] = dict.fromkeys(program.operands)
        prepared = builder.finish(tuple(nodes), slots, equal_slots, values)
        origin = program
    else:
        values, origin = rewritten.values, rewritten.origin
        prepared = _for_origin(builder.finish(tuple(nodes), slots, (), values), rewritten, equal_slots)
    if dead is None and origin.dead:
        unused = {value for value in dying_inputs(origin) if value not in builder.number_by_handle}
        prepared.unused = tuple([i for i, value in enumerate(values) if value in unused]) if unused else ()
    return prepared


def dying_inputs(program: Program) -> list[int]:
    """Return the inputs of a program that die with it."""
    outputs = {value for instruction in program.instructions() for value in instruction.outputs}
    return [value for value in program.dead if value not in outputs]


@functools.lru_cache(maxsize=2)  # a program may be prepared in several parts
def _laid_out(program: Program) -> tuple[list[Instruction], list[int]]:
    """Return the instructions of a program, and for each of them the position of its first slot."""
    instructions = list(program.instructions())
    return instructions, list(itertools.accumulate((len(i.slots) for i in instructions), initial=0))


def _slot_positions(
    instructions: Sequence[Instruction], starts: Sequence[int], nodes: Sequence[int]
) -> tuple[int, ...] | None:
    if len(nodes) == len(instructions) and list(nodes) == list(range(len(instructions))):
        return None
    return tuple(starts[n] + i for n in nodes for i in range(len(instructions[n].slots)))


def _for_origin(
    prepared: PreparedTemplate, rewritten: RewrittenProgram, equal_slots: tuple[tuple[int, int], ...]
) -> PreparedTemplate:
    """Return the template of a rewritten program, translated to the original program."""
    slot_numbers = range(len(rewritten.slots)) if prepared.slots is None else prepared.slots.tolist()
    constants = [rewritten.program.slots[i] for i in slot_numbers if rewritten.slots[i] < 0]
    constant_numbers = iter(range(-len(constants), 0))
    slots = tuple(rewritten.slots[i] if rewritten.slots[i] >= 0 else next(constant_numbers) for i in slot_numbers)
    rewrite = TemplateRewrite(
        rewritten,
        {i: rewritten.program.calls[n] for i, n in enumerate(prepared.nodes) if n in rewritten.own},
        tuple(constants),
        *_conditions(rewritten, equal_slots),
    )
    return msgspec.structs.replace(
        prepared, nodes=tuple(rewritten.nodes[n] for n in prepared.nodes), slots=_array(slots), rewrite=rewrite
    )


@functools.lru_cache(maxsize=2)
def _conditions(
    rewritten: RewrittenProgram, equal_slots: tuple[tuple[int, int], ...]
) -> tuple[tuple[tuple[int, Slot], ...], tuple[tuple[Recipe, Hashable, tuple[int, ...]], ...]]:
    """Return the fields `fixed_slots` and `recipes` of a `TemplateRewrite`."""
    _, starts = _laid_out(rewritten.origin)
    compared = {rewritten.slots[i] for pair in equal_slots for i in pair} - {-1}
    compared.update(p for node, _ in rewritten.required_calls for p in range(starts[node], starts[node + 1]))
    positions = {value: i for i, value in enumerate(rewritten.values)}
    recipes = ((r, r.identity, tuple(positions[v] for v in r.sources)) for r in rewritten.recipes)
    return tuple((p, rewritten.origin.slots[p]) for p in sorted(compared)), tuple(recipes)


def _array(positions: Sequence[int]) -> Words:
    return np.array(positions, np.int64)


class _Builder:
    def __init__(self, program: Program, replace: Mapping[int, int], dead: Container[int]) -> None:
        self.program = program
        self.dead = dead
        self.replace = replace
        self.forms: dict[Form, int] = {}
        self.code: list[int] = []
        self.references: list[int] = []
        self.number_by_handle: dict[int, int] = {}
        self.inputs: list[int] = []
        self.new_values: list[int] = []
        self.written_values: dict[int, None] = {}

    def add(self, instruction: Instruction) -> None:
        form = instruction.call.signature.form
        self.code.append(self.forms.setdefault(form, len(self.forms)))
        for value in instruction.inputs:
            handle = self.replace.get(value, value)
            if handle not in self.number_by_handle:
                self.inputs.append(handle)
            self.references.append(self.number_by_handle.setdefault(handle, len(self.number_by_handle)))
        self.written_values.update(dict.fromkeys(self.replace.get(h, h) for h in instruction.writes))
        for handle in instruction.outputs:
            self.new_values.append(handle)
            self.references.append(self.number_by_handle.setdefault(handle, len(self.number_by_handle)))

    def finish(
        self,
        nodes: tuple[int, ...],
        slots: tuple[int, ...] | None,
        equal_slots: tuple[tuple[int, int], ...],
        values: Iterable[int],
    ) -> PreparedTemplate:
        dead = self.dead
        outputs = [h for h in self.new_values if h not in dead]
        template = Template(
            forms=tuple(self.forms),
            code=tuple(self.code),
            references=tuple(self.references),
            inputs=tuple(self.number_by_handle[h] for h in self.inputs),
            outputs=tuple(self.number_by_handle[h] for h in outputs),
            consumed=tuple(self.number_by_handle[h] for h in self.inputs if h in dead),
        )
        positions = {handle: i for i, handle in enumerate(values)}
        return PreparedTemplate(
            template=template,
            digest=digest_of(template),
            inputs=_array([positions[h] for h in self.inputs]),
            outputs=_array([positions[h] for h in outputs]),
            nodes=nodes,
            slots=None if slots is None else _array(slots),
            equal_slots=equal_slots,
            claims=tuple(range(len(nodes))),
            written=tuple(positions[h] for h in self.written_values),
        )
