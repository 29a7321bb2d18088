"""Rules that find the sequence dimension of an op's results from its operands.

A rule gets a node, its arguments by name, and the sequence dimension of each value. It returns the sequence dimension
of each result, and the arguments to change if the op runs for some of the rows. If the op mixes rows, the rule returns
None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from djinn.planning import Graph, Node

Dims = Mapping[int, int]


@attrs.frozen
class Split:
    """How a node can run for some of the rows.

    Attributes:
        dims: index of the sequence dimension, by result.
        sizes: name of the argument with the sizes of the result, if the op has such an argument.
        broadcast: True if operands broadcast. An operand without rows is broadcast, and an operand with all rows is
            sliced.
        passes: True if the op does not change the rows of its operand.
    """

    dims: tuple[int, ...]
    sizes: str = ""
    broadcast: bool = False
    passes: bool = False


@attrs.frozen
class Case:
    """Argument of a rule.

    Attributes:
        graph: the graph.
        node: the node.
        given: arguments of the node, by name.
        dims: index of the sequence dimension, by value.
        rows: number of rows.
    """

    graph: Graph
    node: Node
    given: Mapping[str, Any]
    dims: Dims
    rows: int

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the sizes of a value."""
        return self.graph.meta(value).shape

    def dim(self, value: Any) -> int | None:
        """Return the index of a value's sequence dimension. If the value has no rows, return None."""
        return self.dims.get(value) if isinstance(value, int) else None

    @property
    def made(self) -> tuple[int, ...]:
        """Sizes of the first result."""
        return self.shape(self.node.outputs[0])

    def others_are_whole(self, *names: str) -> bool:
        """Return True if no argument with one of these names has rows."""
        return all(self.dim(self.given.get(name)) is None for name in names)


Rule = Callable[[Case], Split | None]


def split_of(case: Case) -> Split | None:
    """Return how an op can run for some of the rows. If it must run for all rows, return None."""
    rule = _RULES.get(case.node.operation) or (_aligned if _is_elementwise(case.node.op) else None)
    return rule(case) if rule is not None and case.node.outputs else None


def _is_elementwise(op: str) -> bool:
    namespace, _, op_name = op.partition("::")
    name, _, overload = op_name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    overload_op = getattr(packet, overload or "default", None)
    return overload_op is not None and torch.Tag.pointwise in overload_op.tags


def aligned_dim(shape: Sequence[int], made: int, dim: int, rows: int) -> int | None:
    """Return the dimension of an operand that broadcasts to dimension `dim` of a result.

    If it has no rows, return None.

    `made`: number of dimensions of the result.
    """
    at = dim - made + len(shape)
    return at if at >= 0 and shape[at] == rows else None


def _aligned(case: Case) -> Split | None:
    """Rule of elementwise ops. Their operands broadcast, aligned at the last dimension."""
    ends = {len(case.shape(v)) - case.dims[v] for v in case.node.inputs if v in case.dims}
    dim = len(case.made) - next(iter(ends))
    return Split((dim,), broadcast=True) if len(ends) == 1 and case.made[dim] == case.rows else None


def _same(*whole: str) -> Rule:
    """Return a rule for ops that do not move the rows of their first operand.

    The arguments `whole` must have no rows.
    """

    def rule(case: Case) -> Split | None:
        first = case.node.inputs[0]
        dim = case.dim(first)
        return Split((dim,) * len(case.node.outputs)) if dim is not None and case.others_are_whole(*whole) else None

    return rule


def _product(left: str, right: str, *added: str) -> Rule:
    """Return a rule for matrix products and linear layers.

    The left operand has the rows, and the sum is not over the rows.
    """

    def rule(case: Case) -> Split | None:
        dim = case.dim(case.given[left])
        no_other_rows = case.others_are_whole(right, *added)
        if dim is None or not no_other_rows or dim == len(case.shape(case.given[left])) - 1:
            return None
        if right != "weight" and len(case.shape(case.given[right])) > 2 and dim != len(case.made) - 2:
            return None  # the right operand has one matrix per row
        return Split((dim,)) if len(case.made) == len(case.shape(case.given[left])) else None

    return rule


def _normalised(case: Case) -> Split | None:
    dim = case.dim(case.given["input"])
    if dim is None or not case.others_are_whole("weight", "bias"):
        return None
    leading = len(case.shape(case.given["input"])) - len(case.given["normalized_shape"])
    return Split((dim,) * len(case.node.outputs)) if dim < leading else None


