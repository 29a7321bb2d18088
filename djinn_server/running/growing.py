"""In-place growth: a `cat` that appends to an input of its template, such as a KV cache, writes only the new entries.

The library in `csrc` stores a growing tensor in a buffer with spare capacity, so its strides differ from those that the
client predicts. Only the instructions named here read such a tensor directly, because they compute the same bits from it.
All other readers get a dense copy (`ValueTable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch

from djinn_core import torch_private
from djinn_server.running.compiled_step import CompiledStep, Environment, ListSource, Source
from djinn_server.running.native_replay import NativeReplay, ReplayState, library_is_loaded, overload_called

# Ops that return a view of argument 0.
_VIEWS: Final = frozenset({"aten::expand", "aten::permute", "aten::transpose.int", "aten::unsqueeze"})
# Ops that may read growing tensors: the positions of these arguments, and the op of the library that replaces the op.
_READERS: Final[Mapping[str, tuple[tuple[int, ...], str]]] = MappingProxyType({
    "aten::matmul": ((0, 1), "djinn_replay::matmul"),
    "aten::scaled_dot_product_attention": ((1, 2), "djinn_replay::attention"),
})  # fmt: skip
_FREE_COPIES: Final = 64  # copies of a template's results that are too few for a decision


@attrs.define(eq=False)
class Growth:
    """The steps of a template that appends in place.

    Attributes:
        steps: steps of the template, with library ops for the appends and their readers.
        appends: pairs of the position of an input that grows, and the place of the result of its append.
        dense: positions of all other inputs.
        outputs: numbers of the outputs that may be growing tensors.
        result_count: number of growing results so far.
        copied: number of growing results that were copied to a dense tensor for a reader.
    """

    steps: tuple[CompiledStep, ...]
    appends: tuple[tuple[int, int], ...]
    dense: tuple[int, ...]
    outputs: tuple[int, ...]
    result_count: int = attrs.field(init=False, default=0)
    copied: int = attrs.field(init=False, default=0)
    _replay: ReplayState = attrs.field(init=False, factory=ReplayState, eq=False, repr=False)

    def native(self, constants: Sequence[Any], slots: int, values: int) -> NativeReplay | None:
        """Count a run. Return the native program of `steps`. Parameters and None are as in `ReplayState.native`."""
        return self._replay.native(self.steps, constants, slots, values)

    def undo(self, inputs: Sequence[torch.Tensor], env: Environment) -> None:
        """Undo the appends of a run whose results are dropped. `inputs`: its inputs. `env`: its values."""
        for position, result_place in self.appends:
            if isinstance(result := env[result_place], torch.Tensor):
                torch.ops.djinn_replay.undo_append(inputs[position], result)

    def growing_outputs(self, handles: Sequence[int], places: Sequence[int], env: Environment) -> list[int]:
        """Return the handles of outputs that are growing tensors after a run, and count them.

        `handles`, `places`: handles and places of all outputs. `env`: the values of the run.
        """
        values = {handles[number]: env[places[number]] for number in self.outputs}
        tensors = {handle: value for handle, value in values.items() if isinstance(value, torch.Tensor)}
        growing = [*compress(tensors, torch.ops.djinn_replay.are_growing([*tensors.values()]))]
        self.result_count += len(growing)
        return growing

    @property
    def is_worthwhile(self) -> bool:
        """False if many results are read as dense tensors, because growth then copies more bytes than `cat`."""
        return self.copied <= _FREE_COPIES + self.result_count // 4


class GrowthState:
    """The appends of a template that are done in place, determined once, after the native library was loaded.

    They are dropped if growth copies more bytes than it saves.

    Attributes:
        refusal: why an append to an input copies the input; empty if all are done in place.
    """

    __slots__ = ("_growth", "_is_searched", "refusal")

    def __init__(self) -> None:
        self._is_searched = False
        self.refusal = ""
        self._growth: Growth | None = None

    def growth(
        self, steps: Sequence[CompiledStep], constants: Sequence[Any], inputs: range, outputs: Sequence[int]
    ) -> Growth | None:
        """Return the growth of a template. The parameters are those of `find_growth`.

        Return None if no append can be done in place, if the library is not loaded, or if growth copies more than `cat`.
        """
        if not self._is_searched and library_is_loaded():
            obstacles: dict[int, str] = {}
            self._growth, self._is_searched = find_growth(steps, constants, inputs, outputs, obstacles), True
            self.refusal = next((reason for place, reason in obstacles.items() if place in inputs), "")
        elif self._growth is not None and not self._growth.is_worthwhile:
            self._growth = None
            self.refusal = "other programs read its results so often that copies for them took more than appends saved"
        return self._growth


def find_growth(
    steps: Sequence[CompiledStep],
    constants: Sequence[Any],
    inputs: range,
    outputs: Sequence[int],
    reasons: dict[int, str] | None = None,
) -> Growth | None:
    """Return the appends of a template that can be done in place, or None if no append can.

    An append is a `cat` of two tensors. It can be done in place if the extended tensor, the result, and their views meet
    two conditions:

    - Only ops that support growing tensors read them (`_READERS`, `_VIEWS`, further appends). So no op writes into them.
    - The template outputs none of them except the result, and the result once. So clients do not see their strides.

    Args:
        steps: steps of the template.
        constants: constants of the template.
        inputs: places of the inputs.
        outputs: places of the outputs.
        reasons: receives why an append copies, by the place of the tensor that it extends.
    """
    appends = {at: pair for at, step in enumerate(steps) if (pair := _append(step)) is not None}
    while appends:
        obstacles = _obstacles(steps, appends, constants, inputs, outputs)
        if not obstacles:
            break
        if reasons is not None:
            found = {first: obstacles.get(first, obstacles.get(made)) for first, made in appends.values()}
            reasons.update({first: reason for first, reason in found.items() if reason is not None})
        appends = {at: pair for at, pair in appends.items() if obstacles.keys().isdisjoint(pair)}
    if not appends:
        return None
    growing = {place for pair in appends.values() for place in pair}
    grown = {result_place for _, result_place in appends.values()}
    return Growth(
        tuple(_rewritten(steps, appends)),
        tuple([(inputs.index(first), result_place) for first, result_place in appends.values() if first in inputs]),
        tuple([position for position, place in enumerate(inputs) if place not in growing]),
        tuple([number for number, place in enumerate(outputs) if place in grown]),
    )


def _append(step: CompiledStep) -> tuple[int, int] | None:
    """Return the places of the extended tensor and of the result if a step is a `cat` of two tensors, else None."""
    if step.op != "aten::cat" or not step.plain or step.keywords or len(step.arguments) != 2 or len(step.makes) != 1:
        return None
    tensors, dim = step.arguments
    if not isinstance(tensors, ListSource) or len(tensors.items) != 2 or type(dim) is not int:
        return None
    first, second = tensors.items
    return (first, step.makes[0][1]) if type(first) is int and type(second) is int and first != second else None


def _obstacles(
    steps: Sequence[CompiledStep],
    appends: Mapping[int, tuple[int, int]],
    constants: Sequence[Any],
    inputs: range,
    outputs: Sequence[int],
) -> dict[int, str]:
    """Return why an extended tensor or the result of an append must be dense, by the place of this tensor.

    `appends`: places of the extended tensor and of the result, by the number of the step.
    """
    grown = {result_place for _, result_place in appends.values()}
    roots = {place: place for pair in appends.values() for place in pair}
    obstacles = {
        first: "a `cat` extends a tensor that is not an input"
        for first, _ in appends.values()
        if first not in inputs and first not in grown
    }
    for at, step in enumerate(steps):
        read = Counter(step.reads)
        if at in appends:
            read[appends[at][0]] -= 1
        for position in _positions(step, constants):
            if position < len(step.arguments) and type(place := step.arguments[position]) is int:
                read[place] -= 1
        for place in [place for place, count in read.items() if count and place in roots]:
            obstacles.setdefault(roots[place], f"{step.op} reads the growing tensor, but needs a dense tensor")
        if step.op in _VIEWS and step.reads and (root := roots.get(step.reads[0])) is not None:
            roots.update({result_place: root for _, result_place in step.makes})
    counts = Counter(outputs)
    visible = {root for place, root in roots.items() if counts[place] and not (place in grown and counts[place] == 1)}
    return dict.fromkeys(visible, "the program returns the growing tensor twice, or a view of it") | obstacles


def _positions(step: CompiledStep, constants: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of a step's arguments that may be growing tensors."""
    if step.op in _VIEWS:
        return (0,)
    if step.op in _READERS:
        return _READERS[step.op][0] if step.plain else ()
    if step.op == "aten::clone" and [name for name, _ in step.keywords] == ["memory_format"]:
        source: Source = step.keywords[0][1]
        if type(source) is int and source < len(constants) and constants[source] is torch.contiguous_format:
            return (0,)
    return ()


