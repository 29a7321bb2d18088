"""Replay: record a captured program, or one of its nodes, again with other inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from djinn_client.interception.recording.append import append
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, logical_device, wrap
from djinn_client.interception.tensors.storage import borrow
from djinn_core.errors import DjinnError, InvalidStage
from djinn_core.ir.arguments import call_arguments, parameter_names
from djinn_core.ir.graph import Node
from djinn_core.ir.indexes import POOL
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.ir.program import Call, Instruction, Program
from djinn_core.ir.values import TensorMeta


def reissue(
    program: Program, nodes: Iterable[int], replace: Mapping[int, int], inputs: Mapping[int, torch.Tensor]
) -> dict[int, LazyTensor]:
    """Record `nodes` of `program` again. Return the new tensors by the handles of the old values.

    Args:
        program: a captured program.
        nodes: node ids, in order.
        replace: for each operand to replace, by handle, the handle to read instead.
        inputs: tensors for inputs of the program, by handle. For other inputs, the captured tensors are used, which
            must still be alive.

    Raises:
        DjinnError: the metadata of a tensor in `inputs` differ from those of the captured input.
    """
    instructions = list(program.instructions())
    tensors: dict[int, LazyTensor] = {}
    for node in nodes:
        instruction = instructions[node]
        operands = [
            _operand(tensors, inputs, replace.get(value, value), meta)
            for value, meta in zip(instruction.inputs, instruction.call.operands, strict=True)
        ]
        tensors.update(_issue(instruction, operands))
    return tensors


def _operand(
    tensors: dict[int, LazyTensor], inputs: Mapping[int, torch.Tensor], value: int, meta: TensorMeta
) -> LazyTensor:
    if value not in tensors:
        tensor = inputs.get(value)
        tensors[value] = wrap(borrow(value, meta)) if tensor is None else _checked(tensor, meta)
    return tensors[value]


def _checked(tensor: torch.Tensor, meta: TensorMeta) -> LazyTensor:
    if not isinstance(tensor, LazyTensor) or tensor.remote.meta is not meta:
        raise DjinnError(
            f"an input of shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype} on {tensor.device} cannot "
            f"replace the captured input of shape {meta.shape}, stride {meta.stride}, {meta.dtype} on "
            f"remote_accelerator:{meta.device}. Pass an input like the captured input, or capture the program again"
        )
    return tensor


def _issue(instruction: Instruction, operands: list[LazyTensor]) -> dict[int, LazyTensor]:
    call = instruction.call
    out = append(call, operands, instruction.slots)
    results = out if call.sequence else [out]
    new_results = [r for r, is_new in zip(results, _are_new(call), strict=True) if is_new]
    return dict(zip(instruction.outputs, new_results, strict=True))


def _are_new(call: Call) -> list[bool]:
    return [meta is not None and same < 0 for meta, same in zip(call.results, call.inplace, strict=True)]


def call_again(node: Node, operands: Sequence[torch.Tensor], changes: Mapping[str, Any]) -> list[torch.Tensor]:
    """Call a node's op with other operands, and return its results in order.

    Args:
        node: a node of a recorded program.
        operands: tensors for `node.inputs`.
        changes: arguments that replace those of the node, by their names in the op's schema.

    Raises:
        InvalidStage: the node's op cannot be called again.
    """
    if node.op in OWN_OPERATORS:
        raise InvalidStage(f"{node.op} (node {node.id}) is an instruction of Djinn itself, and cannot be called again")
    positional, keywords = call_arguments(node.form, operands, node.slots, logical_device(POOL))
    names = parameter_names(node.op)
    for name, value in changes.items():
        position = names.index(name)
        if position < len(positional):
            positional[position] = value
        else:
            keywords[name] = value
    results = resolve(node.form.op)(*positional, **keywords)
    return list(results) if isinstance(results, list | tuple) else [results]
