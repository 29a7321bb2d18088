"""Join the rows of several runs: concatenate them along the first dimension, so that one op computes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch

from djinn_core.ir.program import interchangeable
from djinn_server.running.compiled_step import Environment
from djinn_server.running.run import TemplateRun
from djinn_strategies.batching.rows import RowStep

MAX_ROWS: Final = 64  # with more rows, arithmetic takes longer than reading the weight


@attrs.frozen(eq=False)
class Rows:
    """Rows of several sessions, concatenated in one tensor.

    Attributes:
        whole: the tensor with the rows of all sessions.
        sizes: number of rows of each session.
    """

    whole: torch.Tensor
    sizes: tuple[int, ...]

    def parts(self) -> Sequence[torch.Tensor]:
        """Return the rows of each session as a separate copy, so that sessions cannot write into each other's rows."""
        return torch.ops.aten.split_with_sizes_copy(self.whole, self.sizes)  # type: ignore[no-any-return]


@attrs.frozen
class ChainOperand:
    """A value that a chain reads from the environments of the runs.

    Attributes:
        place: place of the value.
        shared: True if all runs have the same value. Otherwise each run has its own rows.
        shape: shape of the shared value, or of each row.
    """

    place: int
    shared: bool
    shape: torch.Size
    dtype: torch.dtype


@attrs.frozen
class RecordedChain:
    """Record of consecutive instructions that were computed once for several runs.

    If a later batch has operands of equal shapes and equal numbers, it repeats the chain without preparing each
    instruction.

    Attributes:
        stop: the first instruction after the chain.
        sizes: number of rows of each run.
        operands: values that the chain reads from the runs.
        slots: first place of the chain's numeric arguments, and the place after the last one.
        numbers: numeric arguments, equal in all runs.
        joined_numbers: numeric arguments of the ops on the joined rows.
        results: places of results that are read after the chain.
    """

    stop: int
    sizes: tuple[int, ...]
    operands: tuple[ChainOperand, ...]
    slots: tuple[int, int]
    numbers: Sequence[Any]
    joined_numbers: Sequence[Any]
    results: tuple[int, ...]


