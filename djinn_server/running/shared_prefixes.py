"""Reuse the leading rows of an earlier run, such as the common prefix of two prompts, and compute only the other rows.

A row is one position of the token dimension. Ops on small inputs, such as positions and masks, run in full for both runs.
From the first embedding on, only the rows after the common prefix are computed. Each op must compute a row from the
operands' rows with the same number, so that the leading rows equal those of the earlier run. Attention must be causal,
and uses keys and values of the earlier run. Any other op ends the attempt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import attrs
import torch

from djinn_core.ir.operators import resolve
from djinn_core.torch_private import schema_of, storage_key
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_server.running.compiled_step import CompiledStep, ComplexSource, Environment, ListSource, ScalarTensorSource

MAX_INDEX_BYTES: Final = 64 << 10  # size of an integer input that is copied, to compare it with inputs of later runs
MIN_SHARED: Final = 0.25  # fraction of a run's rows that the earlier run must share
_INTEGERS: Final = (torch.int64, torch.int32, torch.bool)
UNKNOWN: Final = object()  # stands for an unknown value of the earlier run
_LAYOUT_OPS: Final = frozenset({
    "aten::expand", "aten::reshape", "aten::transpose.int", "aten::unsqueeze", "aten::view", "aten::_unsafe_view",
})  # fmt: skip


class NoSharedPrefixError(Exception):
    """The leading rows cannot be proven equal to those of the earlier run."""


@attrs.frozen(eq=False)
class Whole:
    """A value that is computed in full.

    Attributes:
        now: the value in this run.
        before: the value in the earlier run, or `UNKNOWN`. It is the object `now` if both runs must have the same value.
    """

    now: Any
    before: Any

    @property
    def is_same(self) -> bool:
        """True if the value is equal in both runs."""
        if self.now is self.before:
            return True
        tensors = isinstance(self.now, torch.Tensor) and isinstance(self.before, torch.Tensor)
        return tensors and self.now.dtype is self.before.dtype and torch.equal(self.now, self.before)


@attrs.frozen(eq=False)
class Rows:
    """The last rows of a value. Its leading rows equal those of the earlier run.

    Attributes:
        tail: the last rows.
        axis: dimension of the rows.
        place: place of the value in the environment.
    """

    tail: torch.Tensor
    axis: int
    place: int


_Result = Whole | tuple[torch.Tensor, int]  # a whole value, or the last rows with their axis


@attrs.frozen
class Extent:
    """Numbers of rows.

    Attributes:
        first: number of leading rows that both runs share.
        count: number of rows of this run.
        earlier: number of rows of the earlier run.
    """

    first: int
    count: int
    earlier: int


@attrs.frozen(eq=False)
class PrefixInputs:
    """Inputs and settings of a run whose leading rows later runs may reuse.

    Attributes:
        settings: PyTorch's numeric settings.
        names: names of the contents and layouts of the inputs (`StorageNames`).
        numbers: numbers that the ops use.
        indices: copies of small integer inputs, such as tokens, by number of the input.
    """

    settings: NumericSettings | None
    names: Sequence[Any]
    numbers: Sequence[Any]
    indices: Mapping[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies in `indices`."""
        return sum([indices.nbytes for indices in self.indices.values()])

    def shared_rows(
        self, settings: NumericSettings | None, names: Sequence[Any], inputs: Sequence[Any]
    ) -> Extent | None:
        """Return the numbers of rows of both runs, and of the leading rows in which all integer inputs are equal.

        Return None if the settings or other inputs differ, if all inputs are equal, or if the shapes do not fit. The
        parameters are those of the later run. Rows are entries of an integer input's last dimension.
        """
        if settings != self.settings:
            return None
        prefixes, lengths = list[int](), set[tuple[int, int]]()
        for number, (this_name, other_name) in enumerate(zip(names, self.names, strict=True)):
            if this_name == other_name:
                continue
            now, before = inputs[number], self.indices.get(number)
            if before is None or now.dtype is not before.dtype or now.shape[:-1] != before.shape[:-1]:
                return None
            lengths.add((now.shape[-1], before.shape[-1]))
            length = min(now.shape[-1], before.shape[-1])
            differ = (now[..., :length] != before[..., :length]).view(-1, length).any(0).nonzero()
            prefixes.append(int(differ[0]) if len(differ) else length)
        if len(lengths) != 1:
            return None
        ((count, earlier),) = lengths
        return Extent(min(*prefixes, count - 1), count, earlier)


