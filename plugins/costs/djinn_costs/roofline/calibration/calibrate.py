"""Measure the probes of cost models in several rounds, and fit the models to the times."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from djinn import DjinnError
from djinn.errors import ConfigurationError, SessionLost
from djinn.hooks import CostModel, Probe
from djinn_client.runtime import client
from djinn_client.runtime.planning.calibrations import store_calibration
from djinn_core.wire.messages import DeviceInfo
from djinn_costs.roofline.calibration.measuring import DEVICE, Clock, measuring, seconds_of, warm_up, without_collection

_log = logging.getLogger("djinn_costs.roofline")


def calibrate_session(
    rounds: int = 3,
    *,
    processor_time: bool = False,
    quick: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> CalibrationResult:
    """Measure the device of the open session for all cost models, and store the parameters. Call `open_session` first.

    Args:
        rounds: how often each probe is timed.
        processor_time: True to measure processor time instead of elapsed time.
        quick: True to use only a fifth of the probes.
        report: called with the name of each probe before it is timed.

    Raises:
        ConfigurationError: no cost model in use can be calibrated, or the probes are too few.
        SessionLost: the executor has ended. No result is stored.
    """
    models = calibrated_models(client.registry().cost_models)
    if quick:
        models = [model for model in models if any(probe.quick for probe in model.probes())]
    if not models:
        raise ConfigurationError(
            "no cost model in use can be calibrated: see `djinn plugins`, and whether `plugins` or `disable` leaves roofline out"
        )
    start = time.monotonic()
    with measuring(processor_time=processor_time) as clock:
        bench = Bench(clock, torch.device(DEVICE), models, report, quick)
        for _ in range(rounds):
            bench.round()
        device = client.device()
    assert device is not None
    file = store_calibration(device, bench.fit())
    names = tuple(model.name for model in models)
    return CalibrationResult(device, file, names, len(bench.seconds), len(bench.failed), time.monotonic() - start)


@attrs.frozen
class CalibrationResult:
    """Result of a calibration.

    Attributes:
        device: the measured device.
        file: where the parameters are stored.
        models: names of the calibrated models.
        probes: number of probes.
        failed: number of probes that raised.
        seconds: duration of the calibration.
    """

    device: DeviceInfo
    file: Path
    models: tuple[str, ...]
    probes: int
    failed: int
    seconds: float


@attrs.define
class Bench:
    """Prepared probes of cost models on one device, and their measured times.

    Attributes:
        clock: measures the executor's time.
        device: the measured device.
        models: the cost models.
        report: called with the name of each probe before it is timed.
        quick: True to time only quick probes.
        seconds: times of one repetition, by model name and probe name.
        idle: times of empty submissions.
        failed: probes that raised, by model name and probe name.
    """

    clock: Clock
    device: torch.device
    models: Sequence[CostModel]
    report: Callable[[str], None] = lambda _: None
    quick: bool = False
    seconds: dict[tuple[str, str], list[float]] = attrs.field(factory=dict)
    idle: list[float] = attrs.field(factory=list)
    failed: set[tuple[str, str]] = attrs.field(factory=set)

    def round(self) -> None:
        """Time every probe once."""
        with torch.no_grad(), without_collection():
            for model in self.models:
                for probe in self._probes(model):
                    if (model.name, probe.name) not in self.failed:
                        self.report(probe.name)
                        self._time_probe(model, probe)

    def _probes(self, model: CostModel) -> Iterator[Probe]:
        return (probe for probe in model.probes() if probe.quick or not self.quick)

    def _time_probe(self, model: CostModel, probe: Probe) -> None:
        key = (model.name, probe.name)
        try:
            run = probe.prepare(self.device)
            if key not in self.seconds:
                warm_up(run, self.clock)
            self.idle.append(seconds_of(lambda: None, self.clock))
            probe_seconds = seconds_of(run, self.clock)
        except SessionLost:
            raise  # further probes cannot be timed either
        except (DjinnError, RuntimeError) as error:
            _log.warning("the probe %s of %s failed and is left out: %.200s", probe.name, model.name, error)
            self.failed.add(key)
            self.seconds.pop(key, None)
        else:
            self.seconds.setdefault(key, []).append(probe_seconds / probe.repeats)

    def fit(self) -> dict[str, Mapping[str, Any]]:
        """Fit each model to the median time of each of its probes, and return the parameters by model name."""
        fitted: dict[str, Mapping[str, Any]] = {}
        for model in self.models:
            repeats = {p.name: p.repeats for p in model.probes()}
            times = {name: times for (owner, name), times in self.seconds.items() if owner == model.name}
            idle_seconds = statistics.median(self.idle) if self.idle else 0.0
            fitted[model.name] = model.fit(
                {
                    name: _median_seconds(op_times, idle_seconds / repeats[name])
                    for name, op_times in times.items()
                    if name in repeats
                }
            )
        return fitted


def _median_seconds(times: Sequence[float], empty_seconds: float) -> float:
    """Return the median of `times` minus `empty_seconds`, an empty submission's seconds; at least a quarter of the median."""
    median = statistics.median(times)
    return max(median - empty_seconds, median / 4)


def calibrated_models(models: Sequence[CostModel]) -> list[CostModel]:
    """Return the cost models that define probes."""
    return [m for m in models if any(True for _ in m.probes())]
