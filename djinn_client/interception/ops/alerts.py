"""Ops without a deterministic kernel on any device: PyTorch's alert comes at the op, as an error or a warning.

The executor computes under the same settings, but its error would come at the next sync point and its warning would stay there.
Kernels of CUDA alert at more ops than these; those alerts come from the executor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.dispatch import handles, record

aten = torch.ops.aten


def _put(_given: Any, _index: Any, _source: Any, accumulate: bool = False) -> None:
    if not accumulate:
        torch.empty(0).put_(torch.empty(0, dtype=torch.int64), torch.empty(0))


def _unpool(dimensions: int) -> Callable[..., None]:
    def alert(*_: Any, **__: Any) -> None:
        one, index = torch.zeros((1,) * (dimensions + 1)), torch.zeros((1,) * (dimensions + 1), dtype=torch.int64)
        ones, zeros = (1,) * dimensions, (0,) * dimensions
        if dimensions == 2:
            aten.max_unpool2d(one, index, ones)
        else:
            aten.max_unpool3d(one, index, ones, ones, zeros)

    return alert


# For each, the same op over next to nothing on the CPU of the client, where PyTorch alerts.
_ALERTS: dict[Any, Callable[..., None]] = {
    aten.put.default: _put,
    aten.put_.default: _put,
    aten.max_unpool2d.default: _unpool(2),
    aten.max_unpool3d.default: _unpool(3),
}


@handles(*_ALERTS)
def record_alerting(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the op, after PyTorch's alert if deterministic algorithms are asked for.

    Raises:
        RuntimeError: as eager PyTorch.
    """
    if torch.are_deterministic_algorithms_enabled():
        _ALERTS[func](*args, **kwargs)
    return record(func, args, kwargs)
