"""Optimizers of models on the meta device, inside a capture: they update the stand-ins, with separate optimizer state."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import attrs
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from djinn_core import torch_objects


@attrs.frozen
class _Own:
    """An optimizer's own parameters by group, and its own state, which it has while it does not step."""

    optimizer: Optimizer
    parameters: list[Any]
    state: Any


class OptimizerSteps:
    """Lends optimizers stand-ins for their parameters while they step; afterwards an optimizer is as it was before.

    Some functions that they call take tensors as they are, whatever modes are entered.

    Args:
        standing_for: the stand-in for a tensor on the meta device; anything else as it is.
    """

    def __init__(self, standing_for: Callable[[Any], Any]) -> None:
        self._standing_for = standing_for
        self._thread = threading.get_ident()
        self._own: dict[int, _Own] = {}
        self._states: dict[int, Any] = {}  # what optimizers remembered of their steps inside the capture
        self._handles: list[RemovableHandle] = []

    def follow(self) -> None:
        """From now on, steps of this thread are followed."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def leave(self) -> None:
        """Steps are not followed any more; an optimizer whose step failed gets back what is its own."""
        for handle in self._handles:
            handle.remove()
        for own in list(self._own.values()):
            self._after(own.optimizer)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch_objects.unseen_by_function_modes():
            if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
                self._lend(optimizer)

    def _lend(self, optimizer: Optimizer) -> None:
        own = _Own(optimizer, [group["params"] for group in optimizer.param_groups], optimizer.state)
        self._own[id(optimizer)] = own
        if id(optimizer) not in self._states:
            lent: dict[Any, Any] = defaultdict(dict)
            lent.update({self._standing_for(p): self._standing_for(state) for p, state in own.state.items()})
            self._states[id(optimizer)] = lent
        optimizer.state = self._states[id(optimizer)]
        for group in optimizer.param_groups:
            group["params"] = [self._standing_for(p) for p in group["params"]]

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        own = self._own.pop(id(optimizer), None)
        if own is None:
            return
        optimizer.state = own.state
        for group, parameters in zip(optimizer.param_groups, own.parameters, strict=True):
            group["params"] = parameters
