"""Replay of a node: its op is called again, with other tensors and, on request, other arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn_client.interception.recording.unflatten_call import call_arguments
from djinn_client.interception.tensors.lazy_tensor import logical_device
from djinn_core.errors import InvalidStage
from djinn_core.ir.arguments import parameter_names
from djinn_core.ir.graph import Node
from djinn_core.ir.indexes import POOL
from djinn_core.ir.operators import OWN_OPERATORS, resolve


def call_again(node: Node, operands: Sequence[torch.Tensor], changed: Mapping[str, Any]) -> list[torch.Tensor]:
    """The results of a node's op for other operands, in the order in which the node has them.

    Args:
        node: of a recorded program.
        operands: tensors for `node.inputs`.
        changed: arguments that are not as they were, by the names in the op's schema.

    Raises:
        InvalidStage: the node's op cannot be called again.
    """
    if node.form is None or node.op in OWN_OPERATORS:
        raise InvalidStage(f"{node.op} (node {node.id}) cannot be called again")
    positional, keywords = call_arguments(node.form, operands, node.slots, logical_device(POOL))
    names = parameter_names(node.op)
    for name, value in changed.items():
        at = names.index(name)
        if at < len(positional):
            positional[at] = value
        else:
            keywords[name] = value
    made = resolve(node.form.op)(*positional, **keywords)
    return list(made) if isinstance(made, list | tuple) else [made]
