"""Higher-order ops, such as `torch.cond` and `flex_attention`: their functions run op by op, and each op is recorded.

PyTorch has an implementation made of ops. Its autograd kernel would trace the functions, which must then be as `torch.compile`
rewrites them; so here autograd records the ops of the functions like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from djinn_client import torch_dispatch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor

# Ops that call functions of the user; others have gradients of their own.
_CONTROL_FLOW = frozenset({"associative_scan", "cond", "map_impl", "scan", "while_loop"})


def register() -> None:
    """Have these ops run where a remote tensor takes part. Called once."""
    for name, op in torch_dispatch.higher_order_ops().items():
        by_ops = torch_dispatch.made_of_ops(op)
        traced = torch_dispatch.differentiated(op)
        if by_ops is not None and traced is not None and name in _CONTROL_FLOW:
            torch_dispatch.implement_under_autograd(op, _unless_traced(by_ops, traced))


def _unless_traced(by_ops: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation: `by_ops`, but PyTorch's own way where a tracer is to see the op whole."""

    def implementation(*args: Any, **kwargs: Any) -> Any:
        remote = any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        return (by_ops if remote and not torch_dispatch.dispatch_modes() else traced)(*args, **kwargs)

    return implementation