def _reduced(case: Case) -> Split | None:
    """Rule of reductions over dimensions other than the rows."""
    value = case.node.inputs[0]
    dim, count, over = case.dim(value), len(case.shape(value)), case.given.get("dim")
    if dim is None or over is None:
        return None
    reduced_dims = {d % count for d in (over if isinstance(over, Sequence) else [over])}
    if dim in reduced_dims or not reduced_dims:
        return None
    return Split((dim if case.given.get("keepdim") else dim - sum(d < dim for d in reduced_dims),))


def _within(case: Case) -> Split | None:
    """Rule of ops that keep the shape and work along another dimension than the rows, such as softmax."""
    value = case.node.inputs[0]
    dim = case.dim(value)
    return Split((dim,)) if dim is not None and case.given["dim"] % len(case.shape(value)) != dim else None


def _reshaped(case: Case) -> Split | None:
    """Rule of reshapes that keep the sequence dimension.

    The product of the sizes before the sequence dimension must not change.
    """
    value = case.node.inputs[0]
    before = math.prod(case.shape(value)[: case.dims[value]])
    for dim, size in enumerate(case.made):
        if size == case.rows and math.prod(case.made[:dim]) == before:
            return Split((dim,), "size" if "size" in case.given else "shape")
    return None


def _expanded(case: Case) -> Split | None:
    value = case.node.inputs[0]
    return Split((case.dims[value] + len(case.made) - len(case.shape(value)),), "size")


def _swapped(case: Case) -> Split | None:
    value = case.node.inputs[0]
    count, dim = len(case.shape(value)), case.dims[value]
    pair = [case.given[name] % count for name in ("dim0", "dim1")]
    return Split((pair[1 - pair.index(dim)] if dim in pair else dim,))


def _permuted(case: Case) -> Split | None:
    value = case.node.inputs[0]
    return Split(([d % len(case.made) for d in case.given["dims"]].index(case.dims[value]),))


def _transposed(case: Case) -> Split | None:
    value = case.node.inputs[0]
    return Split((1 - case.dims[value],)) if len(case.made) == 2 else None


def _unsqueezed(case: Case) -> Split | None:
    dim = case.dims[case.node.inputs[0]]
    return Split((dim + (case.given["dim"] % len(case.made) <= dim),))


def _squeezed(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim, shape, over = case.dims[value], case.shape(value), case.given.get("dim")
    requested_dims = range(len(shape)) if over is None else over if isinstance(over, Sequence) else [over]
    squeezed_dims = {d % len(shape) for d in requested_dims if shape[d] == 1}
    return Split((dim - sum(d < dim for d in squeezed_dims),))


def _sliced(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim = case.dims[value]
    has_rows = case.made[dim] == case.rows and len(case.made) == len(case.shape(value))
    return Split((dim,)) if case.given["dim"] % len(case.made) != dim and has_rows else None


def _selected(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim, at = case.dims[value], case.given["dim"] % len(case.shape(value))
    return Split((dim - (at < dim),)) if at != dim else None


def _parted(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim = case.dims[value]
    if case.given["dim"] % len(case.shape(value)) == dim:
        return None
    dims_removed = len(case.shape(value)) - len(case.made)
    return Split((dim - (dims_removed and case.given["dim"] % len(case.shape(value)) < dim),) * len(case.node.outputs))


def _joined(case: Case) -> Split | None:
    """Rule of concatenations along another dimension than the rows.

    A concatenation along the rows is allowed if all earlier operands are empty, such as an empty cache.
    """
    along = case.given["dim"] % len(case.made)
    dims = {case.dims[v] for v in case.node.inputs if v in case.dims}
    without_rows = [v for v in case.node.inputs if v not in case.dims]
    if len(dims) != 1:
        return None
    dim = next(iter(dims))
    if dim == along:
        alone = sum(v in case.dims for v in case.node.inputs) == 1
        return (
            Split((dim,), passes=True) if alone and all(case.graph.meta(v).numel == 0 for v in without_rows) else None
        )
    return Split((dim,), broadcast=True) if all(len(case.shape(v)) == len(case.made) for v in without_rows) else None


def _looked_up(case: Case) -> Split | None:
    dim = case.dim(case.given["indices"])
    return Split((dim,)) if dim is not None and case.others_are_whole("weight") else None


_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("clone", "_to_copy", "contiguous", "alias", "detach", "dropout"), _same()),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "_reshape_alias"), _reshaped),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "prod", "var", "std", "norm", "linalg_vector_norm"), _reduced),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"), _within),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _normalised),
    **dict.fromkeys(("transpose", "swapaxes"), _swapped),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _parted),
    "linear": _product("input", "weight", "bias"),
    "matmul": _product("self", "other"),
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2", "self"),
    "embedding": _looked_up,
    "expand": _expanded,
    "permute": _permuted,
    "t": _transposed,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "slice": _sliced,
    "select": _selected,
    "cat": _joined,
}
