"""Run steps whose sizes grow, such as decode steps, at a fixed capacity, so that a graph can record them.

A tensor with `n + plus` entries is padded to `capacity` entries. `n` is stored in device memory. Each op has a rule,
which ensures that padding never affects valid entries of a result. An op without a rule raises `UnpaddableError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from djinn_core.errors import DjinnError
from djinn_core.ir.operators import resolve
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_strategies.compiling.copied_views import CopiedViews, StaleViewError
from djinn_strategies.compiling.region import is_view
from djinn_strategies.compiling.sizes import LinearSize
from djinn_strategies.compiling.written_views import address_of

aten: Final = torch.ops.aten
_TO_THE_END: Final = 1 << 62  # a larger end of a slice means the end of the dimension


class UnpaddableError(DjinnError):
    """An op has no rule for padded operands, or the rule does not cover its arguments."""


@attrs.frozen(eq=False)
class Padded:
    """A tensor of `capacity` entries in dimension `dim`.

    The first `n + plus` entries are valid. All later entries are padding.

    Attributes:
        tensor: the padded tensor.
        dim: the padded dimension.
        plus: number of valid entries, minus `n`.
        finite: True if all padding is finite.
        zero: True if all padding is zero.
        buffer: index of the input whose buffer is `tensor`. If `tensor` has its own memory, it is None.
        origin: index of the input from whose buffer the entries come, if they may be copied back; otherwise None.
    """

    tensor: torch.Tensor
    dim: int
    plus: int
    finite: bool = False
    zero: bool = False
    buffer: int | None = None
    origin: int | None = None

    @property
    def from_right(self) -> int:
        """Position of the padded dimension from the right. The last dimension has position 1."""
        return self.tensor.dim() - self.dim

    def like(self, tensor: torch.Tensor, dim: int | None = None) -> Padded:
        """Return a `Padded` of `tensor` with as many valid entries as this tensor, in `dim` (default: `self.dim`)."""
        return Padded(tensor, self.dim if dim is None else dim, self.plus, self.finite, self.zero)


@attrs.frozen
class SymbolicNumber:
    """A numeric argument `times * n + plus`, which varies between runs."""

    expression: LinearSize


class PaddedRun:
    """Run steps on padded tensors.

    Attributes:
        env: environment that may contain `Padded` and `SymbolicNumber` values.
        n: 0-dim int64 tensor with the varying size.
        min_n: the smallest `n` for which the steps run so far are valid.
        max_n: the largest `n` for which they are valid.
        appended: indices of inputs to whose buffers entries were appended.
    """

    def __init__(self, env: Environment, capacity: int, n: torch.Tensor, example: int, *, writes: bool = False) -> None:
        """Prepare a run. `capacity`: padded size. `example`: value of `n`. `writes`: True if a step writes operands."""
        self.env, self.capacity, self.n = env, capacity, n
        self._views = CopiedViews() if writes else None
        self._example = example
        self.min_n, self.max_n = 0, capacity
        self.appended: set[int] = set()
        self._cached_tensors: dict[Any, torch.Tensor] = {}  # masks and positions that several ops need

    def step(self, step: CompiledStep) -> bool:
        """Run a step by its rule, and return True. If no argument is padded or varies, do nothing and return False.

        Raises:
            UnpaddableError: no rule covers the step.
        """
        args, kwargs = step.arguments_from(self.env)
        if step.op == "aten::_reshape_alias" and isinstance(args[0], torch.Tensor):
            self.env[step.makes[0][1]] = args[0].reshape(args[1])  # a copied slice has other strides than the view
            self._record_copies(step, args[0])
            return True
        if not any(isinstance(value, Padded | SymbolicNumber) for value in _flat((*args, *kwargs.values()))):
            return False
        if step.writes:
            raise UnpaddableError(f"{step.op} writes into an operand")
        name = step.op.partition("::")[2].partition(".")[0]
        rule = _RULES.get(name)
        if rule is None and torch.Tag.pointwise in resolve(step.op).tags:
            rule = _pointwise
        if rule is None or not step.op.startswith("aten::"):
            raise UnpaddableError(f"{step.op} has no rule for a size that grows")
        try:
            result_values = rule(self, getattr(aten, name), *args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnpaddableError(f"{step.op} does not fit its rule for a size that grows: {error}") from error
        for result, place in step.makes:
            self.env[place] = result_values[result] if step.returns_list else result_values
        self._record_copies(step, _unpadded(args[0]))
        return True

    def _record_copies(self, step: CompiledStep, viewed: object) -> None:
        """Record the results of a view op that were copied."""
        if self._views is not None and isinstance(viewed, torch.Tensor) and is_view(step.op):
            for _, place in step.makes:
                self._views.record_view(viewed, _unpadded(self.env[place]))

    def store_written_copies(self, step: CompiledStep) -> None:
        """After a step has written into a copy that replaces a view, store the contents in the viewed tensor.

        Raises:
            UnpaddableError: another copy is now stale, or the contents cannot be stored.
        """
        for place in step.writes:
            assert self._views is not None
            try:
                self._views.store_copy(self.env[place])
            except StaleViewError as error:
                raise UnpaddableError(f"{step.op} cannot be recorded: {error}") from error

    def select_entries(self, tensor: torch.Tensor, dim: int, positions: torch.Tensor) -> torch.Tensor:
        """Return a copy of the entries of dimension `dim` at varying positions."""
        if self._views is None:
            return tensor.index_select(dim, positions)
        return self._views.select(tensor, dim, positions)

    def restrict_n(self, *, min_n: int = 0, max_n: int | None = None) -> None:
        """Restrict the valid `n` to the range from `min_n` to `max_n`, both included."""
        self.min_n = max(self.min_n, min_n)
        self.max_n = self.max_n if max_n is None else min(self.max_n, max_n)

    def result_size(self, number: Any) -> int:
        """Return a size of a result: the capacity if the size grows, otherwise `number`."""
        if not isinstance(number, SymbolicNumber):
            return int(number)
        if number.expression.times != 1:
            raise UnpaddableError(f"a size is a multiple of the growing length: {number.expression.times} n")
        self.restrict_n(max_n=self.capacity - number.expression.plus)
        return self.capacity

    def as_number(self, number: Any) -> Any:
        """Return a numeric argument: as a 0-dim tensor if it varies, otherwise unchanged."""
        if not isinstance(number, SymbolicNumber):
            return number
        times, plus = number.expression.times, number.expression.plus
        scaled = self.n if times == 1 else self._cached(("times", times), lambda: self.n * times)
        return scaled if not plus else self._cached(number.expression, lambda: scaled + plus)

    def positions(self, first: LinearSize, count: int) -> torch.Tensor:
        """Return a tensor of `count` consecutive positions, of which the first is `first`."""
        number = self.as_number(SymbolicNumber(first))
        return self._cached(
            (first, count), lambda: number if count == 1 else torch.arange(count, device=self.n.device) + number
        ).view(count)

    def _cached(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._cached_tensors:
            self._cached_tensors[key] = make()
        return self._cached_tensors[key]

    def append(self, first: Padded) -> None:
        """Record that a step appends entries to the buffer of `first`.

        The new entries may be infinite. They are padding of other tensors in the buffer, so that padding may be, too.
        """
        assert first.buffer is not None
        self.appended.add(first.buffer)
        for place, value in enumerate(self.env):
            if isinstance(value, Padded) and address_of(value.tensor) == address_of(first.tensor):
                self.env[place] = attrs.evolve(value, finite=False)

    def fill_padding(self, padded: Padded, value: float) -> torch.Tensor:
        """Return the tensor with `value` in all padding."""
        if value == 0 and padded.zero:
            return padded.tensor
        shape = [1] * padded.tensor.dim()
        shape[padded.dim] = self.capacity
        return padded.tensor.masked_fill(self.padding(padded.plus).view(shape), value)

    def padding(self, plus: int) -> torch.Tensor:
        """Return a mask of `capacity` entries that is True for padding, which starts at entry `n + plus`."""
        end = self.as_number(SymbolicNumber(LinearSize(1, plus)))
        return self._cached(plus, lambda: torch.arange(self.capacity, device=self.n.device) >= end)

    def attention_mask(self, plus: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an additive attention mask of `capacity` keys: 0 for the first `n + plus` keys, else minus infinity."""
        mask = self.padding(plus)
        return self._cached((plus, dtype), lambda: torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf))

    def slice_bounds(self, size: LinearSize | int, start: Any, end: Any) -> tuple[LinearSize, LinearSize]:
        """Return start and end of a slice of a dimension with `size` entries, as linear functions of `n`."""
        size_line = size if isinstance(size, LinearSize) else LinearSize(0, size)
        return self._slice_bound(size_line, start, LinearSize(0, 0)), self._slice_bound(size_line, end, size_line)

    def _slice_bound(self, size: LinearSize, bound: Any, default: LinearSize) -> LinearSize:
        if bound is None or (isinstance(bound, int) and bound > _TO_THE_END):
            return default if bound is None else size
        line = bound.expression if isinstance(bound, SymbolicNumber) else LinearSize(0, bound)
        if line.value_at(self._example) < 0:
            self._require_sign(line, below=0)
            line = LinearSize(line.times + size.times, line.plus + size.plus)
        now = line.value_at(self._example)
        if now < 0:
            self._require_sign(line, below=0)
            return LinearSize(0, 0)
        if now > size.value_at(self._example):
            self._require_sign(LinearSize(line.times - size.times, line.plus - size.plus), below=None)
            return size
        self._require_sign(line, below=None)
        self._require_sign(LinearSize(size.times - line.times, size.plus - line.plus), below=None)
        return line

    def _require_sign(self, line: LinearSize, below: int | None) -> None:
        """Restrict `n` so that `line` stays negative (if `below` is 0), or not negative (if `below` is None)."""
        if line.times not in {-1, 0, 1}:
            raise UnpaddableError("a bound of a slice is a multiple of the growing length")
        if below is None:
            if line.times == 1:
                self.restrict_n(min_n=-line.plus)
            elif line.times == -1:
                self.restrict_n(max_n=line.plus)
        elif line.times == 1:
            self.restrict_n(max_n=-line.plus - 1)
        elif line.times == -1:
            self.restrict_n(min_n=line.plus + 1)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]


