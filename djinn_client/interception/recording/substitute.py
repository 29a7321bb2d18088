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

    def ask_unseen(self, request: SyncRequest) -> NoReturn:  # noqa: ARG002 - whatever is asked
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
    """An instruction of the new program.

    Attributes:
        entry: the recorded op.
        slots: for each slot, its position among the slots of the original program, or -1 if the slot is new.
        node: the original node that the instruction implements.
        is_new: True if the original program does not have this call.
        group: number of the instruction's group, or -1.
    """

    entry: Entry
    slots: tuple[int, ...]
    node: int
    is_new: bool
    group: int


# Views of borrowed memory have numbers from here on; the memory's owner numbers its own views.
_OWN_VIEWS: Final = 1 << 30


class _Rewriter:
    """Records a program again, with its substitutions.

    Attributes:
        program: the original program.
        recorder: records the new program.
        first: each substitution, by the first of its nodes.
        replaced_nodes: nodes that substitutions replace.
        relied_nodes: nodes on whose operand metadata the new program depends.
        written_storages: storages that the remaining nodes write.
        tensors: tensors for values of the original program, by handle.
        storages: one value over each storage of the original program, by number.
        names: handles of the original program, by handle of the new program.
        new_instructions: instructions of the new program.
        metas: metadata of the results in the original program, by handle.
        memories: storages of the original program, by the new storage that replaces each.
    """

    def __init__(self, program: Program, substitutions: Sequence[Substitution], recorder: _UnsentRecorder) -> None:
        self.program = program
        self.recorder = recorder
        self.first = {min(s.nodes): s for s in substitutions}
        self.replaced_nodes = frozenset().union(*(s.nodes for s in substitutions))
        self.relied_nodes = self.replaced_nodes.union(*(s.relies for s in substitutions))
        instructions = (i for i in program.instructions() if i.index not in self.replaced_nodes)
        self.written_storages = {storage_of(v) for instruction in instructions for v in instruction.writes}
        self.tensors: dict[int, LazyTensor] = {}
        self.storages: dict[int, Value] = {}  # one value over each storage
        self.names: dict[int, int] = {}
        self.new_instructions: list[_NewInstruction] = []
        self.metas = _result_metas(program)
        self.memories: dict[int, int] = {}

    def run(self, weights: frozenset[int]) -> RewrittenProgram:
        slot = 0
        for instruction in self.program.instructions():
            if instruction.call.changes:
                raise InvalidStage(
                    f"{instruction.op} changes the metadata of its operand: such a program cannot be rewritten"
                )
            substitution = self.first.get(instruction.index)
            if substitution is not None:
                self._substitute(substitution)
            if instruction.index not in self.replaced_nodes:
                self._record_again(instruction, range(slot, slot + len(instruction.slots)))
            slot += len(instruction.slots)
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
        return next((user for user in self.program.instructions() if value in user.inputs), None)

    def _record_again(self, instruction: Instruction, slots: range) -> None:
        """Record an instruction again, with its original call if the operands have the original metadata.

        `slots`: positions of its slots among the slots of the program.
        """
        call = instruction.call
        operands = [self._tensor(v, call, i) for i, v in enumerate(instruction.inputs)]
        before = self.recorder.unsent
        if all(t.remote.meta is meta for t, meta in zip(operands, call.operands, strict=True)):
            out = append(call, operands, instruction.slots)
        elif call.op in OWN_OPERATORS:
            raise InvalidStage(f"{call.op} would get operands with other metadata than in the original program")
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
        is_original = len(entries) == 1 and entries[0].call is call
        self._record_source(before, tuple(slots) if is_original else None, instruction.index)

    def _as_read(self, value: int, tensor: LazyTensor) -> LazyTensor:
        """Return `tensor`, whose metadata was not predicted, with the metadata of `value` in the call that first reads it."""
        if (user := self._first_user(value)) is None:
            return tensor
        copy = tensor.remote
        copy.meta = self.metas[value] = user.call.operands[user.inputs.index(value)]
        return wrap(copy)

    def _substitute(self, substitution: Substitution) -> None:
        before = self.recorder.unsent
        results = self._computed(substitution)
        results = [self._as_known(v, t) for v, t in zip(substitution.outputs, results, strict=True)]
        self._name(substitution.outputs, self._with_own_memory(substitution.outputs, results))
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
                f"the code of a substitution returns {_kind_text(tensors)}, not {len(substitution.outputs)} tensors"
            )
        results: list[LazyTensor] = []
        for value, tensor in zip(substitution.outputs, tensors, strict=True):
            meta = self.metas[value]
            if not isinstance(tensor, LazyTensor) or (tuple(tensor.shape), tensor.dtype) != (meta.shape, meta.dtype):
                raise InvalidStage(
                    f"the code of a substitution returns {_kind_text(tensor)} instead of a {meta.dtype} tensor of shape {meta.shape}"
                )
            results.append(tensor)
        return results

    def _as_known(self, value: int, tensor: LazyTensor) -> LazyTensor:
        """Return `tensor`, or a copy in the layout that the client knows for `value` if `value` outlives the program."""
        meta = self.metas[value]
        if value in self.program.dead or tensor.remote.meta is meta:
            return tensor
        if meta.offset:
            memory = torch.empty(meta.extent, dtype=meta.dtype, device=tensor.device)
            copy = memory.as_strided(meta.shape, meta.stride, meta.offset)
        else:
            copy = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device)
        copy.copy_(tensor)
        assert isinstance(copy, LazyTensor)
        return copy

    def _with_own_memory(self, values: Sequence[int], tensors: Sequence[LazyTensor]) -> Sequence[torch.Tensor]:
        """Return `tensors`. Copy a tensor that shares memory with another value if the program writes its value later."""
        storages = set(self.storages)
        separate: list[torch.Tensor] = []
        for value, tensor in zip(values, tensors, strict=True):
            memory = tensor.remote.storage.id
            is_shared = memory in storages and storage_of(value) in self.written_storages
            storages.add(memory)
            separate.append(tensor.clone() if is_shared else tensor)
        return separate

    def _name(self, values: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        for value, tensor in zip(values, tensors, strict=True):
            assert isinstance(tensor, LazyTensor)
            handle = tensor.remote.handle
            if handle in self.names or tensor.remote.borrowed:
                raise InvalidStage(
                    f"the code of a substitution returns an input or another output as value {value}: clone it"
                )
            self.names[handle] = value
            self.tensors[value] = tensor
            storage = storage_of(handle)
            if handle == make_handle(storage, _FIRST):  # the tensor covers the whole memory, so its views stay views
                self.memories[storage] = storage_of(value)

    def _record_source(self, first: int, slots: tuple[int, ...] | None, node: int) -> None:
        """Record that the entries from `first` on implement `node`. `slots` is None if their calls are new."""
        program, entries = self.program, self.recorder.entries
        site = program.sites[node] if program.sites else None
        for index in range(first, len(entries)):
            new_entry = entries[index]  # keep line and module of the user's code
            module = program.modules[node] if program.modules else None
            entry = msgspec.structs.replace(new_entry, site=site or new_entry.site, module=module)
            positions = (-1,) * len(new_entry.slots) if slots is None else slots
            self.new_instructions.append(
                _NewInstruction(entry, positions, node, slots is None, self.recorder.group_of(index))
            )

    def _finish(self, weights: frozenset[int]) -> RewrittenProgram:
        self._check_outliving_values()
        outliving = frozenset(self.metas) - self.program.dead
        hoisted, remaining = _hoist([self._renamed(m) for m in self.new_instructions], weights, outliving)
        inputs = {h for m in remaining for h in m.entry.inputs}
        relied_nodes = sorted({m.node for m in self.new_instructions if m.is_new} | self.relied_nodes)
        program = _program([m.entry for m in remaining], self.program)
        return RewrittenProgram(
            program,
            self.program,
            tuple(position for m in remaining for position in m.slots),
            tuple(m.node for m in remaining),
            frozenset(i for i, m in enumerate(remaining) if m.is_new),
            tuple((node, self.program.calls[node]) for node in relied_nodes),
            tuple(_recipe(part, inputs) for part in _independent(hoisted)),
            _groups(remaining),
        )

    def _check_outliving_values(self) -> None:
        """Check that values that outlive the program have the metadata that the client knows."""
        for value, meta in self.metas.items():
            tensor = self.tensors.get(value)
            if value not in self.program.dead and (tensor is None or tensor.remote.meta is not meta):
                raise InvalidStage(
                    f"value {value} outlives the program, but the substitution drops it or changes its metadata"
                )

    def _renamed_handle(self, handle: int) -> int:
        """Return the original program's handle for a handle of the new program.

        If no original handle exists, but the memory replaces an original storage, return a handle of that storage.
        """
        if handle in self.names:
            return self.names[handle]
        memory = self.memories.get(storage_of(handle))
        if memory is None:
            return handle
        return make_handle(memory, _OWN_VIEWS + view_of(handle))

    def _renamed(self, instruction: _NewInstruction) -> _NewInstruction:
        handles = tuple(self._renamed_handle(handle) for handle in instruction.entry.handles)
        return attrs.evolve(instruction, entry=msgspec.structs.replace(instruction.entry, handles=handles))


def _groups(instructions: Sequence[_NewInstruction]) -> tuple[tuple[int, ...], ...]:
    numbers = range(max((m.group for m in instructions), default=-1) + 1)
    return tuple(tuple(i for i, m in enumerate(instructions) if m.group == number) for number in numbers)


def _kind_text(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a {result.dtype} tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"


def _result_metas(program: Program) -> dict[int, TensorMeta]:
    metas: dict[int, TensorMeta] = {}
    for instruction in program.instructions():
        call = instruction.call
        new = [m for m, same in zip(call.results, call.inplace, strict=True) if m is not None and same < 0]
        metas.update(zip(instruction.outputs, new, strict=True))
    return metas


def _hoist(
    instructions: Sequence[_NewInstruction], weights: frozenset[int], outliving: frozenset[int]
) -> tuple[list[_NewInstruction], list[_NewInstruction]]:
    """Split the new instructions: instructions that depend on weights only, and all other instructions."""
    constant = set(weights)
    storages = {storage_of(handle) for instruction in instructions for handle in instruction.entry.writes}
    hoisted: list[_NewInstruction] = []
    remaining: list[_NewInstruction] = []
    for instruction in instructions:
        entry = instruction.entry
        call, inputs, outputs = entry.call, entry.inputs, entry.outputs
        is_constant = not (call.writes or call.random) and storages.isdisjoint(map(storage_of, outputs))
        is_constant = is_constant and outliving.isdisjoint(outputs)
        if instruction.is_new and inputs and constant.issuperset(inputs) and is_constant:
            hoisted.append(instruction)
            constant.update(outputs)
        else:
            remaining.append(instruction)
    return hoisted, remaining


def _independent(hoisted: Sequence[_NewInstruction]) -> list[list[_NewInstruction]]:
    """Split hoisted instructions into independent parts, so that other programs find equal parts in the cache."""
    part_of: dict[int, list[_NewInstruction]] = {}
    parts: list[list[_NewInstruction]] = []
    for instruction in hoisted:
        input_parts = {id(p): p for h in instruction.entry.inputs if (p := part_of.get(h)) is not None}
        part = [*(m for p in input_parts.values() for m in p), instruction]
        parts = [p for p in parts if id(p) not in input_parts] + [part]
        part_of.update((h, part) for m in part for h in m.entry.outputs)
    return parts


def _recipe(part: Sequence[_NewInstruction], used_handles: Container[int]) -> Recipe:
    outputs = {h for m in part for h in m.entry.outputs}
    sources = dict.fromkeys(h for m in part for h in m.entry.inputs if h not in outputs)
    handles = tuple(dict.fromkeys(h for m in part for h in m.entry.handles if h in outputs and h in used_handles))
    entries = [m.entry for m in part]
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
    """Return a recipe's program with other handles.

    Args:
        recipe: the computation on weights.
        sources: for each weight of the recipe, the handle that replaces it.
        makes: for each result of the recipe, the handle that replaces it.
    """
    names = {**sources, **makes}
    operands = tuple(names.get(h, h) for h in recipe.program.operands)
    return attrs.evolve(recipe.program, operands=operands)
