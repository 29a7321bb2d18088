"""Compare predictions of cost models with measured times, for programs that calibration does not use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

import djinn
from djinn.errors import ConfigurationError
from djinn.planning import Calibration, PipelineResult, estimate
from djinn_client.runtime import client
from djinn_costs.roofline.calibration.calibrate import Bench, calibrated_models
from djinn_costs.roofline.calibration.measuring import DEVICE, Clock, measuring, seconds_of, warm_up, without_collection
from djinn_costs.roofline.calibration.workloads import Workload, workloads

_LOOP_SECONDS = 0.03  # target seconds of a loop of steps
_REPEATS = 20


@attrs.frozen
class Comparison:
    """Predicted and measured time of a program.

    Attributes:
        name: name of the program.
        predicted: predicted seconds.
        measured: median of the measured seconds.
        nodes: number of ops.
        flops: floating-point operations.
    """

    name: str
    predicted: float
    measured: float
    nodes: int
    flops: float

    @property
    def error(self) -> float:
        """Relative error of the prediction, as a fraction of the measured time."""
        return abs(self.predicted - self.measured) / self.measured


@attrs.frozen
class Validation:
    """Comparisons of all programs, with statistics. Errors are fractions of the measured time."""

    comparisons: tuple[Comparison, ...]

    @property
    def median_error(self) -> float:
        """Return the median relative error."""
        return statistics.median(c.error for c in self.comparisons)

    @property
    def p90_error(self) -> float:
        """Return the 90th percentile of the relative error."""
        return float(np.quantile([c.error for c in self.comparisons], 0.9))

    @property
    def r2_log(self) -> float:
        """Return R² of the logarithm of time."""
        measured = np.log([c.measured for c in self.comparisons])
        residuals = measured - np.log([c.predicted for c in self.comparisons])
        spread = float(np.sum((measured - measured.mean()) ** 2))
        return 1.0 - float(np.sum(residuals**2)) / spread if spread else math.nan


@attrs.define
class _RunningProgram:
    """A program on the device, with its measured times."""

    workload: Workload
    step: Callable[[], object]
    result: PipelineResult
    repeats: int
    seconds: list[float] = attrs.field(factory=list)

    def measure(self, clock: Clock) -> None:
        """Measure repeated steps, so that caches are in the state of steady operation, and store the time of a step."""
        self.seconds.append(seconds_of(self.loop, clock) / self.repeats)

    def loop(self) -> list[object]:
        """Run the step several times, and return the results."""
        return [self.step() for _ in range(self.repeats)]


def validate_session(
    rounds: int = 3,
    *,
    processor_time: bool = False,
    only: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Validation:
    """Measure programs on the executor of the open session, and compare the times with predictions.

    Calibration and measurement alternate, because the speed of a machine changes with time.

    Args:
        rounds: how often each probe and each program is timed.
        processor_time: True to measure the executor's processor time instead of elapsed time.
        only: parts of program names. If given, only programs whose names contain one of them are measured.
        report: called with messages about the progress.

    Raises:
        ConfigurationError: no program is left to validate, or no cost model can be calibrated.
    """
    selected = [w for w in workloads() if not only or any(part in w.name for part in only)]
    models = calibrated_models(client.registry().cost_models)
    if not selected or not models:
        raise ConfigurationError(
            "no cost model in use can be calibrated: see `djinn plugins`"
            if selected
            else f"no program of `djinn validate` has any of {', '.join(only)} in its name"
        )
    device = torch.device(DEVICE)
    with measuring(processor_time=processor_time) as clock:
        bench = Bench(clock, device, models, report=report)
        running = []
        for workload in selected:
            report(workload.name)
            running.append(_start(workload, device, clock))
        for _ in range(rounds):
            bench.round()
            with without_collection():
                for program in running:
                    report(program.workload.name)
                    program.measure(clock)
        calibration, idle = Calibration("validation", models=bench.fit()), statistics.median(bench.idle)
        return Validation(tuple(_compare(program, calibration, idle) for program in running))


def _start(workload: Workload, device: torch.device, clock: Clock) -> _RunningProgram:
    """Build a program, run it once, and plan its second run."""
    step = workload.build(device)
    seconds_of(step, clock)
    with djinn.capture() as program:
        results = step()
    result = djinn.plan(program, until="place")
    djinn.synchronize()
    del results
    repeats = max(1, min(_REPEATS, int(_LOOP_SECONDS / max(seconds_of(step, clock), 1e-6))))
    running = _RunningProgram(workload, step, result, repeats)
    warm_up(running.loop, clock)  # the loop is another program than the step
    return running


def _compare(program: _RunningProgram, calibration: Calibration, idle: float) -> Comparison:
    result, idle = program.result, idle / program.repeats
    device = attrs.evolve(result.topology.devices[0], calibration=calibration)
    topology = attrs.evolve(result.topology, devices=(device,))
    costs = estimate(result.graph, client.registry().cost_models, topology).by_device[device.id]
    nodes = result.plan.nodes if result.plan is not None else range(len(result.graph.nodes))
    predicted, flops = sum(costs[node].seconds for node in nodes), sum(costs[node].flops for node in nodes)
    median = statistics.median(program.seconds)
    return Comparison(program.workload.name, predicted, max(median - idle, median / 4), len(nodes), flops)