class JoinedRuns:
    """Runs of one template at the same instruction, with their values joined in one environment.

    Attributes:
        runs: the runs.
        env: the environment with the joined values.
        results: places of joined results that the runs' own environments do not have yet.
    """

    def __init__(self, runs: Sequence[TemplateRun], unwritten_places: frozenset[int]) -> None:
        """Join `runs`.

        `unwritten_places`: places of values that no instruction writes. Their joined rows are cached.
        """
        self.runs = runs
        self.results: set[int] = set()
        self._unwritten_places = unwritten_places
        self._template = template = runs[0].template
        self._head = len(template.constants) + template.slots
        self.env: Environment = [*runs[0].env[: self._head], *[None] * (template.inputs + template.computed)]
        self._rows: dict[int, Rows] = {}
        self._operands: dict[int, ChainOperand] | None = None
        self._slots: list[int] = []
        self._sizes: set[tuple[int, ...]] = set()

    def begin(self) -> None:
        """Start to record a chain of instructions."""
        self._operands, self._slots, self._sizes = {}, [], set()

    def is_for(self, runs: Sequence[TemplateRun]) -> bool:
        """Return True if `runs` are the runs that this object joins, in the same order."""
        return len(runs) == len(self.runs) and all(
            run is joined_run for run, joined_run in zip(runs, self.runs, strict=True)
        )

    def rows(self, place: int) -> Rows | None:
        """Return the joined rows of the values at a place, or None if the values cannot be concatenated."""
        rows = self._rows.get(place)
        if rows is None:
            rows = join_rows([run.env[place] for run in self.runs])
            if rows is not None:
                self._rows[place] = rows
        if rows is not None:
            self._sizes.add(rows.sizes)
            if place not in self.results:
                self._record_operand(place, False, rows.whole)
        return rows

    def shared(self, place: int) -> bool:
        """Return True if all runs have the same value at a place."""
        value = self.runs[0].env[place]
        if not all(is_same(value, run.env[place]) for run in self.runs[1:]):
            return False
        self._record_operand(place, True, value)
        return True

    def has_rows(self, place: int) -> bool:
        """Return True if the rows at a place are joined already."""
        return place in self._rows

    def store(self, place: int, rows: Rows) -> None:
        """Store the joined result of an instruction."""
        self._rows[place] = rows
        self.results.add(place)

    def prepare_step(self, row: RowStep) -> tuple[int, ...] | None:
        """Put the operands and numbers of an instruction into the joined environment.

        Return the number of rows of each run. If the instruction has to run separately for each run, return None.
        """
        sizes = self._prepare_operands(row)
        return sizes if sizes is not None and self._prepare_numbers(row, sizes) else None

    def compute(self, row: RowStep) -> torch.Tensor:
        """Run a prepared instruction on the joined rows, and return its result.

        Raises:
            Exception: any error of the op, for example if it does not accept joined rows.
        """
        self._template.steps[row.step].store(self.env)
        result, self.env[row.place] = self.env[row.place], None
        return result  # type: ignore[no-any-return]

    def drop(self, places: Sequence[int]) -> None:
        """Drop the joined rows at `places`."""
        for place in places:
            self._rows.pop(place, None)
            self.results.discard(place)

    def flat_rows(self, place: int) -> Rows | None:
        """Flatten the value of each run to a matrix, and return the concatenated matrices.

        Return None if they have more than `MAX_ROWS` rows.
        """
        flat = [run.env[place].reshape(-1, run.env[place].shape[-1]) for run in self.runs]
        sizes = tuple(map(len, flat))
        return Rows(torch.cat(flat), sizes) if sum(sizes) <= MAX_ROWS else None

    def store_separate(self, step: int, place: int, results: Sequence[torch.Tensor]) -> None:
        """Store `results`, the separately computed results of instruction `step`, in the environments of the runs."""
        self.scatter(step)
        self._operands = None
        release = self._template.steps[step].release
        for run, result in zip(self.runs, results, strict=True):
            run.skip_steps(step + 1, release, {} if place in release else {place: result})

    def scatter(self, stop: int) -> None:
        """Copy joined results into the environments of the runs. All runs continue with instruction `stop`."""
        self.clear()
        places = [*self.results]
        parts = [self._rows[place].parts() for place in places]
        steps = self._template.steps[self.runs[0].step : stop]
        release = [place for step in steps for place in step.release if self.runs[0].env[place] is not None]
        for number, run in enumerate(self.runs):
            run.skip_steps(stop, release, {place: part[number] for place, part in zip(places, parts, strict=True)})
        self.results.clear()
        for place in [*self._rows.keys() - self._unwritten_places]:
            del self._rows[place]

    def record_chain(self, stop: int) -> RecordedChain | None:
        """Return the chain from `begin` to before `stop`, or None if an instruction ran separately for each run."""
        if self._operands is None or not self.results or len(self._sizes) != 1:
            return None
        (sizes,) = self._sizes
        slots = (self._slots[0], self._slots[-1]) if self._slots else (0, 0)
        numbers, joined_numbers = self.runs[0].env[slots[0] : slots[1]], self.env[slots[0] : slots[1]]
        return RecordedChain(stop, sizes, (*self._operands.values(),), slots, numbers, joined_numbers, (*self.results,))

    def prepare_chain(self, chain: RecordedChain) -> bool:
        """Prepare a recorded chain. Return False if the operands or numbers of the runs differ from the record."""
        env, (first, stop) = self.env, chain.slots
        if not all(_are_interchangeable(run.env[first:stop], chain.numbers) for run in self.runs):
            return False
        for operand in chain.operands:
            if operand.shared:
                value = self.runs[0].env[operand.place]
                if not self.shared(operand.place) or value.shape != operand.shape:
                    return False
            else:
                rows = self.rows(operand.place)
                if rows is None or rows.sizes != chain.sizes or rows.whole.shape[1:] != operand.shape:
                    return False
                value = rows.whole
            if value.dtype is not operand.dtype:
                return False
            env[operand.place] = value
        env[first:stop] = chain.joined_numbers
        return True

    def store_chain(self, chain: RecordedChain) -> None:
        """Store the results of a recorded chain."""
        for place in chain.results:
            self.store(place, Rows(self.env[place], chain.sizes))

    def clear(self) -> None:
        """Remove all values from the joined environment."""
        self.env[self._head :] = [None] * (len(self.env) - self._head)

    def _record_operand(self, place: int, shared: bool, value: torch.Tensor) -> None:
        if self._operands is not None:
            shape = value.shape if shared else value.shape[1:]
            self._operands.setdefault(place, ChainOperand(place, shared, shape, value.dtype))

    def _prepare_operands(self, row: RowStep) -> tuple[int, ...] | None:
        """Put the operands of an instruction into the joined environment.

        Return the number of rows of each session. If the operands cannot be joined, return None.
        """
        sizes, dim, weights = None, 0, list[torch.Tensor]()
        for position, place in enumerate(row.operands):
            if not self.has_rows(place) and (position or row.rule == "each") and self.shared(place):
                self.env[place] = self.runs[0].env[place]
                weights.append(self.env[place])
                continue
            rows = None if position and row.rule == "norm" else self.rows(place)
            if rows is None or (sizes is not None and (rows.sizes != sizes or rows.whole.dim() != dim)):
                return None
            sizes, dim = rows.sizes, rows.whole.dim()
            self.env[place] = rows.whole
        broadcast = all(weight.dim() < dim or (weight.dim() == dim and weight.shape[0] == 1) for weight in weights)
        return sizes if broadcast else None

    def _prepare_numbers(self, row: RowStep, sizes: tuple[int, ...]) -> bool:
        """Put the numbers of an instruction into the joined environment.

        Return False if the numbers differ between runs, or if they depend on the number of rows.
        """
        self._slots += row.slots
        first, stop = row.slots
        numbers = self.runs[0].env[first:stop]
        if not all(_are_interchangeable(run.env[first:stop], numbers) for run in self.runs[1:]):
            return False
        dim: int = self.env[row.operands[0]].dim()
        if row.rule == "norm":
            return row.span < dim
        if row.rule == "dims":
            return bool(numbers) and all(isinstance(number, int) and number % dim for number in numbers)
        if row.rule == "view":
            if row.span < 2 or any(size != numbers[0] for size in sizes):
                return False
            self.env[first] = sum(sizes)
        return True


