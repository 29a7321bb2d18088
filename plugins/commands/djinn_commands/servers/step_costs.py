"""Costs of a step on the configured device, and the step size from which a remote device saves time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

REMOTE = "remote_accelerator:0"
OPS, WARM_STEPS, STEPS = 100, 8, 20  # ops per step; untimed steps, until the executor knows the program; timed steps
SIDE = 1024  # side of the matrices that compare the speed of both machines
TOLERATED = 0.1  # share of a step's time that a read may cost


@attrs.frozen
class StepCosts:
    """Measured costs of a step of `OPS` small ops, and seconds of a matrix product on both machines.

    Attributes:
        read: seconds that a step with one read takes in addition to its device time.
        record: processor seconds of the client per step.
        here: seconds of a product of two `SIDE` x `SIDE` matrices on this machine.
        there: seconds of this product on the device.
    """

    read: float
    record: float
    here: float
    there: float

    @property
    def min_step_seconds(self) -> float:
        """Return the device seconds of a step of which a read costs the share `TOLERATED`. Shorter steps lose more."""
        return self.read / TOLERATED

    @property
    def break_even_seconds(self) -> float | None:
        """Return the local seconds of a step that takes as long on the device, with one read.

        Longer steps are faster on the device. Return None if it is never faster.
        """
        gain = 1.0 - self.there / self.here
        return self.read / gain if gain > TOLERATED else None  # a smaller gain is noise


def describe(costs: StepCosts) -> list[str]:
    """Return the costs as sentences for the user."""
    milliseconds = f"{costs.read * 1e3:.1f} ms"
    lines = [
        f"A step that reads a value takes {milliseconds} longer, for the link and for Djinn. The client records {OPS} ops in {costs.record * 1e3:.1f} ms.",
        f"If a step takes less than {costs.min_step_seconds * 1e3:.0f} ms on the device, a read costs more than {TOLERATED:.0%} of it. Read values every few steps to save time.",
    ]
    speeds = f"A product of two {SIDE} x {SIDE} matrices takes {costs.here * 1e3:.1f} ms on this machine and {costs.there * 1e3:.1f} ms on the device"
    if costs.break_even_seconds is None:
        return [*lines, f"{speeds}. The device is not faster than this machine."]
    break_even = f"{costs.break_even_seconds * 1e3:.1f} ms"
    return [*lines, f"{speeds}. Steps that take more than {break_even} on this machine are faster on the device."]


def measure() -> StepCosts:
    """Measure this machine and `remote_accelerator:0`. This takes about a second, and the time to open a session."""
    import torch

    import djinn

    djinn.init()
    small = torch.ones(16, device=REMOTE)
    large = torch.rand(SIDE, SIDE)
    far = large.to(REMOTE)

    def step() -> None:
        _small_ops(small).item()

    read, record = _times(step, _executor_seconds)
    here, _ = _times(lambda: large @ large, lambda: 0.0)
    busy = _executor_seconds()
    for number in range(WARM_STEPS + STEPS):
        (far @ far)[0, 0].item()
        if number == WARM_STEPS - 1:
            busy = _executor_seconds()
    there = (_executor_seconds() - busy) / STEPS
    return StepCosts(read, record, here, there)


def _small_ops(value: torch.Tensor) -> torch.Tensor:
    for _ in range(OPS - 1):
        value = value + 1.0
    return value.sum()


def _times(step: Callable[[], object], excluded_seconds: Callable[[], float]) -> tuple[float, float]:
    """Measure a step. Return its median seconds minus the growth of `excluded_seconds`, and its median processor seconds.

    `excluded_seconds`: function that returns a running total of seconds to subtract.
    """
    walls, processor = [], []
    for number in range(WARM_STEPS + STEPS):
        busy, began, processor_start = excluded_seconds(), time.perf_counter(), time.process_time()
        step()
        if number >= WARM_STEPS:
            processor.append(time.process_time() - processor_start)
            walls.append(time.perf_counter() - began - (excluded_seconds() - busy))
    return max(0.0, statistics.median(walls)), statistics.median(processor)


def _executor_seconds() -> float:
    import djinn

    return djinn.stats()["server_execute_us"] / 1e6
