"""Split ops over lists of tensors, such as `_foreach_add_`, into one op per executor.

An optimizer step writes all weights with one op, and an op runs on one executor. Without a split, all weights would move
to that executor. These ops treat each position of their lists independently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final

import attrs

from djinn_client.interception.shape_inference.meta_infer import signature_of
from djinn_client.runtime.planning.plan_cache import PlanCache
from djinn_core.ir.form import Argument, Form, ListArg, Operand, slots_taken
from djinn_core.ir.handles import storage_of, storages_of
from djinn_core.ir.program import Call, Program
from djinn_core.system.lru import LruCache

Take = Callable[[Sequence[Any]], tuple[Any, ...]]
Groups = tuple[tuple[int, ...], ...]  # positions of lists, by part

_FEW: Final = 2  # number of positions from which `itemgetter` returns a tuple
_LIST_OP: Final = re.compile(r"aten::(_foreach_|_fused_(adagrad|adam|adamw|sgd)_(\.|$))")
_PROGRAMS: Final = 64  # structures whose list positions are cached
_PARTS: Final = 4096  # number of cached calls
_VARIANTS: Final = 16  # splits of one structure, which differ in the locations of its inputs


def _taking(positions: Sequence[int]) -> Take:
    """Return a function that maps a tuple to the tuple of its elements at `positions`."""
    if len(positions) >= _FEW:
        return itemgetter(*positions)
    start = positions[0] if positions else 0
    return itemgetter(slice(start, start + len(positions)))


class ListOps:
    """Splits the list ops of programs. Not thread-safe: the caller holds the recorders' lock."""

    def __init__(self) -> None:
        self._splits: PlanCache[_Split] = PlanCache()
        self._has_list_ops: LruCache[tuple[Call, ...], bool] = LruCache(_PROGRAMS)
        self._parts: LruCache[tuple[Call, tuple[int, ...]], _CallPart] = LruCache(_PARTS)

    def split(self, program: Program, homes: Mapping[int, int]) -> Program:
        """Return the program with each list op split into one op per executor. Return `program` if nothing needs a split.

        List positions whose tensors are on no executor yet get separate ops, so that a policy can place each.

        `homes`: the executor of each storage.
        """
        if (list_calls := self._has_list_ops.use(program.calls)) is None:
            list_calls = any(_LIST_OP.match(call.op) for call in program.calls)
            self._has_list_ops.store(program.calls, list_calls)
        if not list_calls:
            return program
        variants, _ = self._splits.find(program)
        where = tuple([homes.get(storage_of(value)) for value in program.inputs()])
        if len({*where}) == 1 and where[0] is not None:
            return program
        if (variant := next((s for s in variants if s.where == where), None)) is None:
            variant = self._split_program(program, where, homes)
            variants.append(variant)
            del variants[:-_VARIANTS]
        return variant.of(program, self._part) if variant.groups else program

    def _split_program(self, program: Program, executors: tuple[int | None, ...], homes: Mapping[int, int]) -> _Split:
        groups = _groups(program, homes)
        instructions: list[int] = []
        operands: list[int] = []
        slots: list[int] = []
        at = slot = 0
        for index, call in enumerate(program.calls):
            for part in (
                [self._part(call, group) for group in groups[index]] if index in groups else [_whole_call(call)]
            ):
                instructions.append(index)
                operands += [at + position for position in part.operands]
                slots += [slot + position for position in part.slots]
            at, slot = at + call.operand_count + call.new_count, slot + call.slot_count
        return _Split(executors, groups, _taking(instructions), _taking(operands), _taking(slots))

    def _part(self, call: Call, group: tuple[int, ...]) -> _CallPart:
        part = self._parts.use(key := (call, group))
        if part is None:
            self._parts.store(key, part := _part_of(call, group))
        return part


@attrs.frozen
class _CallPart:
    """The part of a list op's call for some list positions.

    Attributes:
        call: call of the op with shorter lists.
        operands: positions of its operands and results among those of the whole call.
        slots: positions of its slots among those of the whole call.
    """

    call: Call
    operands: tuple[int, ...]
    slots: tuple[int, ...]


@attrs.frozen
class _Split:
    """The split of programs of one structure whose inputs are on the same executors.

    Attributes:
        where: executor of each input, or None if it is on no executor yet.
        groups: list positions that stay together, by the index of each instruction to split.
        instructions: function that selects sites or modules of the split program.
        operands: function that selects operands of the split program.
        slots: function that selects slots of the split program.
    """

    where: tuple[int | None, ...]
    groups: Mapping[int, Groups]
    instructions: Take
    operands: Take
    slots: Take

    def of(self, program: Program, part: Any) -> Program:
        """Split a program of the same structure. `part(call, group)`: returns a list op's call for one group of entries."""
        groups = self.groups
        calls: list[Call] = []
        for index, call in enumerate(program.calls):
            if index in groups:
                calls += [part(call, group).call for group in groups[index]]
            else:
                calls.append(call)
        return Program(
            tuple(calls),
            self.operands(program.operands),
            self.slots(program.slots),
            program.dead,
            self.instructions(program.sites) if program.sites else (),
            self.instructions(program.modules) if program.modules else (),
        )


def _whole_call(call: Call) -> _CallPart:
    return _CallPart(call, tuple(range(call.operand_count + call.new_count)), tuple(range(call.slot_count)))


