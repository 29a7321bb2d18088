"""Programs to templates: what stays the same, and where the rest goes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import attrs

from djinn_core.ir.form import Form
from djinn_core.ir.plan import conditions_hold
from djinn_core.ir.program import Instruction, Program
from djinn_core.wire.messages import Template
from djinn_core.wire.templates import digest_of


@attrs.define(eq=False)
class Prepared:
    """A program's template, planned once and used for every program of the same structure.

    Attributes:
        template, digest: what the executor runs.
        inputs, outputs: positions, in the program's values by first appearance, of the template's inputs and outputs.
        nodes: for each instruction of the template, its index in the program.
        slots: positions of the template's slots in the program's; None: all, in order.
        equal_slots: pairs of positions in the program's slots that must be equal for this to hold.
        claims: instructions of the template whose layout no executor has confirmed yet.
    """

    template: Template
    digest: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[int, ...]
    slots: tuple[int, ...] | None
    equal_slots: tuple[tuple[int, int], ...]
    claims: tuple[int, ...]

    def holds_for(self, program: Program) -> bool:
        """Whether `program`, of the right structure, also has the scalars that the plan relied on."""
        return conditions_hold(self.equal_slots, program.slots)


def make_template(
    program: Program,
    nodes: Sequence[int],
    replace: Mapping[int, int],
    equal_slots: tuple[tuple[int, int], ...],
    dead: Container[int] | None = None,
) -> Prepared:
    """The template that runs `nodes` of `program`, with values replaced as the plan says.

    `dead`: values that are forgotten when it has run; None: those that die with the program.
    """
    builder = _Builder(program, replace, program.dead if dead is None else dead)
    instructions = list(program.instructions())
    for index in nodes:
        builder.add(instructions[index])
    return builder.finish(tuple(nodes), _slot_positions(instructions, nodes), equal_slots)


def _slot_positions(instructions: Sequence[Instruction], nodes: Sequence[int]) -> tuple[int, ...] | None:
    if list(nodes) == list(range(len(instructions))):
        return None
    starts: list[int] = []
    total = 0
    for instruction in instructions:
        starts.append(total)
        total += len(instruction.slots)
    return tuple(starts[n] + i for n in nodes for i in range(len(instructions[n].slots)))


class _Builder:
    def __init__(self, program: Program, replace: Mapping[int, int], dead: Container[int]) -> None:
        self.program = program
        self.dead = dead
        self.replace = replace
        self.forms: dict[Form, int] = {}
        self.code: list[int] = []
        self.references: list[int] = []
        self.numbers: dict[int, int] = {}
        self.inputs: list[int] = []
        self.made: list[int] = []

    def add(self, instruction: Instruction) -> None:
        form = instruction.call.signature.form
        self.code.append(self.forms.setdefault(form, len(self.forms)))
        for given in instruction.inputs:
            handle = self.replace.get(given, given)
            if handle not in self.numbers:
                self.inputs.append(handle)
            self.references.append(self.numbers.setdefault(handle, len(self.numbers)))
        for handle in instruction.outputs:
            self.made.append(handle)
            self.references.append(self.numbers.setdefault(handle, len(self.numbers)))

    def finish(
        self, nodes: tuple[int, ...], slots: tuple[int, ...] | None, equal_slots: tuple[tuple[int, int], ...]
    ) -> Prepared:
        dead = self.dead
        outputs = [h for h in self.made if h not in dead]
        template = Template(
            forms=tuple(self.forms),
            code=tuple(self.code),
            references=tuple(self.references),
            inputs=tuple(self.numbers[h] for h in self.inputs),
            outputs=tuple(self.numbers[h] for h in outputs),
            consumed=tuple(self.numbers[h] for h in self.inputs if h in dead),
        )
        positions = {handle: i for i, handle in enumerate(dict.fromkeys(self.program.operands))}
        return Prepared(
            template=template,
            digest=digest_of(template),
            inputs=tuple(positions[h] for h in self.inputs),
            outputs=tuple(positions[h] for h in outputs),
            nodes=nodes,
            slots=slots,
            equal_slots=equal_slots,
            claims=tuple(range(len(nodes))),
        )
