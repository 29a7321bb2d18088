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
    """Instructions to run a node for some of the rows.

    Attributes:
        dims: index of the sequence dimension, by result.
        sizes: name of the argument with the sizes of the result, or "" if the op has no such argument.
        broadcast: True if operands broadcast. An operand is sliced if it has an element for each row.
        passes_rows: True if the op returns the rows of its operand unchanged, so a run for some rows can skip it.
    """

    dims: tuple[int, ...]
    sizes: str = ""
    broadcast: bool = False
    passes_rows: bool = False


@attrs.frozen
class Case:
    """Argument of a rule: a node and the sequence dimension of its operands.

    Attributes:
        graph: graph of the program.
        node: the node.
        arguments: arguments of the node, by name.
        dims: index of the sequence dimension, by value.
        rows: number of rows.
    """

    graph: Graph
    node: Node
    arguments: Mapping[str, Any]
    dims: Dims
    rows: int

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the sizes of a value."""
        return self.graph.meta(value).shape

    def dim(self, value: Any) -> int | None:
        """Return the index of a value's sequence dimension, or None if the argument is no value with rows."""
        return self.dims.get(value) if isinstance(value, int) else None

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Sizes of the first result."""
        return self.shape(self.node.outputs[0])

    def have_no_rows(self, *names: str) -> bool:
        """Return True if no argument among `names` has rows."""
        return all(self.dim(self.arguments.get(name)) is None for name in names)


Rule = Callable[[Case], Split | None]


def split_of(case: Case) -> Split | None:
    """Return the instructions to run a node for some of the rows, or None if it must run for all rows."""
    rule = _RULES.get(case.node.operation) or (_elementwise if _is_elementwise(case.node.op) else None)
    return rule(case) if rule is not None and case.node.outputs else None


def _is_elementwise(op: str) -> bool:
    namespace, _, op_name = op.partition("::")
    name, _, overload = op_name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    overload_op = getattr(packet, overload or "default", None)
    return overload_op is not None and torch.Tag.pointwise in overload_op.tags


def aligned_dim(shape: Sequence[int], result_dims: int, dim: int, rows: int) -> int | None:
    """Return the operand's dimension that broadcasts to dimension `dim` of a result, or None if none has size `rows`.

    `shape`: sizes of the operand. `result_dims`: number of dimensions of the result.
    """
    operand_dim = dim - result_dims + len(shape)
    return operand_dim if operand_dim >= 0 and shape[operand_dim] == rows else None


def _elementwise(case: Case) -> Split | None:
    """Rule of elementwise ops. Their operands broadcast, aligned at the last dimension."""
    ends = {len(case.shape(v)) - case.dims[v] for v in case.node.inputs if v in case.dims}
    dim = len(case.result_shape) - next(iter(ends))
    return Split((dim,), broadcast=True) if len(ends) == 1 and case.result_shape[dim] == case.rows else None


def _keep_rows(*whole: str) -> Rule:
    """Return a rule for ops that keep the rows of their first operand. `whole`: names of arguments without rows."""

    def rule(case: Case) -> Split | None:
        first = case.node.inputs[0]
        dim = case.dim(first)
        return Split((dim,) * len(case.node.outputs)) if dim is not None and case.have_no_rows(*whole) else None

    return rule


def _product(left: str, right: str, *added: str) -> Rule:
    """Return a rule for matrix products and linear layers whose left operand has the rows and does not sum over them.

    `left`, `right`, `added`: names of the operands. `right` and `added` must have no rows.
    """

    def rule(case: Case) -> Split | None:
        dim = case.dim(case.arguments[left])
        no_other_rows = case.have_no_rows(right, *added)
        if dim is None or not no_other_rows or dim == len(case.shape(case.arguments[left])) - 1:
            return None
        if right != "weight" and len(case.shape(case.arguments[right])) > 2 and dim != len(case.result_shape) - 2:
            return None  # the right operand has one matrix per row
        return Split((dim,)) if len(case.result_shape) == len(case.shape(case.arguments[left])) else None

    return rule


def _layer_norm(case: Case) -> Split | None:
    dim = case.dim(case.arguments["input"])
    if dim is None or not case.have_no_rows("weight", "bias"):
        return None
    leading = len(case.shape(case.arguments["input"])) - len(case.arguments["normalized_shape"])
    return Split((dim,) * len(case.node.outputs)) if dim < leading else None


def _reduction(case: Case) -> Split | None:
    """Rule of reductions over dimensions other than the sequence dimension."""
    value = case.node.inputs[0]
    dim, count, reduced = case.dim(value), len(case.shape(value)), case.arguments.get("dim")
    if dim is None or reduced is None:
        return None
    reduced_dims = {d % count for d in (reduced if isinstance(reduced, Sequence) else [reduced])}
    if dim in reduced_dims or not reduced_dims:
        return None
    return Split((dim if case.arguments.get("keepdim") else dim - sum(d < dim for d in reduced_dims),))


def _along_other_dim(case: Case) -> Split | None:
    """Rule of ops such as softmax that keep the shape and work along one dimension, if it is not the sequence dimension."""
    value = case.node.inputs[0]
    dim = case.dim(value)
    return Split((dim,)) if dim is not None and case.arguments["dim"] % len(case.shape(value)) != dim else None


def _reshape(case: Case) -> Split | None:
    """Rule of reshapes that keep the sequence dimension.

    The product of the sizes before the sequence dimension must not change.
    """
    value = case.node.inputs[0]
    before = math.prod(case.shape(value)[: case.dims[value]])
    for dim, size in enumerate(case.result_shape):
        if size == case.rows and math.prod(case.result_shape[:dim]) == before:
            return Split((dim,), "size" if "size" in case.arguments else "shape")
    return None


def _expand(case: Case) -> Split | None:
    value = case.node.inputs[0]
    return Split((case.dims[value] + len(case.result_shape) - len(case.shape(value)),), "size")


def _swap_dims(case: Case) -> Split | None:
    value = case.node.inputs[0]
    count, dim = len(case.shape(value)), case.dims[value]
    pair = [case.arguments[name] % count for name in ("dim0", "dim1")]
    return Split((pair[1 - pair.index(dim)] if dim in pair else dim,))


def _permute(case: Case) -> Split | None:
    value = case.node.inputs[0]
    return Split(([d % len(case.result_shape) for d in case.arguments["dims"]].index(case.dims[value]),))


def _transpose(case: Case) -> Split | None:
    value = case.node.inputs[0]
    return Split((1 - case.dims[value],)) if len(case.result_shape) == 2 else None


def _unsqueeze(case: Case) -> Split | None:
    dim = case.dims[case.node.inputs[0]]
    return Split((dim + (case.arguments["dim"] % len(case.result_shape) <= dim),))


def _squeeze(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim, shape, requested = case.dims[value], case.shape(value), case.arguments.get("dim")
    requested_dims = (
        range(len(shape)) if requested is None else requested if isinstance(requested, Sequence) else [requested]
    )
    squeezed_dims = {d % len(shape) for d in requested_dims if shape[d] == 1}
    return Split((dim - sum(d < dim for d in squeezed_dims),))


def _slice(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim = case.dims[value]
    has_rows = case.result_shape[dim] == case.rows and len(case.result_shape) == len(case.shape(value))
    return Split((dim,)) if case.arguments["dim"] % len(case.result_shape) != dim and has_rows else None


def _select(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim, selected_dim = case.dims[value], case.arguments["dim"] % len(case.shape(value))
    return Split((dim - (selected_dim < dim),)) if selected_dim != dim else None


def _split_dim(case: Case) -> Split | None:
    value = case.node.inputs[0]
    dim = case.dims[value]
    if case.arguments["dim"] % len(case.shape(value)) == dim:
        return None
    dims_removed = len(case.shape(value)) - len(case.result_shape)
    return Split(
        (dim - (dims_removed and case.arguments["dim"] % len(case.shape(value)) < dim),) * len(case.node.outputs)
    )


def _concatenate(case: Case) -> Split | None:
    """Rule of concatenations along a dimension other than the sequence dimension.

    A concatenation along the sequence dimension is allowed if all other operands are empty, such as an empty cache.
    """
    concatenated_dim = case.arguments["dim"] % len(case.result_shape)
    dims = {case.dims[v] for v in case.node.inputs if v in case.dims}
    without_rows = [v for v in case.node.inputs if v not in case.dims]
    if len(dims) != 1:
        return None
    dim = next(iter(dims))
    if dim == concatenated_dim:
        is_only_operand = sum(v in case.dims for v in case.node.inputs) == 1
        return (
            Split((dim,), passes_rows=True)
            if is_only_operand and all(case.graph.meta(v).numel == 0 for v in without_rows)
            else None
        )
    return (
        Split((dim,), broadcast=True)
        if all(len(case.shape(v)) == len(case.result_shape) for v in without_rows)
        else None
    )


def _embedding(case: Case) -> Split | None:
    dim = case.dim(case.arguments["indices"])
    return Split((dim,)) if dim is not None and case.have_no_rows("weight") else None


_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("clone", "_to_copy", "contiguous", "alias", "detach", "dropout"), _keep_rows()),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "_reshape_alias"), _reshape),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "prod", "var", "std", "norm", "linalg_vector_norm"), _reduction),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"), _along_other_dim),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("transpose", "swapaxes"), _swap_dims),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split_dim),
    "linear": _product("input", "weight", "bias"),
    "matmul": _product("self", "other"),
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2", "self"),
    "embedding": _embedding,
    "expand": _expand,
    "permute": _permute,
    "t": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
    "cat": _concatenate,
}