def _unpadded(value: Any) -> Any:
    return value.tensor if isinstance(value, Padded) else value


def _padded(value: Any) -> Padded:
    if not isinstance(value, Padded):
        raise UnpaddableError("an op without a growing operand has a growing number as argument")
    return value


def _axis(value: Any, dim: int, new_dims: int = 0) -> int:
    return dim % (int(_unpadded(value).dim()) + new_dims)


def _pointwise(run: PaddedRun, op: Any, *args: Any, **kwargs: Any) -> Any:
    pads = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Padded)]
    if len({(pad.from_right, pad.plus) for pad in pads}) > 1:
        raise UnpaddableError(f"{op} combines tensors that grow in different dimensions, or have different lengths")
    fixed_tensors = [value for value in args if isinstance(value, torch.Tensor)] if pads else []
    if any(tensor.dim() >= pads[0].from_right and tensor.size(-pads[0].from_right) != 1 for tensor in fixed_tensors):
        raise UnpaddableError(f"{op} combines a growing tensor with a tensor of fixed size")
    plain_args = [run.as_number(_unpadded(value)) for value in args]
    result = op(*plain_args, **{name: run.as_number(_unpadded(value)) for name, value in kwargs.items()})
    return Padded(result, result.dim() - pads[0].from_right, pads[0].plus) if pads else result


