"""Predicted against measured time of whole schedules on two executors: a check of the simulator.

The device is calibrated in the same run. Programs of several kinds and sizes are placed by several policies, and run
until their plan is cached. The measured time is from sending the first part to the last reply, minus that of a program
without ops. The predicted time is `simulate` of the same plan with measured links.

Each executor is bound to a core, as on separate machines: Linux often puts two new processes on one core for
milliseconds.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import psutil
import torch
from torch import nn

import djinn
from djinn.testing.session import executor_processes
from djinn_client.runtime import client
from djinn_client.runtime.planning.calibrations import store_calibration
from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.ir.result import PipelineResult
from djinn_core.planning.stages.simulate import simulated
from djinn_costs.roofline.calibration.calibrate import Bench, calibrated_models
from djinn_costs.roofline.calibration.measuring import measuring
from djinn_costs.roofline.calibration.session import open_session
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, main

REMOTE = "remote_accelerator:0"
Step = Callable[[], object]
HALVES = (("first", "0"), ("second", "1"))


@attrs.frozen
class Program:
    """A program. `build` makes a model and its inputs. The program runs locally, for its result, and remotely."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


@attrs.frozen
class Way:
    """Programs to run with settings for placement and scheduling."""

    settings: Mapping[str, object]
    programs: tuple[Program, ...]


class Halves(nn.Module):
    """Two halves in sequence. The input is split into `parts` parts, which can run as a pipeline."""

    def __init__(self, half: Callable[[], nn.Module], parts: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.parts = half(), half(), parts

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.second(self.first(part)) for part in data.chunk(self.parts)])


class Branches(nn.Module):
    """Two branches whose results are combined."""

    def __init__(self, branch: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.sides = nn.ModuleList(branch() for _ in range(2))
        self.head = nn.Linear(2 * width, 16)

    def forward(self, *data: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([side(x).mean(1) for side, x in zip(self.sides, data, strict=True)], -1))


def encoder(width: int, layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers)

    return make


def perceptron(width: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])


