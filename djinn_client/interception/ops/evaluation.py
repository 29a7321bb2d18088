"""Layers that are recorded whole in evaluation: batch normalisation and recurrent layers.

While they train they write statistics or draw random numbers, which the program must show; then they are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.device.device_state import Handler
from djinn_client.interception.dispatch import handles, record
from djinn_client.interception.ops.composite import IN_EVALUATION, take_apart

aten = torch.ops.aten

Trains = Callable[[tuple[Any, ...]], bool]


def _normalises_by_the_batch(args: tuple[Any, ...]) -> bool:
    """True if `aten::batch_norm` is called in training mode."""
    return bool(args[5])


def _drops_out(args: tuple[Any, ...]) -> bool:
    """True if a recurrent layer draws random numbers: it has a dropout probability, and trains."""
    return bool(args[5] and args[6])


_TRAINS: dict[Any, Trains] = {
    func: _normalises_by_the_batch if func is aten.batch_norm.default else _drops_out for func in IN_EVALUATION
}


def _unless(trains: Trains) -> Handler:
    def whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return take_apart(func, args, kwargs) if trains(args) else record(func, args, kwargs)

    return whole


for _func, _trains in _TRAINS.items():
    handles(_func)(_unless(_trains))