def join_rows(values: Sequence[Any]) -> Rows | None:
    """Return values concatenated along the first dimension, or None if they do not fit or exceed `MAX_ROWS` rows."""
    first = values[0]
    if type(first) is not torch.Tensor or first.dim() < 2:
        return None
    row, dtype = first.shape[1:], first.dtype
    for value in values:
        if type(value) is not torch.Tensor or value.shape[1:] != row or value.dtype is not dtype:
            return None
        if not is_plain(value) or not value.is_contiguous() or not value.numel():
            return None
    if sum(value.numel() for value in values) > MAX_ROWS * first.shape[-1]:
        return None
    return Rows(torch.cat(list(values)), tuple([value.shape[0] for value in values]))


def is_plain(value: torch.Tensor) -> bool:
    """Return True if the tensor is strided, and neither lazily conjugated nor lazily negated."""
    return value.layout is torch.strided and not (value.is_neg() or value.is_conj())


def is_same(first: Any, second: Any) -> bool:
    """Return True if both values are tensors with the same address and layout."""
    if type(first) is not torch.Tensor or type(second) is not torch.Tensor or first.data_ptr() != second.data_ptr():
        return False
    return first.shape == second.shape and first.stride() == second.stride() and first.dtype is second.dtype


def _are_interchangeable(numbers: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(numbers) == len(expected) and all(map(interchangeable, numbers, expected))
