"""Find row-wise instructions. A batch computes them once for the rows of several sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Literal

import attrs

from djinn_core.ir.form import Form, ListArg, Operand
from djinn_server.running.compiled_step import CompiledStep
from djinn_server.running.input_aliases import may_return_operand
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_strategies.batching.products import Product

# How an op treats rows, the first dimension of its operands:
# `each`: elementwise. Operands are rows, or are broadcast to each row.
# `norm`: over as many trailing dimensions as the list of sizes has. All operands but the first are weights.
# `dims`: along dimensions. All numbers of the op are dimensions.
# `view`: to other sizes. The first size stays unchanged.
Rule = Literal["each", "norm", "dims", "view"]
_EACH: Final = (
    "abs add.Tensor add.Scalar clamp cos div.Tensor div.Scalar erf exp gelu hardswish log mul.Tensor mul.Scalar neg pow.Tensor_Scalar "
    "reciprocal relu rsqrt rsub.Scalar sigmoid silu sin softplus sqrt square sub.Tensor sub.Scalar tanh"
)
RULES: Final[Mapping[str, Rule]] = {
    **{f"aten::{name}": "each" for name in _EACH.split()},
    "aten::layer_norm": "norm",
    "aten::rms_norm": "norm",
    "aten::mean.dim": "dims",
    "aten::_softmax": "dims",
    "aten::softmax.int": "dims",
    "aten::view": "view",
    "aten::_unsafe_view": "view",
}


@attrs.frozen
class RowStep:
    """An instruction that computes each row separately, if its operands satisfy `rule`.

    Attributes:
        step: number of the instruction.
        rule: condition that the operands must satisfy.
        operands: places of the operands in the environment.
        place: place of the result.
        slots: first place of its numeric arguments, and the place after the last one.
        span: length of the op's list of sizes: for a norm, the number of trailing dimensions that it reduces.
        release: places that can be freed after the instruction.
    """

    step: int
    rule: Rule
    operands: tuple[int, ...]
    place: int
    slots: tuple[int, int]
    span: int
    release: tuple[int, ...]


@attrs.frozen
class RowSteps:
    """The instructions of a template that may be row-wise.

    Attributes:
        steps: the instructions.
        unwritten: places of values whose memory the template never writes.
    """

    steps: tuple[RowStep, ...]
    unwritten: frozenset[int]


def find_rows(template: CompiledTemplate, written_inputs: Sequence[int]) -> RowSteps:
    """Return the instructions of a template that may be row-wise.

    `written_inputs`: positions of inputs whose memory the template may write.
    """
    roots = _roots(template)
    unwritten = _find_unwritten(template, roots, written_inputs)
    rows: list[RowStep] = []
    slot = len(template.constants)
    for index, code in enumerate(template.source.code if not template.moves else ()):
        form, step = template.source.forms[code], template.steps[index]
        row = _row_step(form, step, index, slot)
        if (
            row is not None
            and row.place in unwritten
            and (row.rule != "view" or _may_be_copy(template, roots, row.place))
        ):
            rows.append(row)
        slot += form.slot_count
    return RowSteps(tuple(rows), unwritten)


def find_chains(
    products: Sequence[Product], rows: Sequence[RowStep], steps: Collection[int] | None
) -> tuple[range, ...]:
    """Return chains: ranges of consecutive instructions that can be batched, each with at least one product.

    `steps`: the row-wise instructions to include. If None, all are included.
    """
    product_steps = {row.step for row in products}
    numbers = sorted(product_steps | {row.step for row in rows if steps is None or row.step in steps})
    return tuple(row for row in _ranges(numbers) if not product_steps.isdisjoint(row))


def _roots(template: CompiledTemplate) -> dict[int, frozenset[int]]:
    """Return for each place the places of the values whose memory it may share."""
    first = len(template.constants) + template.slots
    roots = {place: frozenset({place}) for place in range(first, first + template.inputs + template.computed)}
    for step in template.steps:
        if step.reads and (_is_custom(step) or may_return_operand(step.op)):
            operands = frozenset[int]().union(*(roots[place] for place in step.reads))
            roots.update((place, operands) for _, place in step.makes)
    return roots


def _find_unwritten(
    template: CompiledTemplate, roots: Mapping[int, frozenset[int]], written_inputs: Sequence[int]
) -> frozenset[int]:
    first, written_places = len(template.constants) + template.slots, set[int]()
    for step in template.steps:
        written_places.update(*(roots[place] for place in (step.reads if _is_custom(step) else step.writes)))
    if written_inputs:  # inputs may share memory
        written_places.update(range(first, first + template.inputs))
    return frozenset(place for place, shared_places in roots.items() if written_places.isdisjoint(shared_places))


def _may_be_copy(template: CompiledTemplate, roots: Mapping[int, frozenset[int]], place: int) -> bool:
    """Return True if a copy may replace a view: the view shares memory with no input and with at most one output."""
    first = len(template.constants) + template.slots
    if any(root < first + template.inputs for root in roots[place]):
        return False
    return sum(not roots[place].isdisjoint(roots[output]) for output in {*template.outputs}) <= 1


def _is_custom(step: CompiledStep) -> bool:
    return not step.op.startswith("aten::")


def _ranges(numbers: Sequence[int]) -> Iterator[range]:
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield range(numbers[start], numbers[index - 1] + 1)
            start = index


def _row_step(form: Form, step: CompiledStep, index: int, slot: int) -> RowStep | None:
    rule = RULES.get(form.op)
    if rule is None or form.sequence or len(step.makes) != 1 or step.writes or not step.reads:
        return None
    span = 0
    if rule in {"norm", "view"}:
        sizes = form.args[1] if len(form.args) > 1 else None
        if not isinstance(sizes, ListArg) or any(isinstance(size, Operand) for size in sizes.items):
            return None
        span = len(sizes.items)
    return RowStep(index, rule, step.reads, step.makes[0][1], (slot, slot + form.slot_count), span, step.release)
