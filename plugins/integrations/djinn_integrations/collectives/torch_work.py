"""The private functions of PyTorch for the work of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed


def await_collectives(results: Sequence[Any]) -> None:
    """Wait for what collectives return: handles of their work, or tensors."""
    for result in results:
        if isinstance(result, torch.ScriptObject):
            torch.distributed.Work.unbox(result).wait()
        elif isinstance(result, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor.default(result)


def finished_work(results: Sequence[torch.Tensor]) -> torch.ScriptObject:
    """A handle of a collective that is done. That of gloo cannot be waited for twice, and has results on the CPU."""
    future: Any = torch.futures.Future()
    future.set_result(list(results))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined,no-any-return]
