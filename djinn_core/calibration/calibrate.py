"""Timing the probes of cost models, round after round, and having the models fit what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn_core.calibration.measuring import Clock, seconds_of, without_collection
from djinn_core.errors import DjinnError
from djinn_core.hookspecs.costs import CalibratedCostModel, CostModel, Probe
from djinn_core.logs import get_logger

_log = get_logger("djinn.calibration")
ROUNDS = 3


@attrs.define
class Bench:
    """The probes of cost models on one device, prepared, with the times that were measured so far.

    Attributes:
        seconds: by name of the cost model and of the probe its times, of one repeat.
    """

    clock: Clock
    device: torch.device
    models: Sequence[CalibratedCostModel]
    seconds: dict[tuple[str, str], list[float]] = attrs.field(factory=dict)
    idle: list[float] = attrs.field(factory=list)
    failed: set[tuple[str, str]] = attrs.field(factory=set)

    def round(self, told: Callable[[str], None] = lambda _: None) -> None:
        """Time every probe once."""
        for model in self.models:
            for probe in model.probes():
                if (model.name, probe.name) not in self.failed:
                    told(probe.name)
                    self._take(model, probe)

    def _take(self, model: CalibratedCostModel, probe: Probe) -> None:
        key = (model.name, probe.name)
        try:
            with torch.no_grad(), without_collection():
                run = probe.prepare(self.device)
                if key not in self.seconds:
                    seconds_of(run, self.clock)  # the first time, memory and kernels are made ready
                self.idle.append(seconds_of(_nothing, self.clock))
                took = seconds_of(run, self.clock)
        except (DjinnError, RuntimeError) as error:
            _log.warning("a probe failed and is left out", model=model.name, probe=probe.name, error=str(error)[:200])
            self.failed.add(key)
            self.seconds.pop(key, None)
        else:
            self.seconds.setdefault(key, []).append(took / probe.repeats)

    def fit(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each model, from the middle of the times of each probe."""
        fitted: dict[str, Mapping[str, Any]] = {}
        for model in self.models:
            repeats = {p.name: p.repeats for p in model.probes()}
            times = {name: times for (owner, name), times in self.seconds.items() if owner == model.name}
            rest = statistics.median(self.idle) if self.idle else 0.0
            fitted[model.name] = model.fit(
                {name: _middle(found, rest / repeats[name]) for name, found in times.items() if name in repeats}
            )
        return fitted


def _middle(times: Sequence[float], rest: float) -> float:
    """The median, without what a submission costs that does nothing."""
    found = statistics.median(times)
    return max(found - rest, found / 4)


def _nothing() -> None:
    """A program without ops."""


def calibrated_models(models: Sequence[CostModel]) -> list[CalibratedCostModel]:
    """Those of the cost models that can be calibrated."""
    return [m for m in models if isinstance(m, CalibratedCostModel)]
