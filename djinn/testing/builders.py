"""Build programs for tests of plugins. Ops are added one by one, and none is run."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from djinn_core.ir.form import Argument, Form, Operand, SlotArg
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import make_handle, new_storage, storage_of
from djinn_core.ir.program import Call, Program, Signature, Slot
from djinn_core.ir.values import TensorMeta, contiguous_strides, tensor_meta


@attrs.define
class ProgramBuilder:
    """Build a program op by op. A value is represented by its handle, as in `Graph`.

    Attributes:
        metas: metadata of each value, by handle.
        calls: the ops so far.
        operands: handles of the operands and new results of `calls`, in order.
        slots: numbers among the arguments of `calls`, in order.
        dead: handles of values that die with the program.
        modules: paths of modules that called ops, by index of the op.

    Example:
        builder = ProgramBuilder()
        x, w = builder.input(8, 16), builder.input(16, 4)
        y = builder.op("aten::mm", x, w, shape=(8, 4))
        graph = builder.graph()
    """

    metas: dict[int, TensorMeta] = attrs.field(factory=dict)
    calls: list[Call] = attrs.field(factory=list)
    operands: list[int] = attrs.field(factory=list)
    slots: list[Slot] = attrs.field(factory=list)
    dead: set[int] = attrs.field(factory=set)
    modules: dict[int, str] = attrs.field(factory=dict)

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        """Add a contiguous input with the given sizes, and return its handle."""
        return self._value(make_handle(new_storage(), 0), shape, dtype)

    def op(
        self,
        name: str,
        *inputs: int,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        slots: Sequence[Slot] = (),
        random: bool = False,
        module: str = "",
    ) -> int:
        """Append an op, and return the handle of its result.

        Args:
            name: name of the op, such as `aten::mm`.
            inputs: handles of the operands.
            shape: sizes of the result.
            dtype: dtype of the result, by default that of the first input.
            slots: numbers among the arguments, after the operands.
            random: True if the op draws random numbers.
            module: path of the module that calls the op.
        """
        handle = make_handle(new_storage(), 0)
        self._append(
            name, inputs, slots, _Effect(handle, random=random), tuple(shape), self._dtype(dtype, inputs), module
        )
        return handle

    def view(self, name: str, base: int, *, shape: Sequence[int], slots: Sequence[Slot] = ()) -> int:
        """Append an op whose result is a view of `base` with the sizes `shape`, and return the handle of the view."""
        storage = storage_of(base)
        handle = make_handle(storage, sum(storage_of(value) == storage for value in self.metas))
        self._append(name, (base,), slots, _Effect(handle, alias=0), tuple(shape), self.metas[base].dtype, "")
        return handle

    def inplace(self, name: str, target: int, *inputs: int, slots: Sequence[Slot] = (), random: bool = False) -> int:
        """Append an op that writes into `target` and returns it, such as `aten::add_.Tensor`. Return `target`."""
        meta = self.metas[target]
        effect = _Effect(target, writes=True, random=random)
        self._append(name, (target, *inputs), slots, effect, meta.shape, meta.dtype, "")
        return target

    def drop(self, *values: int) -> None:
        """Mark values that die with the program, because the user's code no longer refers to them at its end."""
        self.dead.update(values)

    def program(self) -> Program:
        """Return the program that was built so far."""
        return Program(tuple(self.calls), tuple(self.operands), tuple(self.slots), frozenset(self.dead))

    def graph(self) -> Graph:
        """Return the graph of the program that was built so far."""
        return Graph(self.program(), dict(self.modules))

    def _dtype(self, dtype: torch.dtype | None, inputs: Sequence[int]) -> torch.dtype:
        return dtype or (self.metas[inputs[0]].dtype if inputs else torch.float32)

    def _value(self, handle: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        self.metas[handle] = tensor_meta(shape, contiguous_strides(shape), 0, dtype)
        return handle

    def _append(
        self,
        name: str,
        inputs: Sequence[int],
        slots: Sequence[Slot],
        effect: _Effect,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        module: str,
    ) -> None:
        arguments_of_form: tuple[Argument, ...] = (*(Operand() for _ in inputs), *(SlotArg() for _ in slots))
        form = Form(name, arguments_of_form, (), ("none" if effect.writes else "new",), sequence=False)
        metas = tuple(self.metas[value] for value in inputs)
        if not effect.writes:
            self._value(effect.result, shape, dtype)
        call = Call(
            signature=Signature(form, tuple((len(meta.shape), meta.dtype) for meta in metas)),
            operands=metas,
            results=(self.metas[effect.result],),
            aliases=(0 if effect.writes else effect.alias,),
            inplace=(0 if effect.writes else -1,),
            writes=(0,) if effect.writes else (),
            random=effect.random,
            operand_count=len(inputs),
            slot_count=len(slots),
            new_count=0 if effect.writes else 1,
            nbytes=(0 if effect.writes or effect.alias >= 0 else self.metas[effect.result].nbytes,),
        )
        if module:
            self.modules[len(self.calls)] = module
        self.calls.append(call)
        self.operands += inputs if effect.writes else (*inputs, effect.result)
        self.slots += slots


@attrs.frozen
class _Effect:
    """Effects of an op.

    Attributes:
        result: handle of the value that the op returns.
        alias: position of the operand that the result is a view of. If the result is no view, it is -1.
        writes: True if the op writes into its first operand.
        random: True if the op draws random numbers.
    """

    result: int
    alias: int = -1
    writes: bool = False
    random: bool = False
