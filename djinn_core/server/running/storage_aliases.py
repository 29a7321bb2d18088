"""Index of a run's values by their storage, so that each of ten thousand failing ops does not search all values for aliases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn_core.ir.values import storage_of
from djinn_core.server.running.replay import CompiledStep, Environment
from djinn_core.server.running.values import Poison, ValueTable

NO_HANDLE: Final = -1  # looks into no storage
# Ops that may give what they write other memory.
_MOVES: Final = re.compile(r"resize|set_|out\b|_out\b")


class Sharing:
    """The values of a run and of its session by the address of their memory. Made at the first failure."""

    def __init__(self, steps: Sequence[CompiledStep], env: Environment, values: ValueTable) -> None:
        self._steps = steps
        self._env = env
        self._values = values
        self._seen = -1  # steps that are known to have run; before the first look none
        self._places: dict[int, list[int]] = {}
        self._handles: dict[int, list[int]] = {}
        self._views: dict[int, list[int]] = {}

    def places(self, address: int, step: int) -> list[int]:
        """Places in the environment of what had memory at `address` at some time; the run has come to `step`."""
        self._look(step)
        return self._places.get(address, [])

    def handles(self, handle: int, address: int, step: int) -> list[int]:
        """Values of the session that look into the storage of `handle`, or had memory at `address` at some time."""
        self._look(step)
        return list(dict.fromkeys((*self._views.get(storage_of(handle), ()), *self._handles.get(address, ()))))

    def _look(self, step: int) -> None:
        ran = self._steps[self._seen : step] if self._seen >= 0 else ()
        if self._seen < 0 or any(one.writes and _MOVES.search(one.op) for one in ran):
            self._look_at_all()
        else:
            for one in ran:
                for _, place in one.makes:
                    self._add(place)
        self._seen = step

    def _look_at_all(self) -> None:
        self._places, self._handles, self._views = {}, {}, {}
        for place in range(len(self._env)):
            self._add(place)
        for handle, value in self._values.items():
            self._views.setdefault(storage_of(handle), []).append(handle)
            if address := address_of(value):
                self._handles.setdefault(address, []).append(handle)

    def _add(self, place: int) -> None:
        if address := address_of(self._env[place]):
            self._places.setdefault(address, []).append(place)


def address_of(value: Any) -> int:
    """Address of a value's memory, also for poison; 0 where it has none."""
    if isinstance(value, Poison):
        value = value.memory
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if strided else 0
