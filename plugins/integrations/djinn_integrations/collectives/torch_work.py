"""PyTorch's private functions for work handles of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed


def await_collectives(results: Sequence[Any]) -> None:
    """Wait until collectives have finished. `results`: their work handles or tensors."""
    for result in results:
        if isinstance(result, torch.ScriptObject):
            torch.distributed.Work.unbox(result).wait()
        elif isinstance(result, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor.default(result)


def finished_work(results: Sequence[torch.Tensor]) -> torch.ScriptObject:
    """Return a new work handle with `results` for a finished collective.

    Gloo's own handle has CPU results, and can be waited for once only.
    """
    future: Any = torch.futures.Future()
    future.set_result(list(results))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined,no-any-return]
