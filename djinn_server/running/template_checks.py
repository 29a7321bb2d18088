"""Validate templates of untrusted clients, in time proportional to their length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from djinn_core.errors import ProtocolError
from djinn_core.ir.form import (
    Argument,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    SelfDevice,
    SessionGenerator,
    slots_taken,
)
from djinn_core.wire import limits
from djinn_core.wire.messages import Template
from djinn_server.running.known_forms import cached_by_form


@attrs.frozen
class CallArity:
    """Counts of an op call.

    Attributes:
        operands: number of tensor operands, including those in lists.
        slots: number of slots.
        constants: number of constant arguments.
        new_values: number of results that are new values.
        arguments: number of arguments, including the elements of lists.
    """

    operands: int
    slots: int
    constants: int
    new_values: int
    arguments: int


@cached_by_form
def counts_of(form: Form) -> CallArity:
    """Return the counts of a form (an op call).

    Raises:
        ProtocolError: the form has too many arguments, a text that is too long, or lists that are nested too deeply.
    """
    operands = slots = constants = total = 0
    for arguments in _lists((*form.args, *[value for _, value in form.kwargs]), form.op):
        total += len(arguments)
        if total > limits.ARGUMENTS:
            raise ProtocolError(f"a form has more than {limits.ARGUMENTS:,} arguments")
        kinds = Counter(map(type, arguments))
        operands += kinds[Operand]
        constants += kinds[Constant] + kinds[Enumerated] + kinds[SelfDevice] + kinds[SessionGenerator]
        if len(arguments) > kinds[Operand]:
            slots += sum([slots_taken(argument) for argument in arguments if type(argument) is not Operand])
            _check_texts(form, arguments)
    return CallArity(operands, slots, constants, form.new_count, total)


def _check_texts(form: Form, arguments: Sequence[Argument]) -> None:
    for argument in arguments:
        if isinstance(argument, Constant) and isinstance(argument.value, str) and len(argument.value) > limits.TEXT:
            raise ProtocolError(
                f"an argument of {form.op[:64]} is a text of {len(argument.value):,} characters; at most"
                f" {limits.TEXT:,} are allowed"
            )


def _lists(arguments: Sequence[Argument], op: str) -> Iterator[Sequence[Argument]]:
    """Yield the arguments, then the elements of each nested list. It does not recurse, because a client may nest deeply."""
    pending_lists = [(arguments, 0)]
    while pending_lists:
        items, depth = pending_lists.pop()
        if depth > limits.DEEPEST_LIST:
            raise ProtocolError(f"arguments of {op[:64]} are lists more than {limits.DEEPEST_LIST} deep")
        nested = [item for item in items if type(item) is ListArg]
        yield [item for item in items if type(item) is not ListArg] if nested else items
        pending_lists += [(item.items, depth + 1) for item in reversed(nested)]


def check_template(template: Template) -> list[CallArity]:
    """Check a template, and return the counts of each of its forms.

    Raises:
        ProtocolError: the template has invalid references, or is too large.
    """
    if max(len(template.code), len(template.forms)) > limits.INSTRUCTIONS:
        raise ProtocolError(
            f"a template has {len(template.code):,} instructions of {len(template.forms):,} forms; at most"
            f" {limits.INSTRUCTIONS:,} are allowed"
        )
    if max(map(len, (template.references, template.inputs, template.outputs, template.consumed))) > limits.ARGUMENTS:
        raise ProtocolError(f"a template has more than {limits.ARGUMENTS:,} values")
    if any(not 0 <= code < len(template.forms) for code in template.code):
        raise ProtocolError("a template names a form that it does not define")
    counts, total = [], 0
    for form in template.forms:
        counts.append(counts_of(form))
        total += counts[-1].arguments
        if total > limits.ARGUMENTS:
            raise ProtocolError(f"the forms of a template have more than {limits.ARGUMENTS:,} arguments")
    if sum([counts[c].arguments for c in template.code]) > limits.ARGUMENTS:
        raise ProtocolError(f"a template has more than {limits.ARGUMENTS:,} arguments")
    if len(template.references) != sum([counts[c].operands + counts[c].new_values for c in template.code]):
        raise ProtocolError("a template's references do not match its forms")
    _check_order(template, counts)
    return counts


def _check_order(template: Template, counts: Sequence[CallArity]) -> None:
    """Check that each value is made once, and before its first use."""
    defined = set(template.inputs)
    if len(defined) != len(template.inputs) or not set(template.consumed) <= defined:
        raise ProtocolError("a template's inputs are not distinct, or it consumes a value that is not an input")
    if len(set(template.consumed)) != len(template.consumed):
        raise ProtocolError("a template consumes an input twice")
    at = 0
    for code in template.code:
        middle = at + counts[code].operands
        end = middle + counts[code].new_values
        if not defined.issuperset(template.references[at:middle]):
            raise ProtocolError("a template uses a value before it is made")
        new_values = template.references[middle:end]
        if not defined.isdisjoint(new_values) or len(set(new_values)) != len(new_values):
            raise ProtocolError("a template makes a value twice")
        defined.update(new_values)
        at = end
    if not defined.issuperset(template.outputs):
        raise ProtocolError("a template returns a value that it never makes")
