"""Subgraph substitution: record a program again, with other PyTorch code for some of its nodes.

The remaining nodes are recorded call by call, on placeholder tensors for the program's values. The PyTorch code runs on
the same placeholders. Nothing is sent, and the thread's current program does not change.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

import attrs
import msgspec
import torch

from djinn_client.interception.recording.append import append
from djinn_client.interception.recording.entry import Entry
from djinn_client.interception.recording.recorder import Recorder, SyncRequest, current, recorders, recording_on
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, logical_device, wrap
from djinn_client.interception.tensors.storage import Value, borrow
from djinn_client.torch_dispatch import without_modes
from djinn_core.errors import InvalidStage
from djinn_core.ir.arguments import call_arguments
from djinn_core.ir.handles import make_handle, storage_of, view_of
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.ir.program import Call, Instruction, Program
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.ir.substitution import Recipe, RewrittenProgram, Substitution
from djinn_core.ir.values import TensorMeta

_NEVER = 1 << 60  # instruction count at which the recorder would otherwise send
_FIRST = 1  # handle of the first view of new memory that covers it completely


@without_modes
def rewrite(program: Program, substitutions: Sequence[Substitution], weights: frozenset[int]) -> RewrittenProgram:
    """Return the rewrite of a program that replaces some of its nodes by other code.

    Args:
        program: the original. Its ops must not change the metadata of their operands.
        substitutions: nodes and their replacement code; the node sets do not overlap.
        weights: inputs that stay unchanged over many programs.

    Raises:
        InvalidStage: a substitution does not fit, or its code needs data.
    """
    with _recording_unsent() as recorder:
        return _Rewriter(program, substitutions, recorder).run(weights)


class _UnsentRecorder(Recorder):
    """A recorder whose entries are never sent.

    Attributes:
        groups: entry ranges (first, end), each with its group number.
    """

    __slots__ = ("groups",)
    is_of_thread = False

    def __init__(self) -> None:
        super().__init__(recorders)
        self.limit = _NEVER
        self.groups: list[tuple[int, int, int]] = []

    def group_of(self, entry: int) -> int:
        """Return the group of an entry, or -1."""
        return next((number for first, end, number in reversed(self.groups) if first <= entry < end), -1)

    def prepare(self) -> None:
        """Do nothing: a plan needs no server."""

    def ask_unseen(self, ask: SyncRequest) -> NoReturn:  # noqa: ARG002 - whatever is asked
        """Raise an error.

        Raises:
            InvalidStage: always, because a plan has no data.
        """
        raise InvalidStage("the code of a substitution needs data, which a plan does not have")

    def ask_later(self, fetch: tuple[int, ...], nbytes: int) -> NoReturn:  # noqa: ARG002 - as above
        """Raise `InvalidStage`, because a plan has no data."""
        self.ask_unseen(SyncRequest())

    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int) -> NoReturn:  # noqa: ARG002 - as above
        """Raise an error.

        Raises:
            InvalidStage: always, because a substitution may not upload data.
        """
        raise InvalidStage("the code of a substitution uploads a tensor: create it on the device of the inputs")


@contextmanager
def _recording_unsent() -> Iterator[_UnsentRecorder]:
    recorder = _UnsentRecorder()
    try:
        with recording_on(recorder), torch.inference_mode():
            yield recorder
    finally:
        recorder.retire()


@contextmanager
def group(number: int) -> Iterator[None]:
    """Context manager for the code of a substitution: ops inside the block form a group that may run concurrently with other groups.

    Placement policies see the groups as the hint `groups`: the node ids of each group, in the order of the numbers.
    """
    recorder = current()
    first = recorder.unsent
    try:
        yield
    finally:
        if isinstance(recorder, _UnsentRecorder):
            recorder.groups.append((first, recorder.unsent, number))


@attrs.frozen
class _NewInstruction:
    """An instruction of the new program: positions of its slots in the original, or -1, and its group, or -1."""

    entry: Entry
    slots: tuple[int, ...]
    node: int
    own: bool
    group: int


# Views of borrowed memory have numbers from here on; the memory's owner numbers its own views.
_OWN_VIEWS: Final = 1 << 30


class _Rewriter:
    def __init__(self, program: Program, substitutions: Sequence[Substitution], recorder: _UnsentRecorder) -> None:
        self.program = program
        self.recorder = recorder
        self.first = {min(s.nodes): s for s in substitutions}
        self.gone = frozenset().union(*(s.nodes for s in substitutions))
        self.relied = self.gone.union(*(s.relies for s in substitutions))
        instructions = (i for i in program.instructions() if i.index not in self.gone)
        self.written = {storage_of(v) for instruction in instructions for v in instruction.writes}
        self.tensors: dict[int, LazyTensor] = {}
        self.storages: dict[int, Value] = {}  # one value over each storage
        self.names: dict[int, int] = {}
        self.made: list[_NewInstruction] = []
        self.metas = _result_metas(program)
        self.memories: dict[int, int] = {}

    def run(self, weights: frozenset[int]) -> RewrittenProgram:
        at = 0
        for instruction in self.program.instructions():
            if instruction.call.changes:
                raise InvalidStage(
                    f"{instruction.op} changes the metadata of its operand: such a program cannot be rewritten"
                )
            substitution = self.first.get(instruction.index)
            if substitution is not None:
                self._substitute(substitution)
            if instruction.index not in self.gone:
                self._again(instruction, range(at, at + len(instruction.slots)))
            at += len(instruction.slots)
        return self._finish(weights)

    def _tensor(self, value: int, call: Call | None = None, operand: int = 0) -> LazyTensor:
        tensor = self.tensors.get(value)
        if tensor is None:
            if call is None:
                call, operand = self._user_of(value)
            meta, number = call.operands[operand], storage_of(value)
            borrowed = borrow(value, meta, self.storages.get(number))
            self.storages.setdefault(number, borrowed)
            tensor = self.tensors[value] = wrap(borrowed)
        return tensor

    def _user_of(self, value: int) -> tuple[Call, int]:
        user = self._first_user(value)
        if user is None:
            raise InvalidStage(f"a substitution has the input {value}, which is not a value of the program")
        return user.call, user.inputs.index(value)

    def _first_user(self, value: int) -> Instruction | None:
        return next((one for one in self.program.instructions() if value in one.inputs), None)

    def _again(self, instruction: Instruction, slots: range) -> None:
        """Record an instruction again. If the operands have the same metadata, use its original call."""
        call = instruction.call
        operands = [self._tensor(v, call, i) for i, v in enumerate(instruction.inputs)]
        before = self.recorder.unsent
        if all(t.remote.meta is meta for t, meta in zip(operands, call.operands, strict=True)):
            out = append(call, operands, instruction.slots)
        elif call.op in OWN_OPERATORS:
            raise InvalidStage(f"{call.op} would get operands with other metadata than before")
        else:
            form = call.signature.form
            positional, keywords = call_arguments(form, operands, instruction.slots, logical_device(0))
            out = resolve(form.op)(*positional, **keywords)
        results = list(out) if call.sequence else [out]
        new_results = [
            r for r, m, same in zip(results, call.results, call.inplace, strict=True) if m is not None and same < 0
        ]
        if not call.signature.predicts:
            new_results = [
                self._as_read(value, tensor) for value, tensor in zip(instruction.outputs, new_results, strict=True)
            ]
        self._name(instruction.outputs, new_results)
        entries = self.recorder.entries[before:]
        same = len(entries) == 1 and entries[0].call is call
        self._record_source(before, tuple(slots) if same else None, instruction.index)

    def _as_read(self, value: int, tensor: LazyTensor) -> LazyTensor:
        """Return a result with the metadata that later ops of the program read. Only the executor knew its metadata."""
        if (user := self._first_user(value)) is None:
            return tensor
        copy = tensor.remote
        copy.meta = self.metas[value] = user.call.operands[user.inputs.index(value)]
        return wrap(copy)

    def _substitute(self, substitution: Substitution) -> None:
        before = self.recorder.unsent
        results = self._computed(substitution)
        results = [self._as_known(v, t) for v, t in zip(substitution.outputs, results, strict=True)]
        self._name(substitution.outputs, self._apart_from_others(substitution.outputs, results))
        entries = self.recorder.entries[before:]
        if random := next((entry.call.op for entry in entries if entry.call.random), ""):
            raise InvalidStage(
                f"the code of a substitution draws random numbers ({random}), which would change the numbers of later "
                f"ops"
            )
        self._record_source(before, None, min(substitution.nodes))

    def _computed(self, substitution: Substitution) -> list[LazyTensor]:
        """Run the code of a substitution. Check that shapes and dtypes of the results match the replaced outputs."""
        tensors = substitution.compute([self._tensor(v) for v in substitution.inputs])
        if not isinstance(tensors, list | tuple) or len(tensors) != len(substitution.outputs):
            raise InvalidStage(
                f"the code of a substitution returns {_shown(tensors)}, not {len(substitution.outputs)} tensors"
            )
        results: list[LazyTensor] = []
        for value, tensor in zip(substitution.outputs, tensors, strict=True):
            meta = self.metas[value]
            if not isinstance(tensor, LazyTensor) or (tuple(tensor.shape), tensor.dtype) != (meta.shape, meta.dtype):
                raise InvalidStage(
                    f"the code of a substitution returns {_shown(tensor)} instead of a {meta.dtype} of {meta.shape}"
                )
            results.append(tensor)
        return results

    def _as_known(self, value: int, tensor: LazyTensor) -> LazyTensor:
        """Return a result that outlives the program, in the layout that the client knows."""
        meta = self.metas[value]
        if value in self.program.dead or tensor.remote.meta is meta:
            return tensor
        if meta.offset:
            memory = torch.empty(meta.extent, dtype=meta.dtype, device=tensor.device)
            laid = memory.as_strided(meta.shape, meta.stride, meta.offset)
        else:
            laid = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device)
        laid.copy_(tensor)
        assert isinstance(laid, LazyTensor)
        return laid

    def _apart_from_others(self, values: Sequence[int], tensors: Sequence[LazyTensor]) -> Sequence[torch.Tensor]:
        """Return the results. Copy a result that is written later, so that it has memory of its own."""
        storages = set(self.storages)
        separate: list[torch.Tensor] = []
        for value, tensor in zip(values, tensors, strict=True):
            memory = tensor.remote.storage.id
            shared = memory in storages and storage_of(value) in self.written
            storages.add(memory)
            separate.append(tensor.clone() if shared else tensor)
        return separate

    def _name(self, values: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        for value, tensor in zip(values, tensors, strict=True):
            assert isinstance(tensor, LazyTensor)
            handle = tensor.remote.handle
            if handle in self.names or tensor.remote.borrowed:
                raise InvalidStage(f"value {value} would share its tensor with another value")
            self.names[handle] = value
            self.tensors[value] = tensor
            storage = storage_of(handle)
            if handle == make_handle(storage, _FIRST):  # the tensor covers the whole memory, so its views stay views
                self.memories[storage] = storage_of(value)

    def _record_source(self, first: int, slots: tuple[int, ...] | None, node: int) -> None:
        """Record that the entries from `first` on implement `node`."""
        program, entries = self.program, self.recorder.entries
        where = program.sites[node] if program.sites else None
        for at in range(first, len(entries)):
            new_entry = entries[at]  # keep line and module of the user's code
            module = program.modules[node] if program.modules else None
            entry = msgspec.structs.replace(new_entry, site=where or new_entry.site, module=module)
            own, group = slots is None, self.recorder.group_of(at)
            self.made.append(
                _NewInstruction(entry, (-1,) * len(new_entry.slots) if slots is None else slots, node, own, group)
            )

    def _finish(self, weights: frozenset[int]) -> RewrittenProgram:
        self._check_kept()
        outliving = frozenset(self.metas) - self.program.dead
        before, rest = _hoisted([self._renamed(m) for m in self.made], weights, outliving)
        inputs = {h for m in rest for h in m.entry.inputs}
        relied = sorted({m.node for m in self.made if m.own} | self.relied)
        program = _program([m.entry for m in rest], self.program)
        return RewrittenProgram(
            program,
            self.program,
            tuple(position for m in rest for position in m.slots),
            tuple(m.node for m in rest),
            frozenset(i for i, m in enumerate(rest) if m.own),
            tuple((node, self.program.calls[node]) for node in relied),
            tuple(_recipe(part, inputs) for part in _independent(before)),
            _groups(rest),
        )

    def _check_kept(self) -> None:
        """Check that values that outlive the program have the metadata that the client knows."""
        for value, meta in self.metas.items():
            tensor = self.tensors.get(value)
            if value not in self.program.dead and (tensor is None or tensor.remote.meta is not meta):
                raise InvalidStage(
                    f"value {value} outlives the program, but the substitution drops it or changes its metadata"
                )

    def _known_as(self, handle: int) -> int:
        """Return the value for a handle in the new program.

        If the handle views memory of an original value, return a view of that value.
        """
        if handle in self.names:
            return self.names[handle]
        memory = self.memories.get(storage_of(handle))
        if memory is None:
            return handle
        return make_handle(memory, _OWN_VIEWS + view_of(handle))

    def _renamed(self, made: _NewInstruction) -> _NewInstruction:
        renamed = tuple(self._known_as(handle) for handle in made.entry.handles)
        return attrs.evolve(made, entry=msgspec.structs.replace(made.entry, handles=renamed))


def _groups(made: Sequence[_NewInstruction]) -> tuple[tuple[int, ...], ...]:
    numbers = range(max((m.group for m in made), default=-1) + 1)
    return tuple(tuple(i for i, m in enumerate(made) if m.group == number) for number in numbers)


def _shown(made: object) -> str:
    return f"a {made.dtype} of {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"a {type(made).__name__}"


def _result_metas(program: Program) -> dict[int, TensorMeta]:
    metas: dict[int, TensorMeta] = {}
    for instruction in program.instructions():
        call = instruction.call
        new = [m for m, same in zip(call.results, call.inplace, strict=True) if m is not None and same < 0]
        metas.update(zip(instruction.outputs, new, strict=True))
    return metas


def _hoisted(
    made: Sequence[_NewInstruction], weights: frozenset[int], outliving: frozenset[int]
) -> tuple[list[_NewInstruction], list[_NewInstruction]]:
    """Split the new instructions: instructions that depend on weights only, and the rest."""
    constant = set(weights)
    storages = {storage_of(handle) for one in made for handle in one.entry.writes}
    before: list[_NewInstruction] = []
    rest: list[_NewInstruction] = []
    for one in made:
        call, inputs, outputs = one.entry.call, one.entry.inputs, one.entry.outputs
        stays = not (call.writes or call.random) and storages.isdisjoint(map(storage_of, outputs))
        stays = stays and outliving.isdisjoint(outputs)
        if one.own and inputs and constant.issuperset(inputs) and stays:
            before.append(one)
            constant.update(outputs)
        else:
            rest.append(one)
    return before, rest


def _independent(before: Sequence[_NewInstruction]) -> list[list[_NewInstruction]]:
    """Split hoisted instructions into independent parts, so that other programs find equal parts in the cache."""
    part_of: dict[int, list[_NewInstruction]] = {}
    parts: list[list[_NewInstruction]] = []
    for one in before:
        joined = {id(p): p for h in one.entry.inputs if (p := part_of.get(h)) is not None}
        part = [*(m for p in joined.values() for m in p), one]
        parts = [p for p in parts if id(p) not in joined] + [part]
        part_of.update((h, part) for m in part for h in m.entry.outputs)
    return parts


def _recipe(before: Sequence[_NewInstruction], used: Container[int]) -> Recipe:
    outputs = {h for m in before for h in m.entry.outputs}
    sources = dict.fromkeys(h for m in before for h in m.entry.inputs if h not in outputs)
    handles = tuple(dict.fromkeys(h for m in before for h in m.entry.handles if h in outputs and h in used))
    entries = [m.entry for m in before]
    return Recipe(_assembled(entries, frozenset(outputs) - frozenset(handles)), tuple(sources), handles)


def _program(entries: Sequence[Entry], origin: Program) -> Program:
    """Return the remaining instructions as a program. It frees values that the original program does not have."""
    operands = frozenset(origin.operands)
    outputs = {h for e in entries for h in e.outputs}
    return _assembled(entries, origin.dead | (outputs - operands))


def _assembled(entries: Sequence[Entry], dead: frozenset[int]) -> Program:
    operands = tuple(h for e in entries for h in e.handles)
    return Program(
        calls=tuple(e.call for e in entries),
        operands=operands,
        slots=tuple(s for e in entries for s in e.slots),
        dead=dead.intersection(operands),
        sites=tuple(e.site for e in entries),
        modules=tuple(e.module for e in entries),
    )


def recipe_for(recipe: Recipe, sources: Mapping[int, int], makes: Mapping[int, int]) -> Program:
    """Return a recipe's program for other weights and other results."""
    names = {**sources, **makes}
    operands = tuple(names.get(h, h) for h in recipe.program.operands)
    return attrs.evolve(recipe.program, operands=operands)
