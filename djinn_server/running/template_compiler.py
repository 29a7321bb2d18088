"""Compilation of templates to closures, so that a run needs no lookup of ops or arguments by name.

All values of a run are in one list, the environment: constants, slots, inputs, then the values that the run makes.
Every argument is a position in it, so a step is: get the arguments, call the op, put the results back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from operator import itemgetter
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
from djinn_server.running.known_forms import kept_by_form
from djinn_server.running.own_operators import OwnOperators
from djinn_server.running.template_checks import check_template
from djinn_server.running.uninitialized_memory import zero_filling

_MOVES: Final = re.compile(r"resize|set_|out\b|_out\b")  # ops that may give what they write other memory
Environment = list[Any]
Step = Callable[[Environment], None]
Get = Callable[[Environment], Any]


@attrs.frozen
class CompiledStep:
    """One instruction.

    Attributes:
        run: runs it on an environment. store: the same without the release.
        op: its overload name.
        reads: positions of its operands in the environment. makes: positions of its new values, by result.
        writes: positions of the operands that it writes into.
        release: positions that are not needed after it.
        moves: True if it may give what it writes other memory.
    """

    run: Step
    store: Step
    op: str
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    release: tuple[int, ...]
    moves: bool


@attrs.frozen
class CallFacts:
    """Facts that hold for every call of a form.

    Attributes:
        function: computes it. random: True if that uses the random state.
        written: which of its operands it writes into. moves: as in `CompiledStep`.
        makes: which of its results are new values.
    """

    function: Callable[..., Any]
    random: bool
    written: tuple[int, ...]
    moves: bool
    makes: tuple[int, ...]


@attrs.frozen
class CompiledTemplate:
    """A template, ready to run.

    Attributes:
        constants: the environment's head. slots: number of slots that follow. size: positions of values after the inputs.
        count: number of steps.
        random: True if any op uses the random state. moves: True if any step moves what it writes.
        source: the template that it was compiled from.
    """

    source: Template
    steps: tuple[CompiledStep, ...]
    constants: tuple[Any, ...]
    slots: int
    inputs: int
    made: int
    outputs: tuple[int, ...]
    consumed: tuple[int, ...]
    random: bool
    moves: bool
    count: int = attrs.field(init=False, default=attrs.Factory(lambda self: len(self.steps), takes_self=True))


def compile_template(template: Template, device: torch.device, own: OwnOperators) -> CompiledTemplate:
    """Check a received template and compile it.

    Raises:
        ProtocolError: its numbers do not fit together.
        UnsupportedOperation: it contains an op that is not allowed.
    """
    return _Compiler(template, device, own).compile()


class _Compiler:
    def __init__(self, template: Template, device: torch.device, own: OwnOperators) -> None:
        self.counts = check_template(template)
        self.template = template
        self.device = device
        self.own = own
        self.constants: list[Any] = []
        self.slot_total = sum([self.counts[c].slots for c in template.code])
        self.next_slot = 0

    def compile(self) -> CompiledTemplate:
        self.facts = self._facts()
        # Constants come first but are found last: count them before any position is given out.
        constant_count = sum([self.counts[c].constants for c in self.template.code])
        self.first_slot = constant_count
        self.places = self._places(constant_count + self.slot_total)
        steps = tuple(self._steps())
        made = len(self.places) - len(self.template.inputs)
        return CompiledTemplate(
            source=self.template,
            steps=steps,
            constants=tuple(self.constants),
            slots=self.slot_total,
            inputs=len(self.template.inputs),
            made=made,
            outputs=tuple(self.places[v] for v in self.template.outputs),
            consumed=tuple(self.places[v] for v in self.template.consumed),
            random=any(facts.random for facts in self.facts.values()),
            moves=any(facts.moves for facts in self.facts.values()),
        )

    def _facts(self) -> dict[int, CallFacts]:
        """Facts about calls by code, found once however often a form is called."""
        found: dict[int, CallFacts] = {}
        for code in dict.fromkeys(self.template.code):
            form = self.template.forms[code]
            own = self.own.get(form.op)
            found[code] = _facts_of(form) if own is None else CallFacts(own, True, (), False, _made(form))
        return found

    def _places(self, first: int) -> dict[int, int]:
        """The environment position of every value number: inputs first, then what is made, in order."""
        inputs = {number: first + i for i, number in enumerate(self.template.inputs)}
        made = [n for n in dict.fromkeys(self.template.references) if n not in inputs]
        return inputs | {number: first + len(inputs) + i for i, number in enumerate(made)}

    def _steps(self) -> Iterator[CompiledStep]:
        releases = self._releases()
        at = 0
        for index, code in enumerate(self.template.code):
            form, counts = self.template.forms[code], self.counts[code]
            middle, end = at + counts.operands, at + counts.operands + counts.news
            operands = [self.places[n] for n in self.template.references[at:middle]]
            makes = [self.places[n] for n in self.template.references[middle:end]]
            at = end
            yield self._step(form, self.facts[code], operands, makes, releases.get(index, ()))

    def _releases(self) -> dict[int, tuple[int, ...]]:
        kept = {*self.template.outputs, *self.template.inputs} - set(self.template.consumed)
        last: dict[int, int] = {}
        at = 0
        for index, code in enumerate(self.template.code):
            end = at + self.counts[code].operands + self.counts[code].news
            last.update(dict.fromkeys(self.template.references[at:end], index))
            at = end
        releases: dict[int, list[int]] = {}
        for number, index in last.items():
            if number not in kept:
                releases.setdefault(index, []).append(self.places[number])
        return {index: tuple(places) for index, places in releases.items()}

    def _step(
        self, form: Form, facts: CallFacts, operands: list[int], makes: list[int], release: tuple[int, ...]
    ) -> CompiledStep:
        taken = iter(operands)
        function = facts.function
        positional = self._getter([self._place(a, taken) for a in form.args])
        keywords = {name: self._single(self._place(a, taken)) for name, a in form.kwargs}
        targets = tuple(zip(facts.makes, makes, strict=True))
        store = _make_step(function, positional, keywords, targets, form.sequence)
        run = _make_step(function, positional, keywords, targets, form.sequence, release) if release else store
        writes = tuple([operands[position] for position in facts.written])
        return CompiledStep(run, store, form.op, tuple(operands), targets, writes, release, facts.moves)

    def _place(self, argument: Argument, operands: Iterator[int]) -> Any:
        """A position in the environment, or a function of the environment for arguments built from several."""
        if isinstance(argument, Operand):
            return next(operands)
        if isinstance(argument, SlotArg):
            return self._slot()
        if isinstance(argument, ListArg):
            return _list_getter([
                next(operands) if type(item) is Operand else self._place(item, operands) for item in argument.items
            ])  # fmt: skip
        if isinstance(argument, ComplexSlot):
            real, imaginary = self._slot(), self._slot()
            return lambda env: complex(env[real], env[imaginary])
        if isinstance(argument, ScalarTensor):
            return self._scalar_tensor(argument)
        return self._constant(self._constant_value(argument))

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
        return None  # the device's default generator, which holds the session's state while it runs

    def _scalar_tensor(self, argument: ScalarTensor) -> Get:
        dtype = enumerated(Enumerated("dtype", argument.dtype))
        if dtype.is_complex:
            real, imaginary = self._slot(), self._slot()
            return lambda env: torch.tensor(complex(env[real], env[imaginary]), dtype=dtype)
        slot = self._slot()
        return lambda env: torch.tensor(env[slot], dtype=dtype)

    def _getter(self, places: list[Any]) -> Get:
        if not places:
            return itemgetter(slice(0, 0))
        if len(places) > 1 and all(isinstance(p, int) for p in places):
            return itemgetter(*places)
        if len(places) == 1 and isinstance(places[0], int):
            return itemgetter(slice(places[0], places[0] + 1))
        getters = [self._single(p) for p in places]
        return lambda env: [get(env) for get in getters]

    @staticmethod
    def _single(place: Any) -> Get:
        return itemgetter(place) if isinstance(place, int) else place


def _list_getter(places: list[Any]) -> Get:
    if places and all(isinstance(p, int) for p in places):
        if len(places) == 1:
            return itemgetter(slice(places[0], places[0] + 1))
        return itemgetter(*places)
    return lambda env: [env[p] if isinstance(p, int) else p(env) for p in places]


def _make_step(
    function: Callable[..., Any],
    positional: Get,
    keywords: dict[str, Get],
    targets: tuple[tuple[int, int], ...],
    sequence: bool,
    release: tuple[int, ...] = (),
) -> Step:
    """The function that runs an instruction, without another one within it for the kinds that nearly all are."""
    if len(targets) != 1 or sequence or keywords:
        store = _make_store(_make_call(function, positional, keywords), targets, sequence)
        return _and_release(store, release) if release else store
    ((_, only),) = targets
    if not release:

        def store_one(env: Environment) -> None:
            env[only] = function(*positional(env))

        return store_one

    def store_one_and_release(env: Environment) -> None:
        env[only] = function(*positional(env))
        for place in release:
            env[place] = None

    return store_one_and_release


def _make_call(function: Callable[..., Any], positional: Get, keywords: dict[str, Get]) -> Get:
    if not keywords:
        return lambda env: function(*positional(env))
    items = tuple(keywords.items())
    return lambda env: function(*positional(env), **{name: get(env) for name, get in items})


def _and_release(store: Step, release: tuple[int, ...]) -> Step:
    def store_and_release(env: Environment) -> None:
        store(env)
        for place in release:
            env[place] = None

    return store_and_release


def _make_store(call: Get, targets: tuple[tuple[int, int], ...], sequence: bool) -> Step:
    if not targets:

        def store_nothing(env: Environment) -> None:
            call(env)

        return store_nothing
    if not sequence:
        (_, only) = targets[0]

        def store_one(env: Environment) -> None:
            env[only] = call(env)

        return store_one

    def store_many(env: Environment) -> None:
        results = call(env)
        for index, place in targets:
            env[place] = results[index]

    return store_many


def _by_name(kind: type) -> dict[str, Any]:
    return {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}


_ENUMERATED: dict[str, dict[str, Any]] = {
    "dtype": _by_name(torch.dtype),
    "layout": _by_name(torch.layout),
    "memory_format": _by_name(torch.memory_format),
}


def dtype_called(name: str) -> torch.dtype | None:
    """The dtype of that name, if this PyTorch has one."""
    return _ENUMERATED["dtype"].get(name)


def enumerated(argument: Enumerated) -> Any:
    """The dtype, layout or memory format that an argument names.

    Raises:
        ProtocolError: this PyTorch has none of that name.
    """
    try:
        return _ENUMERATED[argument.kind][argument.name]
    except KeyError:
        raise ProtocolError(f"no {argument.kind} is called {argument.name!r} in torch {torch.__version__}") from None


def _check_results(form: Form, overload: Any) -> None:
    """Refuse an op that returns several results or a list where the form has one value: that memory would not be counted."""
    returns = torch_private.schema_of(overload).returns
    many = len(returns) > 1 or any(str(result.type).startswith("List[") for result in returns)
    if many and not form.sequence and form.new_count:
        raise UnsupportedOperation(f"{form.op} returns several results in torch {torch.__version__}, not one")


@kept_by_form
def _facts_of(form: Form) -> CallFacts:
    """Facts about a call of one of PyTorch's ops.

    Raises:
        UnsupportedOperation: the op is not allowed, or is called with what it does not take.
    """
    overload = resolve(form.op)
    check_kinds(form, overload)
    _check_results(form, overload)
    written = _written(overload, form)
    return CallFacts(
        function=zero_filling(form.op, checked(form.op, overload, torch_private.kernel_of(overload))),
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        written=written,
        moves=bool(written) and _MOVES.search(form.op) is not None,
        makes=_made(form),
    )


def _made(form: Form) -> tuple[int, ...]:
    """The results that are new values."""
    return tuple([index for index, result in enumerate(form.results) if result == "new"])


def _written(overload: Any, form: Form) -> tuple[int, ...]:
    """The operands that a call writes into."""
    schema = {a.name: a for a in torch_private.schema_of(overload).arguments}
    given = [*zip(schema, form.args, strict=False), *form.kwargs]
    written: list[int] = []
    at = 0
    for name, argument in given:
        if name not in schema:
            raise UnsupportedOperation(f"{form.op} has no argument called {name!r} in torch {torch.__version__}")
        end = at + _operands_in(argument)
        info = schema[name].alias_info
        if info is not None and info.is_write:
            written += range(at, end)
        at = end
    return tuple(written)


def _operands_in(argument: Argument) -> int:
    if isinstance(argument, ListArg):
        kinds = Counter(map(type, argument.items))
        nested = [item for item in argument.items if isinstance(item, ListArg)] if kinds[ListArg] else ()
        return kinds[Operand] + sum(map(_operands_in, nested))
    return int(isinstance(argument, Operand))