def convolutions(width: int, layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        parts = [(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(layers)]
        return nn.Sequential(*[m for part in parts for m in part])

    return make


def branches(width: int, layers: int, tokens: int) -> Program:
    shape = (2, tokens, width)
    return Program(
        f"branches of {layers}x{width}, {tokens} tokens",
        lambda: (Branches(encoder(width, layers), width), (torch.randn(shape), torch.randn(shape))),
    )


def chain(kind: str, half: Callable[[], nn.Module], shape: Sequence[int], parts: int = 1) -> Program:
    name = f"{kind}, {'x'.join(map(str, shape))}" + (f" in {parts} parts" if parts > 1 else "")
    return Program(name, lambda: (Halves(half, parts), (torch.randn(*shape),)))


def llama(width: int, layers: int, tokens: int) -> Program:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            vocab_size=1000,
            use_cache=False,
        )
        return Hidden(LlamaModel(config)), (torch.randint(0, 1000, (1, tokens)),)

    return Program(f"Llama of {layers}x{width}, {tokens} tokens", build)


class Hidden(nn.Module):
    """A transformers model that returns its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state: torch.Tensor = self.model(tokens).last_hidden_state
        return state


def ways(small: bool) -> tuple[Way, ...]:
    if small:
        return (
            Way({"placement_policy": "pinned", "pins": HALVES}, (chain("perceptrons", perceptron(64, 2), (8, 64)),)),
        )
    return (
        Way(
            {"placement_policy": "cost_based", "scheduler": "parallel"},
            (branches(128, 2, 64), branches(256, 4, 128), branches(384, 6, 196), llama(256, 4, 1), llama(512, 4, 64)),
        ),
        Way(
            {"placement_policy": "pinned", "scheduler": "pipeline", "pins": HALVES},
            (
                chain("perceptrons", perceptron(512, 4), (64, 512)),
                chain("perceptrons", perceptron(1024, 4), (256, 1024), parts=4),
                chain("convolutions", convolutions(32, 4), (4, 32, 64, 64)),
                chain("convolutions", convolutions(64, 4), (8, 64, 48, 48), parts=4),
                chain("encoders", encoder(256, 3), (2, 128, 256)),
                chain("encoders", encoder(256, 3), (8, 128, 256), parts=4),
            ),
        ),
        Way(
            {"placement_policy": "round_robin"},
            (chain("encoders in turns", encoder(256, 2), (2, 64, 256)), llama(256, 2, 16)),
        ),
    )


@attrs.define
class Watch(Observer):
    """Observer that records the times at which the first part of a program was sent and the last reply arrived."""

    name = "watch"
    events = frozenset({"submitted", "completed"})

    began: float = 0.0
    ended: float = 0.0

    def observe(self, event: Event) -> None:
        if event.name == "submitted" and not self.began:
            self.began = event.seconds
        elif event.name == "completed":
            self.ended = event.seconds

    def seconds_of(self, step: Step) -> float:
        """Return the seconds from the first sent part of `step` to the last reply."""
        djinn.synchronize()
        output = step()
        self.began = self.ended = 0.0
        djinn.synchronize()
        del output
        return self.ended - self.began


@attrs.define
class Compared:
    """A program with its plan (`result`), its step, and the measured seconds of each run."""

    name: str
    result: PipelineResult
    step: Step
    measured: list[float] = attrs.field(factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return abs(self.predicted() - self.seconds) / self.seconds

    def predicted(self) -> float:
        """Return the simulated time of the plan. Each input is already on the devices that need it."""
        placement = self.result.placement
        assert placement is not None
        resident = {v: placement.values[v] for v in self.result.graph.inputs}
        return simulated(self.result, resident=resident, copies=placement.copies).seconds


@contextmanager
def calibrations_of_its_own() -> Iterator[None]:
    """Store calibrations of devices in a temporary folder during the block."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def calibrate(effort: Effort) -> None:
    """Calibrate the device of an executor for all cost models, and store the result."""
    open_session(executors=1, threads=effort.threads)
    models = calibrated_models(client.registry().cost_models)
    if not models:
        raise CannotMeasureError("no cost model can be calibrated: install plugins/costs")
    with measuring() as clock:
        bench = Bench(clock, torch.device(REMOTE), models)
        for _ in range(min(effort.rounds, 3)):
            bench.round()
        device = client.device()
    assert device is not None
    store_calibration(device, bench.fit())


@torch.no_grad()
def prepare(program: Program, watch: Watch) -> Compared:
    """Return a program on the connected executors, whose result equals the local one and whose plan is cached."""
    torch.manual_seed(0)
    model, inputs = program.build()
    model = model.eval()
    expected = model(*inputs)
    there, input_tensor = model.to(REMOTE), [x.to(REMOTE) for x in inputs]

    @torch.no_grad()
    def step() -> torch.Tensor:
        return there(*input_tensor)

    torch.testing.assert_close(step().cpu(), expected)
    with client.record_plans() as plans:
        for _ in range(4):
            watch.seconds_of(step)
    assert plans, "inputs are where they were not before, so that there is a new plan"
    return Compared(program.name, plans[-1], step)


def own_cores() -> None:
    """Bind each executor to a core, if there are enough cores and the platform supports it."""
    processes = [psutil.Process(number) for number in executor_processes()]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= len(processes):
        for process, core in zip(processes, cores, strict=False):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def compared(way: Way, effort: Effort) -> list[Compared]:
    """Return the programs of `way` with measured seconds, from which the time of a program without ops is subtracted."""
    djinn.shut_down()
    djinn.configure(executors=2, threads=effort.threads, **way.settings)
    djinn.init()
    own_cores()
    watch = Watch()
    with client.observed_by(watch):
        running = [prepare(program, watch) for program in way.programs]
        idle = statistics.median(watch.seconds_of(lambda: None) for _ in range(effort.times(20)))
        for _ in range(effort.rounds):
            for item in running:
                item.measured += [max(watch.seconds_of(item.step) - idle, idle / 4) for _ in range(effort.times(8))]
    return running


def r2_log(found: Sequence[Compared]) -> float:
    """Return R² of the logarithms of the predicted seconds."""
    log_seconds = [math.log(item.seconds) for item in found]
    residual = sum((m - math.log(item.predicted())) ** 2 for m, item in zip(log_seconds, found, strict=True))
    spread = sum((m - statistics.fmean(log_seconds)) ** 2 for m in log_seconds)
    return 1.0 - residual / spread if spread else math.nan


def predicted(effort: Effort) -> Outcome:
    """Return the median relative error of all predictions."""
    try:
        with calibrations_of_its_own():
            if not effort.small:
                calibrate(effort)
            results = [item for way in ways(effort.small) for item in compared(way, effort)]
            for item in results:
                print(
                    f"    {item.name:40} predicted {item.predicted() * 1e3:8.2f} ms, measured {item.seconds * 1e3:8.2f}"
                )
            errors = sorted(item.error for item in results)
    finally:
        djinn.shut_down()
        djinn.configure()
    median = statistics.median(errors)
    figures = {
        "programs": len(errors),
        "largest error": errors[-1],
        "r2_log": r2_log(results),
    }
    return Outcome(median, figures)


CASES = (Case("predicted", 0.15, predicted),)

if __name__ == "__main__":
    main("Predicted time of schedules", CASES)
