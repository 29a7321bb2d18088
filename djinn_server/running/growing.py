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

_VIEWS: Final = frozenset({"aten::expand", "aten::permute", "aten::transpose.int", "aten::unsqueeze"})  # of argument 0
# Ops that read a growing tensor at these arguments, with the op of the library that runs in their place.
_READERS: Final[Mapping[str, tuple[tuple[int, ...], str]]] = MappingProxyType({
    "aten::matmul": ((0, 1), "djinn_replay::matmul"),
    "aten::scaled_dot_product_attention": ((1, 2), "djinn_replay::attention"),
})  # fmt: skip
_COPIES: Final = 64  # of a template's results, which say nothing yet


@attrs.define(eq=False)
class Growth:
    """The steps of a template that appends in place.

    Attributes:
        steps: steps of the template, with library ops for the appends and their readers.
        appends: positions of the inputs that grow, with the places of the results.
        dense: positions of all other inputs.
        outputs: numbers of the outputs that may grow.
        made: number of growing results so far.
        copied: number of growing results that were copied to a dense tensor for another reader.
    """

    steps: tuple[CompiledStep, ...]
    appends: tuple[tuple[int, int], ...]
    dense: tuple[int, ...]
    outputs: tuple[int, ...]
    made: int = attrs.field(init=False, default=0)
    copied: int = attrs.field(init=False, default=0)
    _replay: ReplayState = attrs.field(init=False, factory=ReplayState, eq=False, repr=False)

    def native(self, constants: Sequence[Any], slots: int, values: int) -> NativeReplay | None:
        """Count a run, and return the native program, as `ReplayState.native` does."""
        return self._replay.native(self.steps, constants, slots, values)

    def undo(self, inputs: Sequence[torch.Tensor], env: Environment) -> None:
        """Undo the appends of a run, because its results are dropped."""
        for position, result_place in self.appends:
            if isinstance(result := env[result_place], torch.Tensor):
                torch.ops.djinn_replay.undo_append(inputs[position], result)

    def growing_outputs(self, handles: Sequence[int], places: Sequence[int], env: Environment) -> list[int]:
        """Return the handles of outputs that are growing tensors now.

        `handles`, `places`: handles and places of all outputs.
        """
        values = {handles[number]: env[places[number]] for number in self.outputs}
        tensors = {handle: value for handle, value in values.items() if isinstance(value, torch.Tensor)}
        growing = [*compress(tensors, torch.ops.djinn_replay.are_growing([*tensors.values()]))]
        self.made += len(growing)
        return growing

    @property
    def is_worthwhile(self) -> bool:
        """False if many results are read as dense tensors, because growth then copies more bytes than `cat`."""
        return self.copied <= _COPIES + self.made // 4


class GrowthState:
    """The in-place growth of a template. It is determined after the library was loaded.

    Attributes:
        refusal: why appends to inputs copy them; empty if they do not.
    """

    __slots__ = ("_found", "_looked", "refusal")

    def __init__(self) -> None:
        self._looked = False
        self.refusal = ""
        self._found: Growth | None = None

    def growth(
        self, steps: Sequence[CompiledStep], constants: Sequence[Any], inputs: range, outputs: Sequence[int]
    ) -> Growth | None:
        """Return the growth of a template, as `find_growth` does.

        Return None if the library is not loaded, or if growth copies more bytes than `cat`.
        """
        if not self._looked and library_is_loaded():
            refused: dict[int, str] = {}
            self._found, self._looked = find_growth(steps, constants, inputs, outputs, refused), True
            self.refusal = next((reason for place, reason in refused.items() if place in inputs), "")
        elif self._found is not None and not self._found.is_worthwhile:
            self._found, self.refusal = (
                None,
                "other programs read its results so often that copies took more than they saved",
            )
        return self._found


def find_growth(
    steps: Sequence[CompiledStep],
    constants: Sequence[Any],
    inputs: range,
    outputs: Sequence[int],
    reasons: dict[int, str] | None = None,
) -> Growth | None:
    """Find the appends of a template that can be done in place. Return None if there are none.

    An append qualifies on two conditions. Only the ops of `_READERS` and further appends read its input, its result and their
    views. Of these values, the template returns only the result, once. Then no op writes into them or shows their strides.

    Args:
        steps: steps of the template.
        constants: constants of the template.
        inputs: places of the inputs.
        outputs: places of the outputs.
        reasons: receives why other appends copy, by the place of the tensor that they extend.
    """
    appends = {at: pair for at, step in enumerate(steps) if (pair := _append(step)) is not None}
    while appends:
        refused = _refused(steps, appends, constants, inputs, outputs)
        if not refused:
            break
        if reasons is not None:
            found = {first: refused.get(first, refused.get(made)) for first, made in appends.values()}
            reasons.update({first: reason for first, reason in found.items() if reason is not None})
        appends = {at: pair for at, pair in appends.items() if refused.keys().isdisjoint(pair)}
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
    """Return the places of the growing tensor and of the result if a step may be an append, else None."""
    if step.op != "aten::cat" or not step.plain or step.keywords or len(step.arguments) != 2 or len(step.makes) != 1:
        return None
    tensors, dim = step.arguments
    if not isinstance(tensors, ListSource) or len(tensors.items) != 2 or type(dim) is not int:
        return None
    first, second = tensors.items
    return (first, step.makes[0][1]) if type(first) is int and type(second) is int and first != second else None


def _refused(
    steps: Sequence[CompiledStep],
    appends: Mapping[int, tuple[int, int]],
    constants: Sequence[Any],
    inputs: range,
    outputs: Sequence[int],
) -> dict[int, str]:
    """Return the places of appends that must be dense, with the reason."""
    grown = {result_place for _, result_place in appends.values()}
    roots = {place: place for pair in appends.values() for place in pair}
    refused = {
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
            refused.setdefault(roots[place], f"{step.op} reads the tensor that grows, and needs it without gaps")
        if step.op in _VIEWS and step.reads and (root := roots.get(step.reads[0])) is not None:
            roots.update({result_place: root for _, result_place in step.makes})
    counts = Counter(outputs)
    kept = {root for place, root in roots.items() if counts[place] and not (place in grown and counts[place] == 1)}
    return dict.fromkeys(kept, "the program keeps a view of the tensor that grows") | refused


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
    """Return True if all inputs are dense, except inputs for which `growth` accepts spare capacity."""
    needed = inputs if growth is None else [inputs[position] for position in growth.dense]
    return not any(torch.ops.djinn_replay.are_growing(needed))


def copied_bytes() -> tuple[int, int]:
    """Return the bytes that appends have added and the bytes that they copied, since the process began."""
    if not library_is_loaded():
        return 0, 0
    appended, copied = torch.ops.djinn_replay.copies()
    return appended, copied
