"""Choose the region of a template to compile, and find its inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

import attrs
import torch

from djinn_core import torch_private
from djinn_core.ir.form import Constant, Form
from djinn_core.ir.operators import resolve
from djinn_server.running.compiled_step import CompiledStep
from djinn_server.running.drawing import ALWAYS, draw_condition
from djinn_server.running.input_aliases import written_places
from djinn_server.running.template_compiler import CompiledTemplate

PLAIN_TEXT: Final = re.compile(r"[A-Za-z0-9_ .,>+-]{0,256}")  # matches names of modes, and equations of `einsum`
SHORTEST: Final = 4  # fewest instructions that are worth compiling
_REFUSED_TAGS: Final = frozenset({
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,  # changes the metadata of its operand
})  # fmt: skip


@attrs.frozen
class Region:
    """Consecutive instructions of a template. Values are given by their places in the environment.

    Attributes:
        start: the first instruction.
        stop: the instruction after the last.
        inputs: values from before the region that it reads.
        written_inputs: inputs whose memory the region writes.
        owned_results: results that own their memory and that are read after the region.
        views: instructions that make views, and skipped ops, if their results are needed. They run after the region.
        slots: range of the template's slots (numeric arguments) that the region uses.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    written_inputs: tuple[int, ...]
    owned_results: tuple[int, ...]
    views: tuple[int, ...]
    slots: range


def find_region(
    template: CompiledTemplate,
    slots: Sequence[int | float],
    nonlinear: Collection[int] = (),
    skipped: Collection[str] = (),
    maybe_dynamic: Collection[str] = (),
) -> Region | None:
    """Return the longest region that can be compiled, or None if it has fewer than `SHORTEST` instructions.

    Args:
        template: the template to search.
        slots: numeric arguments of one run.
        nonlinear: slots whose instructions must not be in the region.
        skipped: ops without operands that may be in the region, and that run separately.
        maybe_dynamic: ops that may be in the region although the sizes of their results may depend on data.
    """
    forms = [template.source.forms[code] for code in template.source.code]
    firsts = [*accumulate([form.slot_count for form in forms], initial=0)]
    slot_ranges = [range(first, end) for first, end in pairwise(firsts)]
    is_compilable = [
        form.op in skipped
        or (
            not any(slot in own_slots for slot in nonlinear)
            and _compilable(form, slots[own_slots.start :], maybe_dynamic)
        )
        for form, own_slots in zip(forms, slot_ranges, strict=True)
    ]
    start, stop = _longest(is_compilable)
    if stop - start < SHORTEST:
        return None
    return _AliasAnalysis(template, start, stop, skipped).region(range(firsts[start], firsts[stop]))


def _longest(is_compilable: Sequence[bool]) -> tuple[int, int]:
    best = (0, 0)
    start = 0
    for index, compilable in enumerate([*is_compilable, False]):
        if not compilable:
            best = max(best, (start, index), key=lambda limits: limits[1] - limits[0])
            start = index + 1
    return best


def _compilable(form: Form, slots: Sequence[int | float], maybe_dynamic: Collection[str]) -> bool:
    if not form.op.startswith("aten::"):
        return False
    overload = resolve(form.op)
    schema = torch_private.schema_of(overload)
    resizes = any(a.is_out for a in schema.arguments)
    tensors = all("Tensor" in str(r.type) for r in schema.returns)
    return (
        tensors
        and not resizes
        and _has_plain_strings(form)
        and (_REFUSED_TAGS.isdisjoint(overload.tags) or form.op in maybe_dynamic)
        and not _draws_random(form, slots)
    )


def _has_plain_strings(form: Form) -> bool:
    """Return True if all string arguments contain only harmless characters.

    Compilers write strings unescaped into source code, so a quotation mark would end the string.
    """
    texts = [a.value for a in form.arguments() if isinstance(a, Constant) and isinstance(a.value, str)]
    return all(PLAIN_TEXT.fullmatch(text) for text in texts)


def _draws_random(form: Form, slots: Sequence[int | float]) -> bool:
    """Return True if a call draws random numbers. It is not compiled, because compiled code would draw others."""
    chance = draw_condition(form)
    return chance is not None and (chance == ALWAYS or slots[chance] != 0)


class _AliasAnalysis:
    """Find aliases and writes in a part of a template by the schemas of its ops."""

    def __init__(self, template: CompiledTemplate, start: int, stop: int, skipped: Collection[str]) -> None:
        self.skipped = skipped
        self.start, self.stop = start, stop
        self.steps = template.steps
        self.producers: dict[int, int] = {}  # the producer of each place
        self.aliased_places: dict[int, tuple[int, ...]] = {}  # the places that each place may alias
        forms = [template.source.forms[code] for code in template.source.code[start:stop]]
        self.written_places = {
            place
            for step, form in zip(self.steps[start:stop], forms, strict=True)
            if step.op not in skipped
            for place in _writes(step, form)
        }
        inputs: dict[int, None] = {}
        for index in range(start, stop):
            step = self.steps[index]
            inputs.update(dict.fromkeys(place for place in step.reads if place not in self.producers))
            views = {} if step.op in skipped else _aliased_operands(step)
            for result, place in step.makes:
                self.producers[place] = index
                self.aliased_places[place] = views.get(result, ())
        later_reads = {place for step in self.steps[stop:] for place in step.reads} | set(template.outputs)
        self.inputs = tuple(inputs)
        self.needed_results = sorted(later_reads & self.producers.keys())

    def region(self, slots: range) -> Region:
        """Return the part as a region that uses these slots."""
        owned_results: set[int] = set()
        views: set[int] = set()
        pending = list(self.needed_results)
        while pending:
            place = pending.pop()
            if place not in self.producers or place in owned_results:
                continue
            if self.steps[self.producers[place]].op in self.skipped:
                views.add(self.producers[place])
            elif not self.aliased_places[place]:
                owned_results.add(place)
            elif self.producers[place] not in views:
                views.add(self.producers[place])
                pending += self.steps[self.producers[place]].reads
        written_roots = {root for place in self.written_places for root in self._roots(place)}
        return Region(
            self.start,
            self.stop,
            self.inputs,
            tuple(place for place in self.inputs if place in written_roots),
            tuple(sorted(owned_results)),
            tuple(sorted(views)),
            slots,
        )

    def _roots(self, place: int) -> Iterable[int]:
        """Return the places whose memory `place` may alias."""
        aliased = self.aliased_places.get(place, ())
        return [root for source in aliased for root in self._roots(source)] if aliased else [place]


def _writes(step: CompiledStep, form: Form) -> tuple[int, ...]:
    """Return the places of operands that a call may write. A batch norm in training also writes its statistics."""
    names = [argument.name for argument in torch_private.schema_of(resolve(form.op)).arguments]
    arguments = dict(zip(names, form.args, strict=False)) | dict(form.kwargs)
    return step.writes if arguments.get("training") == Constant(False) else written_places(step)


def is_view(op: str) -> bool:
    """Return True if a result of the op may alias an operand."""
    return any(result.alias_info is not None for result in torch_private.schema_of(resolve(op)).returns)


def _aliased_operands(step: CompiledStep) -> dict[int, tuple[int, ...]]:
    """Return for each result that may be a view the places of the operands that it may alias."""
    returns = torch_private.schema_of(resolve(step.op)).returns
    operands: dict[int, tuple[int, ...]] = {}
    for result, _ in step.makes:
        info = returns[min(result, len(returns) - 1)].alias_info if returns else None
        if info is not None:
            operands[result] = step.reads  # only views of a list have several operands
    return operands