def _groups(program: Program, homes: Mapping[int, int]) -> dict[int, Groups]:
    """Return the groups of list positions that must stay together, by the index of each instruction to split.

    The tensors at one position of an op belong to one weight: its gradient, moments and temporaries. They run on the
    executor of the weight. Positions of two ops that share a tensor belong to the same weight.
    """
    operands, calls = program.operands, program.calls
    starts = [0, *accumulate(call.operand_count + call.new_count for call in calls)]
    weights: dict[int, int] = {}  # maps each storage to another storage of the same weight

    def leader(storage: int) -> int:
        while (above := weights.get(storage, storage)) != storage:
            weights[storage] = weights.get(above, above)
            storage = above
        return storage

    listed: dict[int, list[list[int]]] = {}  # storages at each position, written ones first
    for index, call in enumerate(calls):
        storages = storages_of(operands[starts[index] : starts[index + 1]])
        if (positions := _positions(call)) is None or not _are_independent(call, positions, storages):
            continue
        written = frozenset(call.writes)
        listed[index] = rows = []
        for position in positions:
            written_first = sorted(position, key=lambda operand: operand not in written)
            rows.append([storages[operand] for operand in written_first])
            for storage in rows[-1][1:]:
                weights[leader(storage)] = leader(rows[-1][0])
    lives: dict[int, int] = {}  # executor of a weight
    for storage in weights:
        if storage in homes:
            lives.setdefault(leader(storage), homes[storage])
    groups: dict[int, Groups] = {}
    for index, rows in listed.items():
        parts: dict[tuple[int | None, int], list[int]] = {}
        for number, (first, *_) in enumerate(rows):
            weight = leader(first)
            home = homes.get(first, lives.get(weight))
            parts.setdefault((home, weight if home is None else 0), []).append(number)
        if len(parts) > 1:
            groups[index] = tuple(map(tuple, parts.values()))
    return groups


def _positions(call: Call) -> Sequence[Sequence[int]] | None:
    """Return the operands and results of a call at each list position, or None if the call cannot be split."""
    if not _LIST_OP.match(call.op) or call.refused or call.changes or call.random:
        return None
    lists = [a for a in _arguments(call.signature.form) if isinstance(a, ListArg)]
    length = max((len(a.items) for a in lists), default=0)
    if length < 2 or any(len(a.items) not in (0, length) or ListArg in map(type, a.items) for a in lists):
        return None
    new_count = call.new_count
    is_aliased = any(place >= 0 for place in (*call.aliases, *call.inplace))
    if is_aliased or (new_count and not new_count == len(call.results) == length):
        return None
    positions: list[list[int]] = [[] for _ in range(length)]
    beside: set[int] = set()  # operands outside of all lists
    operand = 0
    for argument in _arguments(call.signature.form):
        for position, item in enumerate(_items(argument)):
            if type(item) is Operand:
                if isinstance(argument, ListArg):
                    positions[position].append(operand)
                else:
                    beside.add(operand)
                operand += 1
    if not beside.isdisjoint(call.writes) or not all(positions):
        return None
    for position in range(new_count):
        positions[position].append(operand + position)
    return positions


def _are_independent(call: Call, positions: Sequence[Sequence[int]], storages: Sequence[int]) -> bool:
    """Return True if no list position uses memory that another one writes. `storages`: storage of each operand."""
    of = {operand: number for number, position in enumerate(positions) for operand in position}
    targets = {storages[operand]: of[operand] for operand in call.writes}
    return all(targets.get(storage, of.get(at)) == of.get(at) for at, storage in enumerate(storages))


def _arguments(form: Form) -> list[Argument]:
    return [*form.args, *(argument for _, argument in form.kwargs)]


def _items(argument: Argument) -> Sequence[Argument]:
    return argument.items if isinstance(argument, ListArg) else (argument,)


def _part_of(call: Call, group: Sequence[int]) -> _CallPart:
    """Return the part of a call for the list positions `group`. It has all arguments that are not lists."""
    form, members = call.signature.form, frozenset(group)
    operands: list[int] = []
    slots: list[int] = []
    arguments: list[Argument] = []
    operand = slot = 0
    for argument in _arguments(form):
        arguments_of_part: list[Argument] = []
        for position, item in enumerate(_items(argument)):
            is_operand, numbers = type(item) is Operand, slots_taken(item)
            if position in members or not isinstance(argument, ListArg):
                arguments_of_part.append(item)
                operands += range(operand, operand + is_operand)
                slots += range(slot, slot + numbers)
            operand, slot = operand + is_operand, slot + numbers
        arguments.append(ListArg(tuple(arguments_of_part)) if isinstance(argument, ListArg) else argument)
    new_values = tuple(group) if call.new_count else ()
    results = new_values or range(len(call.results))
    count, metas = len(form.args), tuple([call.operands[i] for i in operands])
    keywords = tuple([(name, argument) for (name, _), argument in zip(form.kwargs, arguments[count:], strict=True)])
    own = Form(form.op, tuple(arguments[:count]), keywords, tuple([form.results[i] for i in results]), form.sequence)
    part = Call(
        signature=signature_of(own, metas),
        operands=metas,
        results=tuple([call.results[i] for i in results]),
        aliases=(-1,) * len(results),
        inplace=(-1,) * len(results),
        writes=tuple([number for number, i in enumerate(operands) if i in call.writes]),
        random=False,
        operand_count=len(operands),
        slot_count=len(slots),
        new_count=len(new_values),
        nbytes=tuple([call.nbytes[i] for i in results]),
    )
    return _CallPart(part, (*operands, *(call.operand_count + i for i in new_values)), tuple(slots))
