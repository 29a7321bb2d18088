"""Find the matrix products of a template whose weights are inputs.

A batch computes them for several sessions at once.
"""

from __future__ import annotations

from typing import Final

import attrs

from djinn_core import torch_private
from djinn_core.ir.form import Form, Operand
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_server.running.compiled_step import CompiledStep
from djinn_server.running.input_aliases import InputAliases
from djinn_server.running.template_compiler import CompiledTemplate

# Ops that multiply rows with a weight: operand positions of rows and weight, and whether the weight has a row for each
# column of the result. The only other operand may be a bias.
PRODUCTS: Final = {
    "aten::mm": (0, 1, False),
    "aten::matmul": (0, 1, False),
    "aten::addmm": (1, 2, False),
    "aten::linear": (0, 1, True),
}


@attrs.frozen
class Product:
    """An instruction that multiplies rows by a weight.

    Attributes:
        step: number of the instruction.
        op: name of the op.
        rows: place of the left operand in the environment.
        weight: place of the weight.
        bias: place of the bias. Without a bias, it is None.
        transposed: True if the weight has a row for each column of the result, as in `linear`.
        place: place of the result.
        release: places that can be freed after the instruction.
        source: position of the input that owns the weight's memory.
    """

    step: int
    op: str
    rows: int
    weight: int
    bias: int | None
    transposed: bool
    place: int
    release: tuple[int, ...]
    source: int


def find_products(template: CompiledTemplate, aliases: InputAliases) -> tuple[Product, ...]:
    """Return the products whose weight is an input, or a view of an input, that the template does not write."""
    first = len(template.constants) + template.slots
    sources = {
        first + position: position for position in range(template.inputs) if position not in aliases.written_inputs
    }
    products: list[Product] = []
    for index, code in enumerate(template.source.code):
        form, step = template.source.forms[code], template.steps[index]
        product = _product(form, step, index, sources)
        if product is not None:
            products.append(product)
        if len(step.reads) == 1 and step.reads[0] in sources and _is_view(form):
            sources.update(dict.fromkeys((place for _, place in step.makes), sources[step.reads[0]]))
    return tuple(products)


def _product(form: Form, step: CompiledStep, index: int, sources: dict[int, int]) -> Product | None:
    kind = PRODUCTS.get(form.op)
    if kind is None or form.kwargs or form.sequence or len(step.makes) != 1:
        return None
    rows_position, weight_position, transposed = kind
    operands = [argument for argument in form.args if isinstance(argument, Operand)]
    if len(operands) != len(step.reads) or form.slot_count or step.reads[weight_position] not in sources:
        return None
    bias = [place for position, place in enumerate(step.reads) if position not in {rows_position, weight_position}]
    if any(place not in sources for place in bias):
        return None
    return Product(
        index,
        form.op,
        step.reads[rows_position],
        step.reads[weight_position],
        bias[0] if bias else None,
        transposed,
        step.makes[0][1],
        step.release,
        sources[step.reads[weight_position]],
    )


def _is_view(form: Form) -> bool:
    if form.op in OWN_OPERATORS or form.sequence:
        return False
    returns = torch_private.schema_of(resolve(form.op)).returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write