def _rewritten(steps: Sequence[CompiledStep], appends: Mapping[int, tuple[int, int]]) -> Iterator[CompiledStep]:
    growing = {place for pair in appends.values() for place in pair}
    for at, step in enumerate(steps):
        if at in appends:
            tensors, dim = step.arguments
            assert isinstance(tensors, ListSource)
            yield _with_op(step, "djinn_replay::append", (*tensors.items, dim))
        elif step.op in _READERS and not growing.isdisjoint(step.reads):
            yield _with_op(step, _READERS[step.op][1], step.arguments)
        else:
            yield step
        if step.op in _VIEWS and not growing.isdisjoint(step.reads[:1]):
            growing.update([result_place for _, result_place in step.makes])


def _with_op(step: CompiledStep, op: str, arguments: tuple[Source, ...]) -> CompiledStep:
    return attrs.evolve(step, op=op, function=torch_private.plain_kernel_of(overload_called(op)), arguments=arguments)


def are_dense(inputs: Sequence[torch.Tensor], growth: Growth | None) -> bool:
    """Return True if all inputs are dense, except inputs that `growth` lets grow."""
    needed = inputs if growth is None else [inputs[position] for position in growth.dense]
    return not any(torch.ops.djinn_replay.are_growing(needed))


def copied_bytes() -> tuple[int, int]:
    """Return the bytes that in-place appends have added, and the bytes that they copied, since the process began."""
    if not library_is_loaded():
        return 0, 0
    appended, copied = torch.ops.djinn_replay.copies()
    return appended, copied