def indices_of(inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return copies of small integer inputs, by number of the input."""
    return {
        number: value.clone()
        for number, value in enumerate(inputs)
        if isinstance(value, torch.Tensor)
        and value.dtype in _INTEGERS
        and value.dim()
        and value.nbytes <= MAX_INDEX_BYTES
    }


@attrs.define(eq=False)
class PrefixRun:
    """A run of a template's ops that computes only the rows after the common prefix.

    Attributes:
        steps: the ops.
        env: environment of this run. Inputs and computed values are `Whole` or `Rows`.
        before: environment of the earlier run, with the same computed values.
        results: results of the earlier run, by place.
        first, count, earlier: as in `Extent`.
    """

    steps: Sequence[CompiledStep]
    env: Environment
    before: Environment
    results: Mapping[int, Any]
    first: int
    count: int
    earlier: int
    _full: dict[int, torch.Tensor] = attrs.field(factory=dict)
    _makers: dict[int, CompiledStep] = attrs.field(factory=dict)

    def run(self) -> Iterator[None]:
        """Run the ops, and yield before each one.

        Raises:
            NoSharedPrefixError: the leading rows may differ from those of the earlier run, or an op failed.
        """
        for step in self.steps:
            yield
            try:
                self._run(step)
            except NoSharedPrefixError:
                raise
            except Exception as error:
                raise NoSharedPrefixError(f"{step.op} failed: {error}") from error

    def results_at(self, places: Sequence[int]) -> list[Any]:
        """Return the results at these places, with all rows.

        Raises:
            NoSharedPrefixError: the ops may produce another layout of a result.
        """
        return [self._result(place) for place in places]

    def _run(self, step: CompiledStep) -> None:
        if step.writes:
            raise NoSharedPrefixError(f"{step.op} writes into an operand")
        operands = [self.env[place] for place in step.reads]
        if step.op == "aten::embedding" and (rows := self._embedding_rows(step)) is not None:
            self._store(step, rows)
        elif any(isinstance(operand, Rows) for operand in operands):
            self._store(step, self._rows(step))
        else:
            self._run_whole(step, operands)
        self._makers.update((place, step) for _, place in step.makes)

    def _result(self, place: int) -> Any:
        """Return the result at a place with all rows, in the layout that the op produces."""
        value, before = self.env[place], self.results[place]
        if isinstance(value, Whole) and (value.now is value.before or not isinstance(value.now, torch.Tensor)):
            return value.now
        last = self.full(value) if isinstance(value, Rows) else value.now
        alone = isinstance(before, torch.Tensor) and self._is_alone(before)
        if (isinstance(value, Rows) or value.before is UNKNOWN) and not (
            alone and _is_dense(before) and _is_dense(last)
        ):
            raise NoSharedPrefixError("the layout of a result is unknown, because the earlier result is not dense")
        return last

    def _is_alone(self, result: torch.Tensor) -> bool:
        """Return True if a result of the earlier run fills its storage, and no other result shares the storage."""
        keys = [storage_key(value) for value in self.results.values() if isinstance(value, torch.Tensor)]
        return result.untyped_storage().nbytes() == result.nbytes and keys.count(storage_key(result)) == 1

    def full(self, value: Whole | Rows) -> torch.Tensor:
        """Return all rows of a value: the leading rows of the earlier run, then those of this run."""
        if isinstance(value, Whole):
            return _tensor(value.now)
        full = self._full.get(value.place)
        if full is None:
            before, step = self.results.get(value.place), self._makers[value.place]
            if isinstance(before, torch.Tensor):
                full = torch.cat([before.narrow(value.axis, 0, self.first), value.tail], value.axis)
            elif step.op in _LAYOUT_OPS:
                args, keywords = step.arguments_from(self.env)
                full = step.function(*_map_operands(self.full, args), **keywords)
            else:
                raise NoSharedPrefixError(f"a later op needs all rows of a result of {step.op}, which were not kept")
            self._full[value.place] = full
        return full

    def _run_whole(self, step: CompiledStep, operands: Sequence[Whole]) -> None:
        now = _call_with(step, self.env, lambda value: value.now)
        before = now
        if not self._same_numbers(step) or any(operand.now is not operand.before for operand in operands):
            all_known = all(operand.before is not UNKNOWN for operand in operands)
            before = _call_with(step, self.before, lambda value: value.before) if all_known else UNKNOWN
        for result, place in step.makes:
            operand = now[result] if step.returns_list else now
            earlier = before[result] if step.returns_list and before is not UNKNOWN else before
            self.env[place] = self.before[place] = Whole(operand, earlier)

    def _store(self, step: CompiledStep, results: _Result | list[_Result]) -> None:
        for result, place in step.makes:
            value = results[result] if isinstance(results, list) else results
            self.env[place] = self.before[place] = value if isinstance(value, Whole) else Rows(*value, place)

    def _same_numbers(self, step: CompiledStep) -> bool:
        sources = [*step.arguments, *[source for _, source in step.keywords]]
        numbers = {place for source in sources for place in _places(source)}.difference(step.reads)
        return all(_equal(self.env[place], self.before[place]) for place in numbers)

    def _rows(self, step: CompiledStep) -> _Result | list[_Result]:
        if (resizing := _RESIZING.get(step.op)) is not None:
            return resizing(self, _arguments_by_name(step, self.env), _arguments_by_name(step, self.before))
        if not self._same_numbers(step):
            raise NoSharedPrefixError(f"the numbers given to {step.op} differ from those of the earlier run")
        if (rule := _RULES.get(step.op)) is not None:
            return rule(self, step.function, _arguments_by_name(step, self.env))
        if step.returns_list or not _is_pointwise(step.op):
            raise NoSharedPrefixError(f"{step.op} has no rule")
        return self._pointwise(step)

    def _embedding_rows(self, step: CompiledStep) -> _Result | None:
        """Return the last rows of an embedding. Return None if it does not have one index per row."""
        args, keywords = step.arguments_from(self.env)
        weight, indices = args[:2]
        if not (isinstance(weight, Whole) and weight.is_same and isinstance(indices, Whole)):
            return None
        axis = indices.now.dim() - 1
        if axis < 0 or indices.now.shape[axis] != self.count or not self._same_numbers(step):
            return None
        rows = self.last_rows(indices, -1)
        return step.function(weight.now, rows, *args[2:], **keywords), axis

    def last_rows(self, value: Whole | Rows, axis: int) -> torch.Tensor:
        """Return the last rows of an operand, or the whole operand if it has no rows.

        `axis`: dimension of the rows, as a negative number.
        """
        if isinstance(value, Rows):
            if value.axis - value.tail.dim() != axis:
                raise NoSharedPrefixError("the rows of two operands lie along different dimensions")
            return value.tail
        now, before = value.now, value.before
        if not isinstance(now, torch.Tensor):
            raise NoSharedPrefixError("an operand is not a tensor")
        if now.dim() < -axis or now.shape[axis] == 1:
            if not value.is_same:
                raise NoSharedPrefixError("the value of an operand differs between the runs")
            return now
        comparable = isinstance(before, torch.Tensor) and before.dim() == now.dim() and before.shape[axis] >= self.first
        if now.shape[axis] != self.count or not comparable:
            raise NoSharedPrefixError("an operand has another number of rows, or its earlier value is unknown")
        own_rows, earlier_rows = (tensor.narrow(axis, 0, self.first) for tensor in (now, before))
        if now is not before and not (own_rows.dtype is earlier_rows.dtype and torch.equal(own_rows, earlier_rows)):
            raise NoSharedPrefixError("the leading rows of an operand differ between the runs")
        return now.narrow(axis, self.first, self.count - self.first)

    def _pointwise(self, step: CompiledStep) -> _Result:
        operands = [self.env[place] for place in step.reads]
        axis = next(operand.axis - operand.tail.dim() for operand in operands if isinstance(operand, Rows))
        args, keywords = step.arguments_from(self.env)

        def cut(value: Whole | Rows) -> torch.Tensor:
            return self.last_rows(value, axis)

        result = step.function(
            *_map_operands(cut, args), **{name: _map_operands(cut, value) for name, value in keywords.items()}
        )
        return result, result.dim() + axis


Arguments = Mapping[str, Any]
Function = Callable[..., Any]
_Rule = Callable[[PrefixRun, Function, Arguments], "_Result | list[_Result]"]


def _product(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    """Return the products of rows with a weight, plus an optional bias."""
    del run
    rows = _rows_of(arguments.get("mat1", arguments.get("input", arguments.get("self"))))
    weight = _same_tensor(arguments.get("mat2", arguments.get("weight", arguments.get("other"))))
    bias = arguments.get("bias", arguments["self"] if "mat1" in arguments else None)
    bias = bias if bias is None else _same_tensor(bias)
    _require(weight.dim() == 2 and rows.axis < rows.tail.dim() - 1 and (bias is None or bias.dim() == 1))
    if "mat1" in arguments:
        return function(bias, rows.tail, weight, beta=arguments["beta"], alpha=arguments["alpha"]), rows.axis
    return function(*[operand for operand in (rows.tail, weight, bias) if operand is not None]), rows.axis


def _norm(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    """Return norms over the last dimensions, which must not include the rows."""
    del run
    rows, (_, shape, *operands) = _rows_of(arguments["input"]), arguments.values()
    _require(rows.axis < rows.tail.dim() - len(shape))
    return function(
        rows.tail, shape, *[_same_tensor(operand) if isinstance(operand, Whole) else operand for operand in operands]
    ), rows.axis


def _reduction(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    """Return reductions over dimensions other than the rows."""
    del run
    rows, rank = _rows_of(arguments["self"]), _rows_of(arguments["self"]).tail.dim()
    dims = {dim % rank for dim in arguments["dim"] or range(rank)}
    _require(rows.axis not in dims)
    removed_dims = 0 if arguments["keepdim"] else sum(dim < rows.axis for dim in dims)
    keywords = {"dtype": arguments["dtype"]} if "dtype" in arguments else {}
    return function(rows.tail, arguments["dim"], arguments["keepdim"], **keywords), rows.axis - removed_dims


def _softmax(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    del run
    rows = _rows_of(arguments["self"])
    _require(arguments["dim"] % rows.tail.dim() != rows.axis)
    return function(
        rows.tail, arguments["dim"], *[value for name, value in arguments.items() if name not in {"self", "dim"}]
    ), rows.axis


def _concatenation(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    """Return a concatenation along another dimension than the rows, or with empty tensors, such as an empty KV cache."""
    tensors, rows = arguments["tensors"], next(tensor for tensor in arguments["tensors"] if isinstance(tensor, Rows))
    rank = rows.tail.dim()
    if arguments["dim"] % rank == rows.axis:
        nonempty = [tensor for tensor in tensors if not (isinstance(tensor, Whole) and _is_empty(tensor))]
        _require(len(nonempty) == 1)
        return rows.tail, rows.axis
    return function([run.last_rows(tensor, rows.axis - rank) for tensor in tensors], arguments["dim"]), rows.axis


def _stack(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    rows = next(tensor for tensor in arguments["tensors"] if isinstance(tensor, Rows))
    rank = rows.tail.dim()
    result = function([run.last_rows(tensor, rows.axis - rank) for tensor in arguments["tensors"]], arguments["dim"])
    return result, rows.axis + (arguments["dim"] % (rank + 1) <= rows.axis)


def _split(run: PrefixRun, function: Function, arguments: Arguments) -> list[_Result]:
    del run
    rows = _rows_of(arguments["self"])
    _require(arguments["dim"] % rows.tail.dim() != rows.axis)
    _, size, dim = arguments.values()
    return [(part, rows.axis) for part in function(rows.tail, size, dim)]


def _transposition(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    del run
    rows, rank = _rows_of(arguments["self"]), _rows_of(arguments["self"]).tail.dim()
    order = [*range(rank)]
    if "dims" in arguments:
        order = [dim % rank for dim in arguments["dims"]]
    else:
        a, b = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[a], order[b] = b, a
    return function(rows.tail, *[value for name, value in arguments.items() if name != "self"]), order.index(rows.axis)


def _unsqueeze(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    del run
    rows = _rows_of(arguments["self"])
    dim = arguments["dim"] % (rows.tail.dim() + 1)
    return function(rows.tail, dim), rows.axis + (dim <= rows.axis)


def _attention(run: PrefixRun, function: Function, arguments: Arguments) -> _Result:
    """Return causal attention of the last rows over all keys."""
    operands = [_rows_of(arguments[name]) for name in ("query", "key", "value")]
    _require(all(operand.axis == operand.tail.dim() - 2 for operand in operands) and not arguments["dropout_p"])
    query, mask = operands[0].tail, arguments["attn_mask"]
    if mask is None:
        _require(arguments["is_causal"])
        allowed = torch.ones(query.shape[-2], run.count, dtype=torch.bool, device=query.device).tril(run.first)
    else:
        _require(not arguments["is_causal"])
        allowed = _causal_rows(run, mask)
    keys, values = (run.full(operand) for operand in operands[1:])
    keywords = {name: arguments[name] for name in ("scale", "enable_gqa")}
    return function(query, keys, values, allowed, 0.0, False, **keywords), operands[0].axis


def _causal_rows(run: PrefixRun, mask: Any) -> torch.Tensor:
    """Return the last rows of a mask. Its leading rows must be equal in both runs, and must mask all later rows."""
    _require(isinstance(mask, Whole) and isinstance(mask.before, torch.Tensor) and mask.now.dtype is torch.bool)
    now, before, first = mask.now, mask.before, run.first
    _require(now.dim() >= 2 and now.shape[-2:] == (run.count,) * 2 and before.shape[-2:] == (run.earlier,) * 2)
    own_part, earlier_part = now[..., :first, :first], before[..., :first, :first]
    _require(
        own_part.shape == earlier_part.shape and torch.equal(own_part, earlier_part) and not own_part.triu(1).any()
    )
    _require(not now[..., :first, first:].any() and not before[..., :first, first:].any())
    return _tensor(now[..., first:, :])


def _view(run: PrefixRun, arguments: Arguments, before: Arguments) -> _Result:
    """Return a view in which the rows still are one dimension."""
    rows = _rows_of(arguments["self"])
    shape, shape_before = [*rows.tail.shape], [*rows.tail.shape]
    shape[rows.axis], shape_before[rows.axis] = run.count, run.earlier
    size, size_before = _sizes(arguments["size"], shape), _sizes(before["size"], shape_before)
    lead = prod(shape[: rows.axis])
    axis = next((at for at, length in enumerate(size) if length == run.count and prod(size[:at]) == lead), None)
    if axis is None or size_before != [*size[:axis], run.earlier, *size[axis + 1 :]]:
        raise NoSharedPrefixError("a view splits the dimension of the rows, or merges it with another one")
    return rows.tail.reshape([*size[:axis], run.count - run.first, *size[axis + 1 :]]), axis


def _expand(run: PrefixRun, arguments: Arguments, before: Arguments) -> _Result:
    rows, size, size_before = _rows_of(arguments["self"]), [*arguments["size"]], [*before["size"]]
    axis = rows.axis + len(size) - rows.tail.dim()
    _require(size[axis] in {-1, run.count} and size_before[axis] in {-1, run.earlier})
    size[axis] = size_before[axis] = -1
    _require(size == size_before)
    return rows.tail.expand(size), axis


def _slice(run: PrefixRun, arguments: Arguments, before: Arguments) -> _Result:
    """Return a slice along another dimension than the rows, or a slice of all rows or of computed rows only."""
    rows, dim = _rows_of(arguments["self"]), arguments["dim"] % _rows_of(arguments["self"]).tail.dim()
    if dim != rows.axis:
        bounds = [[arguments[name] for name in ("dim", "start", "end", "step")] for arguments in (arguments, before)]
        _require(bounds[0] == bounds[1])
        return torch.ops.aten.slice.Tensor(rows.tail, *bounds[0]), rows.axis
    start, stop, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(run.count)
    if (start, stop, step) == (0, run.count, 1):
        _require(slice(before["start"], before["end"], before["step"]).indices(run.earlier) == (0, run.earlier, 1))
        return rows.tail, rows.axis
    _require(start >= run.first)
    return Whole(torch.ops.aten.slice.Tensor(rows.tail, dim, start - run.first, stop - run.first, step), UNKNOWN)


def _select(run: PrefixRun, arguments: Arguments, before: Arguments) -> _Result:
    rows, dim, index = (
        _rows_of(arguments["self"]),
        arguments["dim"] % _rows_of(arguments["self"]).tail.dim(),
        arguments["index"],
    )
    if dim != rows.axis:
        _require((arguments["dim"], index) == (before["dim"], before["index"]))
        return rows.tail.select(dim, index), rows.axis - (dim < rows.axis)
    index = index % run.count
    _require(index >= run.first)
    return Whole(rows.tail.select(dim, index - run.first), UNKNOWN)


_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("aten::linear", "aten::addmm", "aten::mm", "aten::matmul"), _product),
    **dict.fromkeys(("aten::layer_norm", "aten::rms_norm"), _norm),
    **dict.fromkeys(("aten::mean.dim", "aten::sum.dim_IntList", "aten::amax"), _reduction),
    **dict.fromkeys(("aten::_softmax", "aten::softmax.int"), _softmax),
    **dict.fromkeys(("aten::split.Tensor", "aten::split_with_sizes"), _split),
    **dict.fromkeys(("aten::transpose.int", "aten::permute"), _transposition),
    "aten::cat": _concatenation,
    "aten::stack": _stack,
    "aten::unsqueeze": _unsqueeze,
    "aten::scaled_dot_product_attention": _attention,
}
_RESIZING: Final[Mapping[str, Callable[[PrefixRun, Arguments, Arguments], _Result]]] = {
    **dict.fromkeys(("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_reshape_alias"), _view),
    "aten::expand": _expand,
    "aten::slice.Tensor": _slice,
    "aten::select.int": _select,
}


@functools.lru_cache(4096)
def _is_pointwise(op: str) -> bool:
    return op == "aten::_to_copy" or torch.Tag.pointwise in resolve(op).tags


def _arguments_by_name(step: CompiledStep, env: Environment) -> dict[str, Any]:
    """Return all arguments of an op by name, including defaults."""
    args, keywords = step.arguments_from(env)
    arguments = schema_of(resolve(step.op)).arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | keywords


def _call_with(step: CompiledStep, env: Environment, pick: Callable[[Whole], Any]) -> Any:
    args, keywords = step.arguments_from(env)
    return step.function(
        *_map_operands(pick, args), **{name: _map_operands(pick, value) for name, value in keywords.items()}
    )


def _map_operands(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments, which may be nested lists, with `change` applied to each operand."""
    if isinstance(value, list | tuple):
        return type(value)([_map_operands(change, item) for item in value])
    return change(value) if isinstance(value, Whole | Rows) else value


def _places(source: Any) -> Iterator[int]:
    """Yield the places from which an argument is read."""
    if isinstance(source, int):
        yield source
    elif isinstance(source, ListSource):
        for item in source.items:
            yield from _places(item)
    elif isinstance(source, ComplexSource):
        yield from (source.real, source.imaginary)
    elif isinstance(source, ScalarTensorSource):
        yield from _places(source.number)


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


def _sizes(size: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the sizes of a view, with -1 replaced by the inferred size."""
    inferred = prod(shape) // max(prod([length for length in size if length != -1]), 1)
    return [inferred if length == -1 else length for length in size]


def _require(holds: bool) -> None:
    if not holds:
        raise NoSharedPrefixError("an op's arguments are not those that the rule for shared prefixes supports")


def _rows_of(value: Any) -> Rows:
    if not isinstance(value, Rows):
        raise NoSharedPrefixError("an operand of an op has no rows, but the op's rule expects rows")
    return value


def _same_tensor(value: Any) -> torch.Tensor:
    _require(isinstance(value, Whole) and value.is_same)
    return _tensor(value.now)


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise NoSharedPrefixError("an operand is not a tensor")
    return value


def _is_empty(value: Whole) -> bool:
    return all(isinstance(tensor, torch.Tensor) and not tensor.numel() for tensor in (value.now, value.before))


def _is_dense(tensor: torch.Tensor) -> bool:
    expected, size = list[int](), 1
    for length in reversed(tensor.shape):
        expected.insert(0, size)
        size *= max(length, 1)
    return list(tensor.stride()) == expected and tensor.storage_offset() == 0
