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

PLAIN: Final = re.compile(r"[A-Za-z0-9_ .,>+-]{0,256}")  # names of modes, and equations of `einsum`
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
        inputs: earlier values that the region reads.
        written: inputs whose memory the region writes.
        fresh: results that own their memory and that are read after the region.
        views: instructions to run after the region. They make its other results: views, and results of ops without
            operands.
        slots: range of the template's slots (numeric arguments) that the region uses.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    written: tuple[int, ...]
    fresh: tuple[int, ...]
    views: tuple[int, ...]
    slots: range


def find_region(
    template: CompiledTemplate,
    slots: Sequence[int | float],
    nonlinear: Collection[int] = (),
    skipped: Collection[str] = (),
    maybe_dynamic: Collection[str] = (),
) -> Region | None:
    """Return the longest run of consecutive instructions that can be compiled. If it is too short, return None.

    Args:
        template: the template to search.
        slots: numeric arguments of one run.
        nonlinear: slots whose instructions must not be in the region.
        skipped: ops without operands that may be in the region, and that run separately.
        maybe_dynamic: ops that may be in the region although the sizes of their results may depend on data.
    """
    forms = [template.source.forms[code] for code in template.source.code]
    firsts = [*accumulate([form.slot_count for form in forms], initial=0)]
    taken = [range(first, end) for first, end in pairwise(firsts)]
    wanted = [
        form.op in skipped
        or (not any(slot in own for slot in nonlinear) and _compilable(form, slots[own.start :], maybe_dynamic))
        for form, own in zip(forms, taken, strict=True)
    ]
    start, stop = _longest(wanted)
    if stop - start < SHORTEST:
        return None
    return _AliasAnalysis(template, start, stop, skipped).region(range(firsts[start], firsts[stop]))


def _longest(wanted: Sequence[bool]) -> tuple[int, int]:
    best = (0, 0)
    start = 0
    for at, good in enumerate([*wanted, False]):
        if not good:
            best = max(best, (start, at), key=lambda found: found[1] - found[0])
            start = at + 1
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
        and _plain(form)
        and (_REFUSED_TAGS.isdisjoint(overload.tags) or form.op in maybe_dynamic)
        and not _random(form, slots)
    )


def _plain(form: Form) -> bool:
    """Return True if all string arguments contain only harmless characters.

    Compilers write strings unescaped into source code, so a quotation mark would end the string.
    """
    texts = [a.value for a in form.arguments() if isinstance(a, Constant) and isinstance(a.value, str)]
    return all(PLAIN.fullmatch(text) for text in texts)


def _random(form: Form, slots: Sequence[int | float]) -> bool:
    """Return True if a call draws random numbers. Compiled code would draw different numbers."""
    chance = draw_condition(form)
    return chance is not None and (chance == ALWAYS or slots[chance] != 0)


class _AliasAnalysis:
    """Find aliases and writes in a part of a template by the schemas of its ops."""

    def __init__(self, template: CompiledTemplate, start: int, stop: int, skipped: Collection[str]) -> None:
        self.skipped = skipped
        self.start, self.stop = start, stop
        self.steps = template.steps
        self.maker: dict[int, int] = {}  # the producer of each place
        self.looks_into: dict[int, tuple[int, ...]] = {}  # the places that each place may alias
        forms = [template.source.forms[code] for code in template.source.code[start:stop]]
        self.writes = {
            place
            for step, form in zip(self.steps[start:stop], forms, strict=True)
            if step.op not in skipped
            for place in _writes(step, form)
        }
        inputs: dict[int, None] = {}
        for index in range(start, stop):
            step = self.steps[index]
            inputs.update(dict.fromkeys(place for place in step.reads if place not in self.maker))
            views = {} if step.op in skipped else _viewed(step)
            for result, place in step.makes:
                self.maker[place] = index
                self.looks_into[place] = views.get(result, ())
        later = {place for step in self.steps[stop:] for place in step.reads} | set(template.outputs)
        self.inputs = tuple(inputs)
        self.needed = sorted(later & self.maker.keys())

    def region(self, slots: range) -> Region:
        """Return the part as a region that uses these slots."""
        fresh: set[int] = set()
        views: set[int] = set()
        waiting = list(self.needed)
        while waiting:
            place = waiting.pop()
            if place not in self.maker or place in fresh:
                continue
            if self.steps[self.maker[place]].op in self.skipped:
                views.add(self.maker[place])
            elif not self.looks_into[place]:
                fresh.add(place)
            elif self.maker[place] not in views:
                views.add(self.maker[place])
                waiting += self.steps[self.maker[place]].reads
        written = {root for place in self.writes for root in self._roots(place)}
        return Region(
            self.start,
            self.stop,
            self.inputs,
            tuple(place for place in self.inputs if place in written),
            tuple(sorted(fresh)),
            tuple(sorted(views)),
            slots,
        )

    def _roots(self, place: int) -> Iterable[int]:
        """Return the places whose memory `place` may alias."""
        into = self.looks_into.get(place, ())
        return [root for other in into for root in self._roots(other)] if into else [place]


def _writes(step: CompiledStep, form: Form) -> tuple[int, ...]:
    """Return the operands that a call may write. A batch norm in training writes its statistics."""
    names = [argument.name for argument in torch_private.schema_of(resolve(form.op)).arguments]
    given = dict(zip(names, form.args, strict=False)) | dict(form.kwargs)
    return step.writes if given.get("training") == Constant(False) else written_places(step)


def is_view(op: str) -> bool:
    """Return True if a result of the op may alias an operand."""
    return any(result.alias_info is not None for result in torch_private.schema_of(resolve(op)).returns)


def _viewed(step: CompiledStep) -> dict[int, tuple[int, ...]]:
    """Return, for each result, the operands that it may alias."""
    returns = torch_private.schema_of(resolve(step.op)).returns
    found: dict[int, tuple[int, ...]] = {}
    for result, _ in step.makes:
        info = returns[min(result, len(returns) - 1)].alias_info if returns else None
        if info is not None:
            found[result] = step.reads  # only views of a list have several operands
    return found
