"""Compile templates to steps, so that a run looks up no op and no argument by name.

All values of a run are in one list, the environment: constants, slots, inputs, then computed values. Every argument is a
place (an index) in this list. A step gets its arguments, calls the op, and stores the results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch

from djinn_core import torch_private
from djinn_core.errors import ProtocolError, UnsupportedOperation
from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SessionGenerator,
    SlotArg,
)
from djinn_core.ir.operators import resolve
from djinn_core.wire.messages import Template
from djinn_server.checks.kinds import check_kinds
from djinn_server.checks.rules import checked
from djinn_server.custom_operators import checked_custom
from djinn_server.running.compiled_step import CompiledStep, ComplexSource, ListSource, ScalarTensorSource, Source
from djinn_server.running.growing import Growth, GrowthState
from djinn_server.running.known_forms import cached_by_form
from djinn_server.running.native_replay import LIBRARY_CHECKS, NativeReplay, ReplayState
from djinn_server.running.own_operators import OwnOperators
from djinn_server.running.template_checks import check_template
from djinn_server.running.uninitialized_memory import zero_filling

_REALLOCATING: Final = re.compile(r"resize|set_|out\b|_out\b")  # ops that may reallocate an operand that they write


@attrs.frozen
class CallFacts:
    """Facts that hold for every call of a form (an op call without operands and numbers).

    Attributes:
        function: function that computes the op.
        random: True if `function` uses the random state.
        written_operands: indices of the operands that the op writes into.
        moves: as in `CompiledStep`.
        makes: indices of the results that are new values.
        plain: as in `CompiledStep`.
    """

    function: Callable[..., Any]
    random: bool
    written_operands: tuple[int, ...]
    moves: bool
    makes: tuple[int, ...]
    plain: bool


@attrs.frozen
class CompiledTemplate:
    """A template that is ready to run.

    Attributes:
        source: the template that was compiled.
        steps: the instructions in order.
        constants: constants, the first values of the environment.
        slots: number of slots, which follow the constants in the environment.
        inputs: number of inputs, which follow the slots.
        computed: number of computed values, which follow the inputs.
        outputs: places of the outputs.
        consumed: places of the inputs that a run frees.
        random: True if an op uses the random state.
        moves: True if a step may reallocate an operand that it writes into.
        count: number of steps.
    """

    source: Template
    steps: tuple[CompiledStep, ...]
    constants: tuple[Any, ...]
    slots: int
    inputs: int
    computed: int
    outputs: tuple[int, ...]
    consumed: tuple[int, ...]
    random: bool
    moves: bool
    count: int = attrs.field(init=False, default=attrs.Factory(lambda self: len(self.steps), takes_self=True))
    _replay: ReplayState = attrs.field(init=False, factory=ReplayState, eq=False, repr=False)
    _growth: GrowthState = attrs.field(init=False, factory=GrowthState, eq=False, repr=False)

    def native(self) -> NativeReplay | None:
        """Count a run, and return the native program, as `ReplayState.native` does."""
        return self._replay.native(self.steps, self.constants, self.slots, self.inputs + self.computed)

    def growth(self) -> Growth | None:
        """Return the steps that append in place, or None, as `GrowthState.growth` does."""
        first = len(self.constants) + self.slots
        return self._growth.growth(self.steps, self.constants, range(first, first + self.inputs), self.outputs)

    @property
    def growth_refusal(self) -> str:
        """Why a `cat` that extends an input copies the input; empty if none does, or before `growth` was called."""
        return self._growth.refusal

    def native_growth(self, growth: Growth) -> NativeReplay | None:
        """Count a run of the steps that append in place. Return their native program, as `ReplayState.native` does."""
        return growth.native(self.constants, self.slots, self.inputs + self.computed)


def compile_template(template: Template, device: torch.device, own_ops: OwnOperators) -> CompiledTemplate:
    """Check a client's template, and return it compiled. `own_ops`: functions of Djinn's own ops by name.

    Raises:
        ProtocolError: the template is invalid.
        UnsupportedOperation: it contains an op that is not allowed, or an argument that the op does not accept.
    """
    return _Compiler(template, device, own_ops).compile()


class _Compiler:
    def __init__(self, template: Template, device: torch.device, own_ops: OwnOperators) -> None:
        self.counts = check_template(template)
        self.template = template
        self.device = device
        self.own_ops = own_ops
        self.constants: list[Any] = []
        self.slot_total = sum([self.counts[c].slots for c in template.code])
        self.next_slot = 0

    def compile(self) -> CompiledTemplate:
        self.facts = self._facts()
        # Constants have the first places but are found last, so they are counted before places are assigned.
        constant_count = sum([self.counts[c].constants for c in self.template.code])
        self.first_slot = constant_count
        self.places = self._places(constant_count + self.slot_total)
        steps = tuple(self._steps())
        computed = len(self.places) - len(self.template.inputs)
        return CompiledTemplate(
            source=self.template,
            steps=steps,
            constants=tuple(self.constants),
            slots=self.slot_total,
            inputs=len(self.template.inputs),
            computed=computed,
            outputs=tuple(self.places[v] for v in self.template.outputs),
            consumed=tuple(self.places[v] for v in self.template.consumed),
            random=any(facts.random for facts in self.facts.values()),
            moves=any(facts.moves for facts in self.facts.values()),
        )

    def _facts(self) -> dict[int, CallFacts]:
        """Return facts about each form of the template, by the number of the form."""
        facts: dict[int, CallFacts] = {}
        for code in dict.fromkeys(self.template.code):
            form = self.template.forms[code]
            own_ops = self.own_ops.get(form.op)
            facts[code] = (
                _facts_of(form)
                if own_ops is None
                else CallFacts(own_ops, True, (), False, _new_results(form), plain=False)
            )
        return facts

    def _places(self, first: int) -> dict[int, int]:
        """Return the place of each value by its number: first the inputs, then computed values in order."""
        inputs = {number: first + i for i, number in enumerate(self.template.inputs)}
        computed = [n for n in dict.fromkeys(self.template.references) if n not in inputs]
        return inputs | {number: first + len(inputs) + i for i, number in enumerate(computed)}

    def _steps(self) -> Iterator[CompiledStep]:
        releases = self._releases()
        at = 0
        for index, code in enumerate(self.template.code):
            form, counts = self.template.forms[code], self.counts[code]
            middle, end = at + counts.operands, at + counts.operands + counts.new_values
            operands = [self.places[n] for n in self.template.references[at:middle]]
            makes = [self.places[n] for n in self.template.references[middle:end]]
            at = end
            yield self._step(form, self.facts[code], operands, makes, releases.get(index, ()))

    def _releases(self) -> dict[int, tuple[int, ...]]:
        surviving = {*self.template.outputs, *self.template.inputs} - set(self.template.consumed)
        last: dict[int, int] = {}
        at = 0
        for index, code in enumerate(self.template.code):
            end = at + self.counts[code].operands + self.counts[code].new_values
            last.update(dict.fromkeys(self.template.references[at:end], index))
            at = end
        releases: dict[int, list[int]] = {}
        for number, index in last.items():
            if number not in surviving:
                releases.setdefault(index, []).append(self.places[number])
        return {index: tuple(places) for index, places in releases.items()}

    def _step(
        self, form: Form, facts: CallFacts, operands: list[int], makes: list[int], release: tuple[int, ...]
    ) -> CompiledStep:
        operand_places = iter(operands)
        return CompiledStep(
            op=form.op,
            function=facts.function,
            arguments=tuple([self._source(a, operand_places) for a in form.args]),
            keywords=tuple([(name, self._source(a, operand_places)) for name, a in form.kwargs]),
            reads=tuple(operands),
            makes=tuple(zip(facts.makes, makes, strict=True)),
            returns_list=form.sequence,
            writes=tuple([operands[position] for position in facts.written_operands]),
            release=release,
            moves=facts.moves,
            plain=facts.plain,
        )

    def _source(self, argument: Argument, operands: Iterator[int]) -> Source:
        """Return the source of an argument. It takes the next operands and slots that the argument needs."""
        if isinstance(argument, Operand):
            return next(operands)
        if isinstance(argument, SlotArg):
            return self._slot()
        if isinstance(argument, ListArg):
            return ListSource(tuple([self._source(item, operands) for item in argument.items]))
        if isinstance(argument, ComplexSlot):
            return self._complex()
        if isinstance(argument, ScalarTensor):
            dtype = enumerated(Enumerated("dtype", argument.dtype))
            return ScalarTensorSource(dtype, self._complex() if dtype.is_complex else self._slot())
        return self._constant(self._constant_value(argument))

    def _complex(self) -> ComplexSource:
        return ComplexSource(self._slot(), self._slot())

    def _slot(self) -> int:
        self.next_slot += 1
        return self.first_slot + self.next_slot - 1

    def _constant(self, value: Any) -> int:
        self.constants.append(value)
        return len(self.constants) - 1

    def _constant_value(self, argument: Argument) -> Any:
        if isinstance(argument, Constant):
            return argument.value
        if isinstance(argument, Enumerated):
            return enumerated(argument)
        if isinstance(argument, SelfDevice):
            return torch.device("cpu") if argument.cpu else self.device
        assert isinstance(argument, SessionGenerator)
        return None  # PyTorch's default generator, which holds the session's state during its run


def _by_name(kind: type) -> dict[str, Any]:
    return {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}


_ENUMERATED: dict[str, dict[str, Any]] = {
    "dtype": _by_name(torch.dtype),
    "layout": _by_name(torch.layout),
    "memory_format": _by_name(torch.memory_format),
}


def dtype_called(name: str) -> torch.dtype | None:
    """Return the dtype with a name such as `float32`, or None if this version of PyTorch lacks it."""
    return _ENUMERATED["dtype"].get(name)


def enumerated(argument: Enumerated) -> Any:
    """Return the dtype, layout or memory format that an argument names.

    Raises:
        ProtocolError: this version of PyTorch lacks the name.
    """
    try:
        return _ENUMERATED[argument.kind][argument.name]
    except KeyError:
        raise ProtocolError(f"no {argument.kind} is called {argument.name!r} in torch {torch.__version__}") from None


def _check_results(form: Form, overload: Any) -> None:
    """Raise UnsupportedOperation if an op with several results is recorded with one result.

    The executor would not count the memory of the other results.
    """
    returns = torch_private.schema_of(overload).returns
    many = len(returns) > 1 or any(str(result.type).startswith("List[") for result in returns)
    if many and not form.sequence and form.new_count:
        raise UnsupportedOperation(f"{form.op} returns several results in torch {torch.__version__}, not one")


@cached_by_form
def _facts_of(form: Form) -> CallFacts:
    """Return facts about the calls of an op of PyTorch.

    Raises:
        UnsupportedOperation: the op is not allowed, or does not accept an argument.
    """
    overload = resolve(form.op)
    check_kinds(form, overload)
    _check_results(form, overload)
    written_operands = _written_operands(overload, form)
    check = checked if overload.namespace == "aten" else checked_custom
    function = zero_filling(form.op, check(form.op, overload, torch_private.kernel_of(overload)))
    return CallFacts(
        function=function,
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        written_operands=written_operands,
        moves=bool(written_operands) and _REALLOCATING.search(form.op) is not None,
        makes=_new_results(form),
        plain=form.op in LIBRARY_CHECKS or function is torch_private.plain_kernel_of(overload),
    )


def _new_results(form: Form) -> tuple[int, ...]:
    """Return the indices of the results that are new values."""
    return tuple([index for index, result in enumerate(form.results) if result == "new"])


def _written_operands(overload: Any, form: Form) -> tuple[int, ...]:
    """Return the indices of the operands that a call writes into."""
    schema = {a.name: a for a in torch_private.schema_of(overload).arguments}
    pairs = [*zip(schema, form.args, strict=False), *form.kwargs]
    written_operands: list[int] = []
    at = 0
    for name, argument in pairs:
        if name not in schema:
            raise UnsupportedOperation(f"{form.op} has no argument called {name!r} in torch {torch.__version__}")
        end = at + _operands_in(argument)
        info = schema[name].alias_info
        if info is not None and info.is_write:
            written_operands += range(at, end)
        at = end
    return tuple(written_operands)


def _operands_in(argument: Argument) -> int:
    if isinstance(argument, ListArg):
        kinds = Counter(map(type, argument.items))
        nested = [item for item in argument.items if isinstance(item, ListArg)] if kinds[ListArg] else ()
        return kinds[Operand] + sum(map(_operands_in, nested))
    return int(isinstance(argument, Operand))