def _copy(run: PaddedRun, op: Any, source: Any, **kwargs: Any) -> Any:
    padded = _padded(source)
    return padded.like(op(padded.tensor, **kwargs))


def _fill(run: PaddedRun, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Rule of ops whose result has one value in all entries, such as `ones([n, 3])` and `x.new_ones([n, 3])`."""
    position = next(index for index, value in enumerate(args) if isinstance(value, list | tuple))
    sizes = args[position]
    grows = [dim for dim, size in enumerate(sizes) if isinstance(size, SymbolicNumber)]
    plain_args = [run.as_number(_unpadded(value)) for value in args]
    plain_args[position] = [run.result_size(size) for size in sizes]
    if not grows and not isinstance(plain_args[-1], torch.Tensor):
        return op(*plain_args, **kwargs)
    if not grows and op in {aten.full, aten.new_full}:
        return torch.ops.aten.zeros(plain_args[position], **{"dtype": torch.int64, **kwargs}) + plain_args[position + 1]
    if len(grows) != 1:
        raise UnpaddableError("a new tensor grows in more than one dimension")
    return Padded(op(*plain_args, **kwargs), grows[0], sizes[grows[0]].expression.plus)


def _fill_like(run: PaddedRun, op: Any, like: Any, *args: Any, **kwargs: Any) -> Any:
    padded = _padded(like)
    return Padded(op(padded.tensor, *args, **kwargs), padded.dim, padded.plus)


def _arange(run: PaddedRun, op: Any, *args: Any, **kwargs: Any) -> Any:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    first, last = (
        bound.expression if isinstance(bound, SymbolicNumber) else LinearSize(0, bound) for bound in (start, end)
    )
    if step != 1 or not isinstance(first.plus, int):
        raise UnpaddableError("a growing range has a step other than 1")
    if first.times == last.times:
        return run.positions(first, last.plus - first.plus).to(kwargs.get("dtype") or torch.int64, copy=True)
    if (first.times, last.times) != (0, 1):
        raise UnpaddableError("the start of a range grows")
    run.restrict_n(max_n=run.capacity - (last.plus - first.plus))
    result = op(first.plus, first.plus + run.capacity, **kwargs)
    return Padded(result, 0, last.plus - first.plus)


def _unsqueeze(run: PaddedRun, op: Any, source: Any, dim: int) -> Any:
    padded = _padded(source)
    axis = _axis(padded, dim, 1)
    return padded.like(op(padded.tensor, axis), padded.dim + (axis <= padded.dim))


def _squeeze(run: PaddedRun, op: Any, source: Any, dim: Any) -> Any:
    padded = _padded(source)
    if not isinstance(dim, int) or _axis(padded, dim) == padded.dim:
        raise UnpaddableError("the growing dimension is squeezed")
    axis = _axis(padded, dim)
    result = op(padded.tensor, axis)
    return padded.like(result, padded.dim - (axis < padded.dim and result.dim() < padded.tensor.dim()))


def _transpose(run: PaddedRun, op: Any, source: Any, first: int, second: int) -> Any:
    padded = _padded(source)
    first, second = _axis(padded, first), _axis(padded, second)
    return padded.like(op(padded.tensor, first, second), {first: second, second: first}.get(padded.dim, padded.dim))


def _matrix_transpose(run: PaddedRun, op: Any, source: Any) -> Any:
    return _transpose(run, aten.transpose, source, -1, -2) if _unpadded(source).dim() > 1 else source


def _permute(run: PaddedRun, op: Any, source: Any, dims: Sequence[int]) -> Any:
    padded = _padded(source)
    order = [_axis(padded, dim) for dim in dims]
    return padded.like(op(padded.tensor, order), order.index(padded.dim))


def _expand(run: PaddedRun, op: Any, source: Any, sizes: Sequence[Any], **kwargs: Any) -> Any:
    grows = [dim for dim, size in enumerate(sizes) if isinstance(size, SymbolicNumber)]
    tensor = _unpadded(source)
    if isinstance(source, Padded):
        axis = len(sizes) - source.from_right
        target_size = sizes[axis]
        if grows not in ([], [axis]) or (
            isinstance(target_size, SymbolicNumber) and target_size.expression != LinearSize(1, source.plus)
        ):
            raise UnpaddableError("a growing tensor is expanded to another length")
        if not isinstance(target_size, SymbolicNumber) and target_size != -1:
            raise UnpaddableError("a growing tensor is expanded to a fixed length")
        return source.like(op(tensor, [run.capacity if dim == axis else size for dim, size in enumerate(sizes)]), axis)
    if len(grows) != 1 or (tensor.dim() > (right := len(sizes) - grows[0] - 1) and tensor.size(-right - 1) != 1):
        raise UnpaddableError("a tensor is expanded in several growing dimensions")
    result = op(tensor, [run.result_size(size) for size in sizes])
    return Padded(result, grows[0], sizes[grows[0]].expression.plus)


def _view(run: PaddedRun, op: Any, source: Any, sizes: Sequence[Any], *_: Any) -> Any:
    padded = _padded(source)
    target = [run.capacity if isinstance(size, SymbolicNumber) else size for size in sizes]
    result = padded.tensor.view(target) if op is aten.view else padded.tensor.reshape(target)
    before = math.prod(padded.tensor.shape[: padded.dim])
    for dim, size in enumerate(sizes):
        fits = result.size(dim) == run.capacity and math.prod(result.shape[:dim]) == before
        if fits and (
            size == -1 if not isinstance(size, SymbolicNumber) else size.expression == LinearSize(1, padded.plus)
        ):
            return padded.like(result, dim)
    raise UnpaddableError("a view merges or splits the growing dimension")


def _select(run: PaddedRun, op: Any, source: Any, dim: int, index: Any) -> Any:
    axis = _axis(source, dim)
    if isinstance(source, Padded) and axis != source.dim and isinstance(index, int):
        return source.like(op(source.tensor, axis, index), source.dim - (axis < source.dim))
    follows = (
        SymbolicNumber(attrs.evolve(index.expression, plus=index.expression.plus + 1))
        if not isinstance(index, int)
        else index + 1
    )
    end = None if follows == 0 else follows
    return _slice(run, aten.slice, source, axis, index, end).squeeze(axis)


def _slice(
    run: PaddedRun, op: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    tensor, axis = _unpadded(source), _axis(source, dim)
    grows = isinstance(source, Padded) and axis == source.dim
    if isinstance(source, Padded) and not grows:
        if any(isinstance(padded, SymbolicNumber) for padded in (start, end)):
            raise UnpaddableError("a tensor grows in two dimensions")
        return source.like(op(tensor, axis, start, end, step))
    first, last = run.slice_bounds(LinearSize(1, source.plus) if grows else tensor.size(axis), start, end)
    if step != 1:
        raise UnpaddableError("a growing slice has a step other than 1")
    if first.times == last.times:
        count = last.plus - first.plus
        if count < 0:
            raise UnpaddableError("a slice is empty")
        if not first.times:
            return tensor.narrow(axis, first.plus, count)
        return run.select_entries(tensor, axis, run.positions(first, count))
    if first != LinearSize(0, 0) or last.times != 1:
        raise UnpaddableError("a growing slice starts after the first entry")
    if grows:
        whole = last.plus == source.plus  # else valid entries, which may be infinite, are padding now
        return Padded(tensor, axis, last.plus, source.finite and whole, source.zero and whole, origin=source.origin)
    run.restrict_n(max_n=run.capacity - last.plus)
    missing = run.capacity - tensor.size(axis)
    if missing > 0:
        tensor = torch.nn.functional.pad(tensor, [0] * (2 * (tensor.dim() - axis) - 1) + [missing])
    return Padded(tensor.narrow(axis, 0, run.capacity), axis, last.plus)


def _repeat(run: PaddedRun, op: Any, source: Any, times: Sequence[Any]) -> Any:
    padded = _padded(source)
    axis = len(times) - padded.from_right
    if times[axis] != 1:
        raise UnpaddableError("`repeat` repeats the growing dimension")
    return padded.like(op(padded.tensor, times), axis)


def _index(run: PaddedRun, op: Any, source: Any, indices: Sequence[Any]) -> Any:
    if any(index is None for index in indices):
        raise UnpaddableError("a growing tensor is indexed in only some dimensions")
    plain_indices = [run.fill_padding(index, 0) if isinstance(index, Padded) else index for index in indices]
    inner_dims = _unpadded(source).dim() - len(indices)
    if isinstance(source, Padded):
        if source.dim >= len(indices):
            raise UnpaddableError("a growing tensor is indexed in only some dimensions")
        index, end = plain_indices[source.dim], run.as_number(SymbolicNumber(LinearSize(1, source.plus)))
        plain_indices[source.dim] = torch.where(index < 0, index + end, index)
    result = op(_unpadded(source), plain_indices)
    pads = [index for index in indices if isinstance(index, Padded)]
    if len({(pad.from_right, pad.plus) for pad in pads}) > 1:
        raise UnpaddableError("indices grow in different dimensions")
    if any(
        i.dim() >= pads[0].from_right and i.size(-pads[0].from_right) not in {1, run.capacity}
        for i in plain_indices
        if pads
    ):
        raise UnpaddableError("the indices have different lengths")
    return Padded(result, result.dim() - inner_dims - pads[0].from_right, pads[0].plus) if pads else result


def _index_select(run: PaddedRun, op: Any, source: Any, dim: int, index: Any) -> Any:
    axis = _axis(source, dim)
    if isinstance(index, Padded):
        if isinstance(source, Padded):
            raise UnpaddableError("a growing tensor is indexed by a growing tensor")
        return Padded(op(source, axis, run.fill_padding(index, 0)), axis, index.plus)
    padded = _padded(source)
    result = op(padded.tensor, axis, index)
    is_permutation = result.shape == padded.tensor.shape  # a permutation of a batch may be copied back
    return (
        result
        if axis == padded.dim
        else attrs.evolve(padded.like(result), origin=padded.origin if is_permutation else None)
    )


def _split(run: PaddedRun, op: Any, source: Any, sizes: Any, dim: int = 0) -> Any:
    padded = _padded(source)
    if _axis(padded, dim) == padded.dim:
        raise UnpaddableError("the growing dimension is split")
    return [padded.like(part) for part in op(padded.tensor, sizes, dim)]


def _cat(run: PaddedRun, op: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    first, axis = tensors[0], _axis(tensors[0], dim)
    pads = [padded for padded in tensors if isinstance(padded, Padded)]
    if all(padded.dim != axis for padded in pads):
        if len(pads) < len(tensors) or len({(padded.dim, padded.plus) for padded in pads}) > 1:
            raise UnpaddableError("growing tensors are concatenated with tensors of fixed size")
        result = op([padded.tensor for padded in pads], axis)
        return Padded(
            result,
            pads[0].dim,
            pads[0].plus,
            all(padded.finite for padded in pads),
            all(padded.zero for padded in pads),
        )
    if len(tensors) != 2 or len(pads) != 1 or not isinstance(first, Padded):
        raise UnpaddableError("a growing tensor is concatenated with several tensors")
    second = tensors[1]
    if first.tensor.dtype != second.dtype:
        raise UnpaddableError("appended entries have another dtype than the growing tensor")
    count = second.size(axis)
    run.restrict_n(max_n=run.capacity - first.plus - count)
    in_place = first.buffer is not None and first.buffer not in run.appended
    target = first.tensor if in_place else first.tensor.clone()
    target.index_copy_(axis, run.positions(LinearSize(1, first.plus), count), second)
    if in_place and first.buffer is not None:
        run.append(first)
    buffer = first.buffer if in_place else None
    return Padded(target, axis, first.plus + count, first.finite, buffer=buffer, origin=first.origin)


def _softmax(run: PaddedRun, op: Any, source: Any, dim: int, *more: Any, **kwargs: Any) -> Any:
    padded = _padded(source)
    if _axis(padded, dim) != padded.dim:
        return padded.like(op(padded.tensor, dim, *more, **kwargs))
    result = op(run.fill_padding(padded, -math.inf), dim, *more, **kwargs)
    return Padded(result, padded.dim, padded.plus, finite=True, zero=True)


def _sum(run: PaddedRun, op: Any, source: Any, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    padded = _padded(source)
    axes = [*range(padded.tensor.dim())] if not dims else [_axis(padded, dim) for dim in dims]
    if padded.dim not in axes:
        result = aten.sum(padded.tensor, axes, keepdim, **kwargs)
        return Padded(result, padded.dim - (0 if keepdim else sum(axis < padded.dim for axis in axes)), padded.plus)
    return aten.sum(run.fill_padding(padded, 0), axes, keepdim, **kwargs)


def _cumsum(run: PaddedRun, op: Any, source: Any, dim: int, **kwargs: Any) -> Any:
    padded = _padded(source)
    return Padded(op(padded.tensor, dim, **kwargs), padded.dim, padded.plus)


def _of_bools(run: PaddedRun, op: Any, source: Any, *dims: Any) -> Any:
    padded = _padded(source)
    if dims and (not isinstance(dims[0], int) or _axis(padded, dims[0]) != padded.dim):
        raise UnpaddableError("a growing tensor is reduced over other dimensions than the growing one")
    return op(run.fill_padding(padded, op is aten.all), *dims)


def _embedding(run: PaddedRun, op: Any, weight: Any, indices: Any, *more: Any, **kwargs: Any) -> Any:
    padded = _padded(indices)
    return Padded(op(weight, run.fill_padding(padded, 0), *more, **kwargs), padded.dim, padded.plus, finite=False)


def _product(run: PaddedRun, first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int] | None]:
    """Return the operands of a matrix product. If the result grows, also return its growing dimension and its `plus`.

    The dimension is counted from the right.
    """
    left, right = (padded.from_right if isinstance(padded, Padded) else 0 for padded in (first, second))
    if min(_unpadded(first).dim(), _unpadded(second).dim()) < 2:
        raise UnpaddableError("a matrix is multiplied by a vector")
    if (left == 1) != (right == 2):
        raise UnpaddableError("a matrix product sums over a dimension that grows in only one operand")
    if left == 1:
        if first.plus != second.plus:
            raise UnpaddableError("a matrix product sums over dimensions of different lengths")
        return run.fill_padding(first, 0), second.tensor if second.finite else run.fill_padding(second, 0), None
    if left and right:
        raise UnpaddableError("a matrix product grows in two dimensions")
    if max(left, right) > 2:
        raise UnpaddableError("the batch dimension of a matrix product grows")
    padded = first if left else second
    return _unpadded(first), _unpadded(second), (padded.from_right, padded.plus)


def _matmul(run: PaddedRun, op: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    a, b, grows = _product(run, first, second)
    result = op(a, b, **kwargs)
    return result if grows is None else Padded(result, result.dim() - grows[0], grows[1])


def _baddbmm(run: PaddedRun, op: Any, source: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    a, b, grows = _product(run, first, second)
    result = op(_unpadded(source), a, b, **kwargs)
    if isinstance(source, Padded) and grows != (source.from_right, source.plus):
        raise UnpaddableError("a matrix product is added to a tensor of another length")
    if (
        grows is not None
        and not isinstance(source, Padded)
        and source.dim() >= grows[0]
        and source.size(-grows[0]) != 1
    ):
        raise UnpaddableError("a growing matrix product is added to a tensor of fixed size")
    return result if grows is None else Padded(result, result.dim() - grows[0], grows[1])


def _linear(run: PaddedRun, op: Any, source: Any, weight: Any, bias: Any = None) -> Any:
    padded = _padded(source)
    if padded.from_right == 1:
        raise UnpaddableError("a linear layer sums over the growing dimension")
    return Padded(op(padded.tensor, weight, bias), padded.dim, padded.plus)


def _attention(run: PaddedRun, op: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any) -> Any:  # fmt: skip
    key, value, mask = _padded(key), _padded(value), attn_mask
    if isinstance(query, Padded) or is_causal or dropout_p or (key.from_right, value.from_right) != (2, 2):
        raise UnpaddableError("an attention has dropout, is causal, or grows in a dimension other than its keys")
    if key.plus != value.plus:
        raise UnpaddableError("an attention has more keys than values, or fewer")
    if isinstance(mask, Padded):
        if (mask.from_right, mask.plus) != (1, key.plus):
            raise UnpaddableError("the attention mask is longer or shorter than the keys")
        mask = run.fill_padding(mask, False if mask.tensor.dtype is torch.bool else -math.inf)
    elif mask is not None:
        if mask.size(-1) != 1:
            raise UnpaddableError("the attention mask does not grow with the keys")
        mask = Padded(mask.expand(*mask.shape[:-1], run.capacity), mask.dim() - 1, key.plus)
        mask = run.fill_padding(mask, False if mask.tensor.dtype is torch.bool else -math.inf)
    else:
        mask = run.attention_mask(key.plus, query.dtype).view(1, 1, 1, -1).expand(1, 1, query.size(-2), -1)
    keys, values = (padded.tensor if padded.finite else run.fill_padding(padded, 0) for padded in (key, value))
    return op(query, keys, values, mask, **kwargs)


_VIEWS: Final[Mapping[str, Callable[..., Any]]] = {
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "transpose": _transpose, "t": _matrix_transpose, "permute": _permute, "expand": _expand,
    "view": _view, "_unsafe_view": _view, "reshape": _view, "_reshape_alias": _view, "select": _select, "slice": _slice, "split": _split,
    "repeat": _repeat, "index": _index,
    "index_select": _index_select,
    "split_with_sizes": _split,
}  # fmt: skip
_COPIES: Final[Mapping[str, Callable[..., Any]]] = dict.fromkeys(
    ("_to_copy", "alias", "clone", "contiguous", "detach"), _copy
)
_NEW: Final[Mapping[str, Callable[..., Any]]] = {
    "arange": _arange, "full": _fill, "full_like": _fill_like, "new_full": _fill, "new_ones": _fill, "new_zeros": _fill, "ones": _fill,
    "ones_like": _fill_like, "zeros": _fill, "zeros_like": _fill_like,
}  # fmt: skip
_SUMS: Final[Mapping[str, Callable[..., Any]]] = {
    "_safe_softmax": _softmax, "_softmax": _softmax, "all": _of_bools, "any": _of_bools, "cumsum": _cumsum, "softmax": _softmax, "sum": _sum,
}  # fmt: skip
_PRODUCTS: Final[Mapping[str, Callable[..., Any]]] = {
    "baddbmm": _baddbmm, "bmm": _matmul, "embedding": _embedding, "linear": _linear, "matmul": _matmul, "scaled_dot_product_attention": _attention,
}  # fmt: skip
_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    **_VIEWS, **_COPIES, **_NEW, **_SUMS, **_PRODUCTS, "cat": _cat, "where": _pointwise, "masked_fill": _pointwise,
}  # fmt: skip
