"""Aliases of a template's inputs: inputs that ops may write into, and outputs that may share memory with inputs.

The aliases are an upper bound. Composite ops and the kernels listed here may return or write an operand although their
schemas do not say so. Djinn's own ops may write or return any operand.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Final

import attrs

from djinn_core import torch_private
from djinn_core.ir.operators import resolve, split_name
from djinn_server.running.compiled_step import CompiledStep
from djinn_server.running.template_compiler import CompiledTemplate

# Composite ops that clients do not decompose (decision 6). Their results are new tensors.
_COMPUTES: Final = frozenset({
    "aten::linear",
    "aten::matmul",
    "aten::layer_norm",
    "aten::rms_norm",
    "aten::batch_norm",
    "aten::gru.input",
    "aten::lstm.input",
    "aten::rnn_relu.input",
    "aten::rnn_tanh.input",
    "aten::scaled_dot_product_attention",
})  # fmt: skip
# Ops that write an operand, such as running statistics, although their schemas do not say so. `set_` gives an operand the memory of
# another one. All operands of these ops count as written.
_WRITES: Final = frozenset({
    "_batch_norm_impl_index",
    "_copy_from",
    "_copy_from_and_resize",
    "batch_norm",
    "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_update_stats",
    "cudnn_batch_norm",
    "instance_norm",
    "miopen_batch_norm",
    "native_batch_norm",
    "set_",
})  # fmt: skip
# Kernels whose results are views of an operand, or the operand, although their schemas do not say so.
_RETURNS: Final = frozenset({"_unsafe_view", "lift", "unsafe_split", "unsafe_split_with_sizes"})
_NONE: Final[frozenset[int]] = frozenset()


@attrs.frozen
class InputAliases:
    """Inputs of a template that may be written, and outputs that may share memory with inputs.

    Attributes:
        written_inputs: positions of the inputs whose memory may be written, sorted.
        outputs: pairs of an output's position and the positions of inputs with which it may share memory.
        steps_before_write: number of leading instructions that write no input.
    """

    written_inputs: tuple[int, ...]
    outputs: tuple[tuple[int, frozenset[int]], ...]
    steps_before_write: int


def aliases_of(template: CompiledTemplate, own_ops: Container[str]) -> InputAliases:
    """Return the aliases of a template's inputs. `own_ops`: names of Djinn's own ops."""
    first = len(template.constants) + template.slots
    roots = {first + position: frozenset({position}) for position in range(template.inputs)}
    written_inputs: set[int] = set()
    steps_before_write = len(template.steps)
    for at, step in enumerate(template.steps):
        is_own = step.op in own_ops
        operands = _NONE.union(*(roots.get(place, _NONE) for place in step.reads))
        for place in step.reads if is_own else written_places(step):
            written_inputs |= roots.get(place, _NONE)
        if written_inputs:
            steps_before_write = min(steps_before_write, at)
        if operands and (is_own or may_return_operand(step.op)):
            for _, place in step.makes:
                roots[place] = operands
    output_roots = ((number, roots.get(place, _NONE)) for number, place in enumerate(template.outputs))
    return InputAliases(
        tuple(sorted(written_inputs)), tuple(pair for pair in output_roots if pair[1]), steps_before_write
    )


def written_places(step: CompiledStep) -> tuple[int, ...]:
    """Return the places of operands that a step with an op of PyTorch may write into."""
    return step.reads if split_name(step.op)[0] in _WRITES else step.writes


@functools.lru_cache(4096)
def may_return_operand(op: str) -> bool:
    """Return True if a result of an op of PyTorch may be an operand or a view of an operand."""
    if op in _COMPUTES:
        return False
    if split_name(op)[0] in _RETURNS:
        return True
    overload = resolve(op)
    returns = torch_private.schema_of(overload).returns
    return torch_private.is_composite(overload) or any(result.alias_info is not None for result in returns)
